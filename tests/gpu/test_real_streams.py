"""Streams, copies and errors on a real GPU: what the stand-in cannot know. Skipped where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._cuda import stream_order as lanes
from tests.gpu.test_streams import gradients

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _settled() -> Any:
    yield
    ddp.cuda.synchronize()
    lanes.sweep()


def busy(milliseconds: float = 50) -> None:
    """Keeps the current stream at work."""
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    spin((1,), (1,), (np.int64(milliseconds * 1.5e6),))


def test_only_the_current_stream_is_waited_for() -> None:
    s = ddp.cuda.Stream()
    x = ddp.ones(4, device="cuda")
    (x + 1).tolist()  # compiles
    with ddp.cuda.stream(s):
        busy(500)
        event = s.record_event()
    assert (x + 1).tolist() == [2.0] * 4
    assert not event.query(), "another stream was waited for"
    s.synchronize()


@pytest.mark.parametrize("which", [(0, 1, 2), (0, None, None), (None, None, 0)])
def test_backward_on_the_streams_of_forward(which: tuple[int | None, ...]) -> None:
    own = [ddp.cuda.Stream() for _ in range(3)]
    expected = gradients("cpu", [None] * 3)
    for _ in range(20):
        for one, other in zip(gradients("cuda", [None if i is None else own[i] for i in which]), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_copies_through_pinned_memory() -> None:
    x = ddp.randn(1 << 20, pin_memory=True)
    assert x.is_pinned()
    assert not ddp.randn(8).is_pinned()
    (x.to("cuda", non_blocking=True) * 2).to("cpu", non_blocking=True)  # compiles, and pins memory
    busy(1)
    ddp.cuda.synchronize()
    busy(200)
    there = x.to("cuda", non_blocking=True)
    back = (there * 2).to("cpu", non_blocking=True)
    assert not ddp.cuda.current_stream().query(), "a copy waited"
    assert back.is_pinned()
    ddp.cuda.synchronize()
    np.testing.assert_array_equal(back.numpy(), x.numpy() * 2)
    assert x.bfloat16().pin_memory().to("cuda", non_blocking=True).float().cpu().tolist() == x.bfloat16().tolist()
    big = np.ones((96 << 20) // 4, np.float32)  # beyond what is staged
    assert ddp.tensor(big, device="cuda").sum().item() == big.size


def test_memory_registered_by_somebody_else_is_pinned() -> None:
    array = np.ones(1 << 16, np.float32)
    cupy.cuda.runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
    try:
        assert ddp.from_numpy(array).is_pinned()
    finally:
        cupy.cuda.runtime.hostUnregister(array.ctypes.data)


def test_memory_outlives_the_other_stream() -> None:
    s = ddp.cuda.Stream()
    for _ in range(5):
        x = ddp.full((1 << 20,), 3.0, device="cuda")
        s.wait_stream(ddp.cuda.current_stream())
        with ddp.cuda.stream(s):
            busy(20)
            y = x * 2
        x.record_stream(s)
        del x
        for i in range(4):
            ddp.full((1 << 20,), float(i), device="cuda")
        s.synchronize()
        assert float(y.min().item()) == float(y.max().item()) == 6.0
    ddp.cuda.synchronize()
    lanes.sweep()
    assert lanes.held() == 0


_BREAKS = """
import cupy, ddp
x = ddp.ones(4, device="cuda")
bad = cupy.RawKernel('extern "C" __global__ void bad(float* p) { p[1ll << 40] = 1.0f; }', "bad")
x.sum().item()
bad((1,), (1,), (cupy.from_dlpack(x),))
try:
    x.sum().item()
except ddp.errors.CudaError as error:
    print(error.status, error)
"""


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_an_error_says_where_it_came_to_light(blocking: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BREAKS],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "700" in done.stdout, done.stdout + done.stderr
    if blocking == "0":
        assert "CUDA_LAUNCH_BLOCKING=1" in done.stdout
