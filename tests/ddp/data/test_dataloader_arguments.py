"""What a DataLoader takes."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from ddp.data import DataLoader
from ddp.data.dataloader import start_method
from ddp.errors import ArgumentError
from tests.ddp.data.samples import Squares, Stream

BAD = [
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": -1}, "batch_size"),
    ({"batch_size": 1.5}, "batch_size"),
    ({"batch_size": None, "drop_last": True}, "drop_last"),
    ({"sampler": [1], "shuffle": True}, "shuffle"),
    ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler"),
    ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler"),
    ({"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler"),
    ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler"),
    ({"num_workers": -1}, "num_workers"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 1}, "timeout"),
    ({"prefetch_factor": 2}, "prefetch_factor"),
    ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor"),
    ({"persistent_workers": True}, "persistent_workers"),
    ({"num_workers": "2"}, "num_workers"),
    ({"num_workers": 1.0}, "num_workers"),
    ({"num_workers": True}, "num_workers"),
    ({"num_workers": None}, "num_workers"),
    ({"batch_size": "4"}, "batch_size"),
    ({"num_workers": 1, "timeout": "5"}, "timeout"),
    ({"num_workers": 1, "timeout": float("inf")}, "timeout"),
    ({"num_workers": 1, "timeout": float("nan")}, "timeout"),
    ({"num_workers": 1, "timeout": 1e12}, "timeout"),
    ({"multiprocessing_context": "fork"}, "MPI, CUDA"),
    ({"multiprocessing_context": "thread"}, "'thread'"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=str)
def test_what_excludes_each_other_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DataLoader(Squares(4), **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}], ids=str)
def test_a_stream_has_its_own_order(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="IterableDataset"):
        DataLoader(Stream(4), **options)


def test_pytorch_refuses_the_same() -> None:
    data = pytest.importorskip("torch.utils.data")
    for options, _ in BAD:
        if options.get("batch_size") == 1.5 or "timeout" in options or "multiprocessing_context" in options:
            continue  # it takes these, or forks
        if options.get("prefetch_factor") == 0 or any(isinstance(each, str) for each in options.values()):
            continue  # it fails later
        if options.get("num_workers", 0) in (None, True):
            continue  # as above, and True is 1 there
        with pytest.raises(ValueError, match=r"\w"):
            data.DataLoader(Squares(4), **options)


def test_attributes_are_what_was_given() -> None:
    loader = DataLoader(Squares(4), 2, True, num_workers=2, timeout=3)
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.timeout) == (2, 2, 2, 3)
    assert loader.batch_sampler.sampler is loader.sampler
    assert DataLoader(Squares(4)).prefetch_factor is None


def test_how_workers_start() -> None:
    assert start_method(None) == start_method("forkserver") == "forkserver"
    assert start_method(multiprocessing.get_context("spawn")) == "spawn"
