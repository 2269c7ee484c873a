"""CUDA graphs on the stand-in: what is captured runs at every launch and not before, and what cannot be is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, CaptureError, DeviceError, DtypeError
from ddp.nn import functional as F

STEPS = 8


def test_a_graph_runs_at_replay_and_not_before(gpu: Any) -> None:
    x = ddp.zeros(3, device="cuda")
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g):
        assert ddp.cuda.is_current_stream_capturing()
        y = x * 2 + 1
    assert not ddp.cuda.is_current_stream_capturing()
    assert x.tolist() == [0, 0, 0]
    for value in (1.0, 5.0):
        x.fill_(value)
        g.replay()
        assert y.tolist() == [2 * value + 1] * 3


def test_its_memory_is_given_to_nobody_else(gpu: Any) -> None:
    x = ddp.ones(100, device="cuda")
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g):
        y = ((x * 2) * 3) * 4  # two results on the way are freed
    before = ddp.cuda.memory_allocated()
    others = [ddp.full((100,), 7.0, device="cuda") for _ in range(20)]
    assert ddp.cuda.memory_allocated() >= before + 8000
    g.replay()
    assert all(each.sum().item() == 700 for each in others)
    assert y.sum().item() == 2400


def test_graphs_share_a_pool(gpu: Any) -> None:
    x = ddp.ones(4, device="cuda")
    first, second = ddp.cuda.CUDAGraph(), ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(first):
        y = x + 1
    with ddp.cuda.graph(second, pool=first.pool()):
        z = y + 1
    first.replay()
    second.replay()
    assert z.tolist() == [3, 3, 3, 3]


def test_a_graph_is_used_in_order(gpu: Any) -> None:
    g = ddp.cuda.CUDAGraph()
    for wrong in (g.replay, g.capture_end, g.pool):
        with pytest.raises(CaptureError):
            wrong()
    with pytest.raises(ArgumentError, match="default stream"):
        g.capture_begin()
    with pytest.raises(ArgumentError, match="one of global"):
        g.capture_begin(capture_error_mode="strict")
    with ddp.cuda.graph(g), pytest.raises(CaptureError, match="in a capture already"):
        ddp.cuda.CUDAGraph().capture_begin()
    with pytest.raises(CaptureError, match="reset"), ddp.cuda.graph(g):
        pass
    g.reset()
    with ddp.cuda.graph(g):
        pass
    g.replay()


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu: Any) -> None:
    x = ddp.ones(4, device="cuda")
    g = ddp.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="cannot be part"), ddp.cuda.graph(g):
        (x + 1).sum().item()
    with pytest.raises(ZeroDivisionError), ddp.cuda.graph(g):
        _ = 1 / 0
    assert not ddp.cuda.is_current_stream_capturing()
    with ddp.cuda.graph(g):
        y = x + 1
    g.replay()
    assert y.tolist() == [2, 2, 2, 2]


def test_kernels_are_loaded_in_a_capture(gpu: Any) -> None:
    """Which a thread-local capture forbids, and which is no part of the graph: one of each way to make a kernel."""
    x = ddp.rand(4, 8, device="cuda") + 1
    layer = ddp.nn.LayerNorm(8).to("cuda")
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g):
        y = layer(x).tanh().logsumexp(1)
    g.replay()
    np.testing.assert_allclose(y.tolist(), layer(x).tanh().logsumexp(1).tolist(), rtol=1e-6)


def test_kernels_of_another_device_are_loaded_in_a_capture(gpu: Any) -> None:
    """CuPy keeps a kernel for each device, and ours one for all."""
    layer = {i: ddp.nn.LayerNorm(8).to(f"cuda:{i}") for i in (0, 1)}

    def step(i: int) -> Any:
        # Rows that are long and few are reduced in two steps.
        long = ddp.ones(1, 1 << 18, device=f"cuda:{i}").sum(1)
        return layer[i](ddp.ones(4, 8, device=f"cuda:{i}") * 3).tanh().logsumexp(1).sum() + long

    expected = step(0)
    with ddp.cuda.device(1):
        g = ddp.cuda.CUDAGraph()
        with ddp.cuda.graph(g):
            y = step(1)
        g.replay()
        assert y.tolist() == expected.tolist()


def test_memory_goes_back_to_cuda_in_a_capture(gpu: Any) -> None:
    x, old, g = ddp.ones(4, device="cuda"), ddp.cuda.CUDAGraph(), ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(old):
        x + 1
    x + 1
    with ddp.cuda.graph(g):
        before = gpu.frees
        old.reset()
        gc.collect()
        ddp.cuda.empty_cache()
        y = x * 3
        assert gpu.frees > before
    g.replay()
    assert y.tolist() == [3, 3, 3, 3]


def test_a_stream_that_is_not_joined_breaks_the_capture(gpu: Any) -> None:
    cupy = gpu.cupy
    side = cupy.cuda.Stream(non_blocking=True)
    x = cupy.ones(4, np.float32)

    def fork() -> None:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        side.wait_event(event)
        with side:
            cupy.add(x, 1, out=x)

    with pytest.raises(CaptureError, match="unjoined"):
        captured(fork)
    assert not cupy.capturing


def test_a_captured_event_may_not_be_asked(gpu: Any) -> None:
    cupy = gpu.cupy

    def ask() -> bool:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        return event.done

    with pytest.raises(CaptureError, match="cudaErrorCapturedEvent"):
        captured(ask)


def captured(body: Callable[[], Any]) -> Any:
    """A graph of what `body` launches."""
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g):
        body()
    return g


def mlp(seed: int = 0) -> Any:
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)).to("cuda")


def batches(count: int, n: int = 5, seed: int = 1) -> list[tuple[Any, Any]]:
    dice = np.random.default_rng(seed)
    return [
        (
            ddp.tensor(dice.standard_normal((n, 6)).astype(np.float32), device="cuda"),
            ddp.tensor(dice.standard_normal((n, 4)).astype(np.float32), device="cuda"),
        )
        for _ in range(count)
    ]


def trained(make: Callable[[], tuple[Any, Any]], graphed: bool, data: Any, **options: Any) -> tuple[list[Any], Any]:
    """Losses and parameters after training. make: () -> (model, step)"""
    model, step = make()
    if graphed:
        step = ddp.cuda.graphed_step(step, **options)
    losses = [step(*batch).item() for batch in data]
    if graphed:
        assert step.replays == len(data) - step.eager > 0
    return losses, [p.detach().cpu().numpy() for p in model.parameters()]


def same(a: tuple[list[Any], Any], b: tuple[list[Any], Any]) -> None:
    assert a[0] == b[0]
    for x, y in zip(a[1], b[1], strict=True):
        np.testing.assert_array_equal(x, y)


def plain() -> tuple[Any, Any]:
    model = mlp()
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


@pytest.mark.parametrize("gpu", ["eager", "simulated"], indirect=True)
def test_replays_are_eager_steps_to_the_bit(gpu: Any) -> None:
    data = batches(STEPS)
    same(trained(plain, True, data), trained(plain, False, data))


def test_the_benchmark_of_launches_knows_graphs(gpu: Any) -> None:
    from benchmarks import launch

    ours = launch.Library(ddp, "cuda")
    rows = launch.rows({"ours": ours}, "cuda")
    assert "MLP step, graphed" in rows
    found = launch.measure(rows["MLP step, graphed"], {"ours": ours.wait}, 1)
    assert found["ours"] > 0
    assert gpu.launches["graph"] > 3


def test_without_a_gpu_there_is_nothing_to_capture() -> None:
    if ddp.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not ddp.cuda.is_current_stream_capturing()
    for make in (ddp.cuda.CUDAGraph, ddp.cuda.graph_pool_handle, lambda: ddp.cuda.graphed_step(len)):
        with pytest.raises(DeviceError):
            make()


def test_what_is_no_graph_no_stream_and_no_pool(gpu: Any) -> None:
    graph: Any = ddp.cuda.graph
    with pytest.raises(DtypeError, match="CUDAGraph, got int"):
        graph(3)
    with pytest.raises(DtypeError, match="Stream, got int"):
        graph(ddp.cuda.CUDAGraph(), stream=3)
    with pytest.raises(DtypeError, match=r"pool.*got int"), graph(ddp.cuda.CUDAGraph(), pool=3):
        pass
    assert not ddp.cuda.is_current_stream_capturing()


def test_a_capture_within_a_capture_is_refused(gpu: Any) -> None:
    with (
        pytest.raises(CaptureError, match="in a capture already"),
        ddp.cuda.graph(ddp.cuda.CUDAGraph()),
        ddp.cuda.graph(ddp.cuda.CUDAGraph()),
    ):
        pass
    assert not ddp.cuda.is_current_stream_capturing()
