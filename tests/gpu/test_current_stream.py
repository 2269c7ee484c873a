"""Which stream is current afterwards: whoever makes another one current for a while restores what was, however it came.

CuPy's `with stream` ends on the stream whose context is around it, and not on one that `use` has made current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._engine import Version
from ddp.autograd import Function
from ddp.checkpoint.snapshot import Snapshot
from ddp.checkpoint.state import ArraySource


def in_a_context(s: Any) -> Iterator[None]:
    with ddp.cuda.stream(s):
        yield


def set_for_good(s: Any) -> Iterator[None]:
    ddp.cuda.set_stream(s)
    yield
    ddp.cuda.set_stream(ddp.cuda.default_stream())


@pytest.fixture(params=[in_a_context, set_for_good])
def current(gpu: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A stream that is the current one."""
    s = ddp.cuda.Stream()
    scope = request.param(s)
    next(scope)
    yield s
    next(scope, None)
    assert ddp.cuda.current_stream() == ddp.cuda.default_stream()


def captured() -> None:
    x = ddp.ones(3, device="cuda")
    with ddp.cuda.graph(ddp.cuda.CUDAGraph()):
        x * 2


def refused() -> None:
    with pytest.raises(ZeroDivisionError), ddp.cuda.graph(ddp.cuda.CUDAGraph()):
        raise ZeroDivisionError


def graphed() -> None:
    step = ddp.cuda.graphed_step(lambda x: x * 2, warmup=2)
    for _ in range(4):
        step(ddp.ones(3, device="cuda"))
        assert ddp.cuda.current_stream() != ddp.cuda.default_stream()


def copied_beside() -> None:
    array, version = ddp.ones(1 << 18, device="cuda").array, Version()
    snapshot = Snapshot([ArraySource(name="x", array=array, version=version)], {id(version)}, {})
    snapshot.copy()
    snapshot.wait()


WAYS: list[Callable[[], object]] = [
    lambda: ddp.ones(3, 2, device="cuda").t().cpu(),
    lambda: ddp.ones(3, 2, device="cuda").t().tolist(),
    lambda: ddp.ones(3, 2, device="cuda").t().numpy(force=True),
    lambda: repr(ddp.ones(3, 2, device="cuda").t()),
    lambda: ddp.ones(3, 2, device="cuda").t().to("cpu", non_blocking=True),
    captured,
    refused,
    graphed,
    copied_beside,
]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_it_was(gpu: Any, current: Any, way: Callable[[], object]) -> None:
    way()
    assert ddp.cuda.current_stream() == current
    way()
    assert ddp.cuda.current_stream() == current


def test_backward_goes_on_where_it_was(gpu: Any) -> None:
    """Whatever a backward of the user's own leaves current."""

    class Astray(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            with gpu.cupy.cuda.Stream(non_blocking=True):
                pass
            return g * 2

    s = ddp.cuda.Stream()
    x = ddp.ones(3, device="cuda", requires_grad=True)
    with ddp.cuda.stream(s):
        y = Astray.apply(x.sin()).sum()
    gpu.log.clear()
    y.backward()
    assert {queue for queue, what in gpu.log if what == "cos"} == {gpu.machine.queues[s.cuda_stream].name}
    np.testing.assert_allclose(x.grad.tolist(), 2 * np.cos(np.ones(3)), rtol=1e-5)
