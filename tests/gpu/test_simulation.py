"""Programs on streams that lag as CUDA lets them are right in every order; with a bug planted, some order is wrong.

A simulation that finds no planted bug would prove nothing. With collectives beside them: `tests/ddp/parallel/gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp._cuda import stream_order
from ddp.cuda.streams import Event
from tests.gpu.installing import Gpu, forget

ROWS, BATCH, WIDTH = 24, 4, 8


def reuse_memory() -> None:
    """What a program does besides: takes memory that became free, and writes to it."""
    for shape in ((), (WIDTH,), (BATCH, WIDTH)):
        ddp.empty(shape, dtype=ddp.float64, device="cuda").fill_(1e6)


def batches() -> Any:
    """Batches come by the loader's own stream."""
    data = ddp.arange(ROWS * WIDTH, dtype=ddp.float64).reshape(ROWS, WIDTH)
    total = ddp.zeros(WIDTH, dtype=ddp.float64, device="cuda")
    for (x,) in ddp.data.DataLoader(ddp.data.TensorDataset(data), BATCH, pin_memory=True):
        total += x.sum(0)
        del x
        reuse_memory()
    return total.tolist(), data.sum(0).tolist()


def fetched() -> Any:
    """Losses are fetched, and read later."""
    losses = []
    for step in range(4):
        losses.append(ddp.cuda.fetch((ddp.ones(WIDTH, device="cuda") * step).sum()))
        reuse_memory()
    return [loss.value() for loss in losses], [WIDTH * step for step in range(4)]


def on_a_side_stream() -> Any:
    """A part of forward, and so of backward, runs on a stream of the user's, with memory that nobody keeps."""
    side = ddp.cuda.Stream()
    here = ddp.cuda.current_stream()
    x = ddp.full((BATCH, WIDTH), 3.0, dtype=ddp.float64, device="cuda").requires_grad_()
    square = x * x
    side.wait_stream(here)
    with ddp.cuda.stream(side):
        square.detach().record_stream(side)
        result = square * 2.0
    del square
    reuse_memory()
    here.wait_stream(side)
    result.detach().record_stream(here)
    (result * result).sum().backward()
    reuse_memory()
    assert x.grad is not None
    return x.grad.tolist(), [[16.0 * 27.0] * WIDTH] * BATCH


PROGRAMS: list[Callable[[], Any]] = [batches, fetched, on_a_side_stream]


def is_right(program: Callable[[], Any], seed: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        Gpu(patch, seed, devices=1)
        try:
            got, expected = program()
        finally:
            forget()
    return bool(got == expected)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_order_that_cuda_allows_is_right(program: Callable[[], Any], count: Callable[[int, int], int]) -> None:
    for seed in range(count(3, 30)):
        assert is_right(program, seed), f"seed {seed}"


def skip(owner: Any, name: str, file: str, function: str = "") -> Callable[[pytest.MonkeyPatch], None]:
    """`owner.name` does nothing when it is called from there."""
    whole = getattr(owner, name)

    def partial(*args: Any, **kwargs: Any) -> Any:
        code = sys._getframe(1).f_code
        there = code.co_filename.endswith(file) and function in ("", code.co_name)
        return None if there else whole(*args, **kwargs)

    return lambda monkeypatch: monkeypatch.setattr(owner, name, partial)


def give_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_order, "record", lambda array, stream: None)


PLANTED: dict[str, tuple[Callable[[], Any], Callable[[pytest.MonkeyPatch], None]]] = {
    "a batch is read before it is there": (
        batches,
        skip(stream_order.DeviceStream, "wait", "device_prefetcher.py", "__next__"),
    ),
    "a batch is written to memory that is still read": (
        batches,
        skip(stream_order.DeviceStream, "wait_for", "device_prefetcher.py", "_send"),
    ),
    "pinned memory is written to under a copy": (batches, skip(stream_order, "keep_alive", "device_prefetcher.py")),
    "a loss is read before it is there": (fetched, lambda m: m.setattr(Event, "synchronize", lambda self: None)),
    "memory that a side stream reads is given away": (on_a_side_stream, give_away),
    "backward crosses streams without an edge": (
        on_a_side_stream,
        skip(stream_order.DeviceStream, "wait", "stream_sync.py"),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plant = PLANTED[bug]
    plant(monkeypatch)
    assert not all(is_right(program, seed) for seed in range(200))
