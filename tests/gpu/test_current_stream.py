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


def test_contexts_of_cupy_end_on_ours(gpu: Any) -> None:
    s, other = ddp.cuda.Stream(), gpu.cupy.cuda.Stream(non_blocking=True)
    with ddp.cuda.stream(s):
        with other:
            pass
        assert ddp.cuda.current_stream() == s
    with other:
        with ddp.cuda.stream(s):
            pass
        assert ddp.cuda.current_stream().cuda_stream == other.ptr


def test_streams_within_a_capture_end_on_the_captured_one(gpu: Any) -> None:
    for side in (ddp.cuda.stream(ddp.cuda.Stream()), gpu.cupy.cuda.Stream(non_blocking=True)):
        with ddp.cuda.graph(ddp.cuda.CUDAGraph()):
            before = ddp.cuda.current_stream()
            with side:
                pass
            assert ddp.cuda.current_stream() == before


def test_streams_within_a_warm_up_end_on_that_of_the_step(gpu: Any) -> None:
    met = []

    @ddp.cuda.graphed_step  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        met.append(ddp.cuda.current_stream())
        with gpu.cupy.cuda.Stream(non_blocking=True):
            pass
        met.append(ddp.cuda.current_stream())
        return x * 2

    step(ddp.ones(3, device="cuda"))
    assert met[0] == met[1] != ddp.cuda.current_stream()


def test_of_two_devices(gpu: Any) -> None:
    first, second = ddp.cuda.Stream(0), ddp.cuda.Stream(1)
    ddp.cuda.set_stream(first)
    with ddp.cuda.stream(second):
        with ddp.cuda.stream(ddp.cuda.default_stream(0)):
            assert ddp.cuda.current_stream(1) == second
        assert ddp.cuda.current_device() == 1
        assert ddp.cuda.current_stream() == second
    assert ddp.cuda.current_device() == 0
    assert ddp.cuda.current_stream() == first
    assert ddp.cuda.current_stream(1) == ddp.cuda.default_stream(1)
    ddp.cuda.set_stream(ddp.cuda.default_stream(0))


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
