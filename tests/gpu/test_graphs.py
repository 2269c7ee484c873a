"""CUDA graphs on the stand-in: what is captured runs at every launch and not before, and what cannot be is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, CaptureError


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


def test_memory_goes_back_to_cuda_in_a_capture(gpu: Any) -> None:
    x = ddp.ones(4, device="cuda")
    old = ddp.cuda.CUDAGraph()
    g = ddp.cuda.CUDAGraph()
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
