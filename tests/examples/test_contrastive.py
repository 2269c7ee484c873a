"""The contrastive example: n ranks, each with its shard, have the gradients of one process with the whole batch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp.nn import functional as F
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
if importlib.util.find_spec("sklearn") is None:  # the import would take a second
    pytest.skip("scikit-learn is not installed", allow_module_level=True)


@pytest.fixture
def example(monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("contrastive")


def make_net(example: Any) -> Any:
    ddp.manual_seed(1)
    return example.Halves(width=32, dim=16).double()


def whole_batch(net: Any, images: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """CLIP's loss as its paper has it: both directions over one matrix of similarities."""
    left, right = net(ddp.from_numpy(images))
    similar = left @ right.T * net.scale.exp()
    partners = ddp.arange(len(images))
    loss = (F.cross_entropy(similar, partners) + F.cross_entropy(similar.T, partners)) / 2
    loss.backward()
    return loss.item(), gradients(net)


def gradients(net: Any) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy().copy() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("images", [50, 3])  # 3: on four ranks one has none
def test_shards_have_the_gradients_of_the_whole_batch(example: Any, size: int, images: int) -> None:
    batch = example.load_digits(0, "float64")[0][:images]
    loss, expected = whole_batch(make_net(example), batch)
    assert len(expected) == 9

    def rank(comm: Communicator) -> tuple[float, dict[str, np.ndarray]]:
        net = make_net(example)
        model = ddp.DataParallel(net, comm)
        mine = np.array_split(batch, comm.size)[comm.rank]
        share = example.loss_sum(model, net.scale, ddp.from_numpy(mine), comm)
        model.backward(share, weight=len(mine))
        return share.item(), gradients(net)

    ranks = collectives.run_threads(rank, size)
    assert_allclose(sum(share for share, _ in ranks) / images, loss, rtol=0, atol=1e-12)
    for _, got in ranks:
        assert got.keys() == expected.keys()
        for name, wanted in expected.items():
            assert np.abs(wanted).max() > 1e-6
            assert_allclose(got[name], wanted, rtol=0, atol=1e-10, err_msg=name)
