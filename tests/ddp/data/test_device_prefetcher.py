"""Copies to the GPU, on the stand-in for one: what is issued on which stream, in which order, and what waits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._cuda import copies
from ddp._device import device
from ddp._tensor.base import wrap
from ddp.data import DataLoader, device_prefetcher
from ddp.data.device_prefetcher import DevicePrefetcher
from ddp.errors import warn_once
from tests.ddp.data.samples import Squares
from tests.gpu import simulated


class Source:
    """Batches of one tensor of 100 floats."""

    def __init__(self, length: int, fails: int = 99, log: Any = None) -> None:
        self.at = 0
        self.length = length
        self.fails = fails
        self.log = log

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        if self.at == self.fails:
            raise ValueError("no batch")
        self.at += 1
        if self.log is not None:
            self.log.append(("host", f"batch {self.at - 1} is read"))
        return [wrap(np.full(100, self.at - 1, np.float32), ddp.device("cpu")), "word"], self.at

    def ready(self) -> bool:
        return True


def test_the_next_batch_is_copied_while_this_one_is_computed_on(gpu: Any) -> None:
    got = []
    log = gpu.machine.log
    gpu.reset()
    for (batch, word), _ in DevicePrefetcher(Source(4, log=log), device("cuda")):
        log.append(("host", f"step {len(got)}"))
        assert word == "word"
        assert batch.is_cuda
        got.append(ddp.cuda.fetch(batch * 1))
    assert [each.value() for each in got] == [[k] * 100 for k in range(4)]
    compute = "default 0."
    (copying,) = {queue for queue, what in log if what == "copy up"}
    assert copying != compute
    sent = [(compute, "record"), (copying, "wait"), (copying, "copy up"), (copying, "record")]
    assert log[:12] == [
        ("host", "batch 0 is read"),
        *sent,
        ("host", "batch 1 is read"),
        *sent,
        (compute, "wait"),
        ("host", "step 0"),
    ]


@pytest.mark.parametrize("gpu", simulated(3), indirect=True)
def test_in_any_order(gpu: Any) -> None:
    """Steps that are slow or fast, buffers that are written to again, memory that is used again."""
    sums = []
    weight = ddp.full((100,), 2.0, device="cuda")
    for (batch, _), _ in DevicePrefetcher(Source(8), device("cuda")):
        y = batch * weight
        del batch
        sums.append(ddp.cuda.fetch(y + 1))
    assert [each.value() for each in sums] == [[2.0 * k + 1] * 100 for k in range(8)]


@pytest.mark.parametrize("gpu", simulated(3), indirect=True)
def test_a_pass_that_is_left_early(gpu: Any) -> None:
    """The batch that nobody takes is on its way yet when its memory is let go."""
    prefetcher = DevicePrefetcher(Source(8), device("cuda"))
    next(prefetcher)
    del prefetcher
    made = [ddp.full((100,), float(i), device="cuda") * 1 for i in range(6)]
    ddp.cuda.synchronize()
    assert [x.tolist() for x in made] == [[float(i)] * 100 for i in range(6)]


def test_what_is_pinned_is_copied_from_where_it_is(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned(Source):
        def __next__(self) -> Any:
            (x, word), position = super().__next__()
            return [x.pin_memory(), word], position

    pinned = copies.empty_pinned
    made = []
    monkeypatch.setattr(copies, "empty_pinned", lambda *args: made.append(args) or pinned(*args))
    batches = [batch for (batch, _), _ in DevicePrefetcher(Pinned(3), device("cuda:1"))]
    assert len(made) == 3  # by `pin_memory` itself
    assert [batch.device for batch in batches] == [device("cuda:1")] * 3
    with ddp.cuda.device(1):
        assert [batch[7].item() for batch in batches] == [0.0, 1.0, 2.0]


def test_an_error_comes_in_its_place(gpu: Any) -> None:
    prefetcher = DevicePrefetcher(Source(3, fails=1), device("cuda"))
    assert next(prefetcher)[0][0][0].item() == 0
    with pytest.raises(ValueError, match="no batch"):
        next(prefetcher)


def test_the_state_is_that_of_what_was_handed_out(gpu: Any) -> None:
    loader = DataLoader(Squares(8), batch_size=2, pin_memory=True)
    iterator = iter(loader)
    assert loader.state_dict()["batches"] == 0
    x, _ = next(iterator)
    assert x.is_cuda
    state = loader.state_dict()
    assert (state["batches"], state["sampler"]["sampler"]["cursor"]) == (1, 2)
    assert len(list(iterator)) == 3
    assert loader.epoch == 1


def test_nothing_is_held_for_ever(gpu: Any) -> None:
    arrays = []
    gc.disable()  # reference counts alone must free the batches
    try:
        for batch, _ in DataLoader(Squares(8), batch_size=2, pin_memory=True, pin_memory_device="cuda:1"):
            assert batch.device == device("cuda:1")
            arrays.append(weakref.ref(batch.array))
            del batch
        ddp.cuda.synchronize(1)
        assert [array() for array in arrays] == [None] * 4
    finally:
        gc.enable()


def test_without_a_gpu_it_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_prefetcher, "found_cupy", lambda: None)
    warn_once.cache_clear()
    loader = DataLoader(Squares(2), pin_memory=True)
    with pytest.warns(UserWarning, match="there is no GPU"):
        assert len(list(loader)) == 2
    assert len(list(loader)) == 2
