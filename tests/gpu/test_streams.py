"""Streams and events: what runs where, what waits for what, and that backward follows, in every order CUDA allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError, CudaError
from tests.gpu import simulated

in_any_order = pytest.mark.parametrize("gpu", simulated(12), indirect=True)


class TestStreams:
    def test_what_is_current(self, gpu: Any) -> None:
        default = ddp.cuda.default_stream()
        assert ddp.cuda.current_stream() == default
        s = ddp.cuda.Stream()
        assert s != default
        assert s.device == ddp.device("cuda:0")
        with ddp.cuda.stream(s):
            assert ddp.cuda.current_stream() == s
            assert gpu.cupy.cuda.get_current_stream().ptr == s.cuda_stream
            with ddp.cuda.stream(None):
                assert ddp.cuda.current_stream() == s
            with ddp.cuda.stream(default):
                assert ddp.cuda.current_stream() == default
            assert ddp.cuda.current_stream() == s
        assert ddp.cuda.current_stream() == default

    def test_set_stream(self, gpu: Any) -> None:
        s = ddp.cuda.Stream(1)
        ddp.cuda.set_stream(s)
        assert ddp.cuda.current_device() == 1
        assert ddp.cuda.current_stream() == s
        assert ddp.cuda.current_stream(0) == ddp.cuda.default_stream(0)
        ddp.cuda.set_stream(ddp.cuda.default_stream(0))
        assert ddp.cuda.current_device() == 0
        ddp.cuda.set_stream(ddp.cuda.default_stream(1))
        ddp.cuda.set_device(0)

    def test_by_handle(self, gpu: Any) -> None:
        s = ddp.cuda.Stream()
        same = ddp.cuda.ExternalStream(s.cuda_stream)
        assert same == s
        assert hash(same) == hash(s)
        assert ddp.cuda.get_stream_from_external(s.cuda_stream, "cuda:0") == s
        with ddp.cuda.stream(same):
            assert ddp.cuda.current_stream() == s
        assert same.__cuda_stream__() == (0, s.cuda_stream)
        with ddp.cuda.stream(gpu.cupy.cuda.Stream(non_blocking=True)):  # type: ignore[arg-type]  # CuPy's own
            assert ddp.cuda.current_stream() != ddp.cuda.default_stream()


class TestEvents:
    def test_time(self, gpu: Any) -> None:
        start = ddp.cuda.Event(enable_timing=True)
        end = ddp.cuda.Event(enable_timing=True)
        with pytest.raises(ArgumentError, match="this event was not recorded"):
            start.elapsed_time(end)
        start.record()
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) >= 0
        with pytest.raises(ArgumentError, match="enable_timing=True"):
            start.elapsed_time(ddp.cuda.Event())

    def test_the_host_waits_only_where_it_says(self, gpu: Any) -> None:
        s = ddp.cuda.Stream()
        event = ddp.cuda.Event()
        x = ddp.ones(4, device="cuda")
        gpu.reset()
        s.wait_stream(ddp.cuda.current_stream())
        with ddp.cuda.stream(s):
            x * 2
            event.record()
        event.wait()
        x.record_stream(s)
        event.query()
        s.query()
        assert not gpu.synchronizations
        s.synchronize()
        event.synchronize()
        ddp.cuda.synchronize()
        assert sum(gpu.synchronizations.values()) == 3


def network(x: Any, weights: list[Any], scopes: list[Any]) -> Any:
    """Two branches that meet: the first in scopes[0], the second in scopes[1], what follows in scopes[2]."""

    def inside(at: int, call: Any) -> Any:
        s = scopes[at]
        if s is None:
            return call()
        s.wait_stream(ddp.cuda.current_stream())
        with ddp.cuda.stream(s):
            y = call()
        ddp.cuda.current_stream().wait_stream(s)
        return y

    a = inside(0, lambda: (x @ weights[0]).relu() * weights[2])
    b = inside(1, lambda: (x @ weights[1]).exp() + x.chunk(2, 1)[0].sum())
    return inside(2, lambda: (a * b + weights[2]).sum())


def leaves(where: str) -> list[Any]:
    dice = np.random.default_rng(5)
    return [
        ddp.from_numpy(dice.standard_normal(shape).astype("f4") / 3).to(where).requires_grad_()
        for shape in ((6, 4), (4, 5), (4, 5), (6, 5))
    ]


def gradients(where: str, scopes: list[Any]) -> list[Any]:
    x, *weights = leaves(where)
    for _ in range(2):  # so that memory is used again
        network(x, weights, scopes).backward()
    if where == "cpu":
        return [p.grad.numpy() for p in (x, *weights)]
    sums = [p.grad * 1 for p in (x, *weights)]  # read on the stream that backward was called on, which may be at once
    ddp.cuda.synchronize()
    return [each.cpu().numpy() for each in sums]


class TestBackward:
    @in_any_order
    @pytest.mark.parametrize("which", ["first", "second", "both", "all", "loss"])
    def test_it_runs_on_the_streams_of_forward(self, gpu: Any, which: str) -> None:
        s, t, u = (ddp.cuda.Stream() for _ in range(3))
        scopes = {
            "first": [s, None, None],
            "second": [None, t, None],
            "both": [s, t, None],
            "all": [s, t, u],
            "loss": [None, None, u],
        }[which]
        for one, other in zip(gradients("cuda", scopes), gradients("cpu", [None] * 3), strict=True):
            assert_allclose(one, other, rtol=2e-5, atol=1e-6)


class TestFaults:
    @pytest.fixture
    def broken(self, gpu: Any) -> Any:
        x = ddp.ones(3, device="cuda")
        gpu.cupy.fault = gpu.cupy.cuda.runtime.CUDARuntimeError(700, "cudaErrorIllegalAddress")
        yield x
        gpu.cupy.fault = None

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("item", lambda x: x[0].item()),
            ("tolist", lambda x: x.tolist()),
            ("copy to the CPU", lambda x: x.cpu()),
            ("item", lambda x: bool(x[0])),
            ("synchronize", lambda x: ddp.cuda.synchronize()),
            ("Stream.synchronize", lambda x: ddp.cuda.current_stream().synchronize()),
        ],
    )
    def test_where_it_comes_to_light(self, broken: Any, name: str, call: Any) -> None:
        with pytest.raises(CudaError, match="cudaErrorIllegalAddress") as raised:
            call(broken)
        assert str(raised.value).startswith(f"{name}: ")
        assert "CUDA_LAUNCH_BLOCKING=1" in str(raised.value)
        assert raised.value.status == 700

    def test_with_launch_blocking_the_op_is_named(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        x = ddp.ones(3, 2, device="cuda")
        index = ddp.tensor([1], device="cuda")
        gpu.reset()
        x.exp()
        assert sum(gpu.synchronizations.values()) == 1
        gpu.cupy.fault = gpu.cupy.cuda.runtime.CUDARuntimeError(700, "cudaErrorIllegalAddress")
        with pytest.raises(
            CudaError, match=r"exp: cudaErrorIllegalAddress.*float32 \(3, 2\).*test_streams.py:\d+.*x\.exp"
        ):
            x.exp()
        with pytest.raises(CudaError, match=r"add_: .*float32 \(3, 2\)"):
            x.add_(1)
        with pytest.raises(CudaError, match=r"index_select: .*float32 \(3, 2\), int64 \(1,\)"):
            x.index_select(0, index)
        gpu.cupy.fault = None
