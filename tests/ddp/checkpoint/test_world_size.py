"""A training that goes on at another number of ranks: every sample once, and losses within rounding."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from ddp import nn
from ddp.checkpoint import Checkpointer, load_model
from ddp.optim import SGD, AdamW
from ddp.parallel import ZeroOptimizer, comm_hooks
from tests.ddp.checkpoint.training import ROWS, Interrupted, Loader, data, interrupted, net

EPOCHS = 3


def training(make: Callable[[Any], Any], folder: Path, hook: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """Returns, or is interrupted with, the mean loss over ranks by step, and the ids that this rank has had."""

    def train(comm: collectives.Communicator, end: int | None) -> Any:
        model = ddp.DataParallel(net(dtype=ddp.float64), comm, comm_hook=hook())
        optimizer = make(model)
        xs, ys = data(ddp.float64)
        losses: dict[int, float] = {}
        seen: list[tuple[int, int]] = []
        loader = Loader(comm)
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, every=1) as ckpt:
            for ids in ckpt.resume(loader, epochs=EPOCHS):
                if ckpt.step == end:
                    raise Interrupted((losses, seen))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(xs[ids]), ys[ids])
                loss.backward()
                optimizer.step()
                losses[ckpt.step] = comm.all_reduce(np.array(loss.item()), "mean").item()
                seen += [(loader.epoch, int(each)) for each in ids]
        return losses, seen

    return train


@pytest.mark.parametrize(
    "make",
    [lambda model: SGD(model.parameters(), lr=0.2, momentum=0.9), lambda model: ZeroOptimizer(model, AdamW, lr=0.02)],
    ids=["whole", "sharded"],
)
def test_two_then_one_then_four(make: Callable[[Any], Any], folder: Path) -> None:
    [whole] = interrupted(training(make, folder / "whole"), [None], 2)
    parts = interrupted(training(make, folder / "parts"), [4, 7, None], [2, 1, 4])
    losses: dict[int, float] = {}
    for part in parts:
        assert losses.keys().isdisjoint(part[0][0])
        losses.update(part[0][0])
    assert list(losses) == list(range(9))
    assert_allclose(list(losses.values()), list(whole[0][0].values()), rtol=1e-12)
    seen = Counter(each for part in parts for _, ids in part for each in ids)
    assert seen == Counter((epoch, row) for epoch in range(EPOCHS) for row in range(ROWS))


def test_sharded_state_loads_into_the_whole_optimizer_and_back(folder: Path) -> None:
    def whole(model: Any) -> Any:
        return AdamW(model.parameters(), lr=0.02)

    def sharded(model: Any) -> Any:
        return ZeroOptimizer(model, AdamW, lr=0.02)

    [expected] = interrupted(training(whole, folder / "whole"), [None], 2)
    got: dict[int, float] = {}
    for make, end in ((sharded, 3), (whole, 6), (sharded, None)):
        [part] = interrupted(training(make, folder / "parts"), [end], 2)
        got.update(part[0][0])
    assert got == expected[0][0]


def test_what_hooks_have_left_out_is_kept(folder: Path) -> None:
    """The sum over ranks of what they will still send is the same before and after."""
    results: list[dict[str, float]] = []

    def train(comm: collectives.Communicator, steps: int) -> None:
        hook = comm_hooks.TopK(0.1)
        model = ddp.DataParallel(net(dtype=ddp.float64), comm, comm_hook=hook)
        optimizer = SGD(model.parameters(), lr=0.1)
        xs, ys = data(ddp.float64)
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            ckpt.load()
            for _ in range(steps):
                nn.functional.cross_entropy(model(xs[comm.rank :: comm.size]), ys[comm.rank :: comm.size]).backward()
                optimizer.step()
            left = hook.state_dict()["errors"]
            sums = comm.all_gather_object({name: value.sum().item() for name, value in left.items()})
            if comm.rank == 0:
                names = sorted({name for each in sums for name in each})
                results.append({name: sum(each.get(name, 0.0) for each in sums) for name in names})
            ckpt.save()

    for size, steps in ((3, 4), (2, 0), (4, 0), (1, 0)):
        collectives.run_threads(lambda comm, steps=steps: train(comm, steps), size=size)
    for each in results[1:]:
        assert each == pytest.approx(results[0], rel=1e-12)
    assert any(results[0].values())


def test_one_line_says_what_is_not_as_it_was(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = training(lambda model: SGD(model.parameters(), lr=0.2), folder)
    bare = net(dtype=ddp.float64)
    before = {name: value.numpy().copy() for name, value in bare.state_dict().items()}
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        interrupted(train, [2, 4, None], [2, 3, 2])
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "step-0000000002: saved by 2 ranks and loaded by 3: random numbers of rank 2 begin anew" in texts[0]
    assert "step-0000000004: saved by 3 ranks and loaded by 2: what rank 2 had alone is left out" in texts[1]
    assert not load_model(folder, bare).missing_keys  # one process reads it, whichever wrote it
    assert all((before[name] != value.numpy()).any() for name, value in bare.state_dict().items())
