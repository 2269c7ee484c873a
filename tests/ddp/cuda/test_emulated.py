"""Kernels on NumPy's arrays, by the emulator, in blocks of any number of threads; and the emulator's own checks.

The op cases run through the same kernels on the stand-in for CuPy: `tests/gpu/test_cases.py`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddp._cuda import array_table, elementwise_kernels, gradient_kernels, norm_kernels
from ddp.ops import indexing, special
from tests.ddp.cases.table import draw
from tests.ddp.cuda import emulation

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


BFLOAT16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64])
def test_rows_are_added_up(dtype: Any) -> None:
    where = np.array([3, 0, 3, 3, 1])
    g = (draw(5, 4) * 8).astype(dtype)
    expected = np.zeros((6, 4), dtype)
    np.add.at(expected, where, g)
    got = indexing.add_rows(emulation.cupy, 6, where, g)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=1e-2 if dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_gradients_are_bounded_and_unscaled(threads: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    monkeypatch.setattr(array_table, "CHUNK", 12)
    xp, rounding = emulation.cupy, {2: 1e-2, 4: 1e-6, 8: 1e-12}[np.dtype(dtype).itemsize]
    gs = [draw(7, 5 + s, seed=s).astype(dtype) for s in range(3)]
    flat = np.concatenate([g.reshape(-1).astype("f8") for g in gs])
    for order in (1, 2, 3, np.inf):
        expected = np.linalg.norm(flat, order)
        np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, order), expected, rtol=rounding)
        power = expected if order == np.inf else expected**order
        np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, order, root=False), power, rtol=rounding)
    total = gradient_kernels.total_norm(xp, gs, 2)
    gradient_kernels.scale_to_norm(xp, gs, total, 0.5)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, 2), 0.5 * total / (total + 1e-6), rtol=rounding)
    gradient_kernels.clamp_values(xp, gs, 0.01)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, np.inf), 0.01, rtol=rounding)
    scale, found = np.full(1, 0.25, np.float32), np.zeros(1, np.float32)
    gradient_kernels.unscale(xp, gs, scale, found)
    np.testing.assert_allclose(gradient_kernels.total_norm(xp, gs, np.inf), 0.04, rtol=rounding)
    assert found == 0
    gs[1][2, 3] = np.nan
    gradient_kernels.unscale(xp, gs, scale, found)
    assert found == 1
    assert np.isnan(gradient_kernels.total_norm(xp, gs, np.inf))


def test_gradients_of_several_dtypes_have_one_norm() -> None:
    gs = [draw(3, 5, seed=s).astype(dtype) for s, dtype in enumerate((np.float16, BFLOAT16, np.float32))]
    gs[0][:2, :3] = np.array([[6e-8, -65504, 6.1e-5], [0, -0.0, 1e-7]], np.float16)  # subnormal ones among them
    expected = np.linalg.norm(np.concatenate([g.reshape(-1).astype("f8") for g in gs]))
    np.testing.assert_allclose(gradient_kernels.total_norm(emulation.cupy, gs, 2), expected, rtol=1e-6)
    np.testing.assert_allclose(
        gradient_kernels.total_norm(emulation.cupy, [gs[0][1:2, 2:], gs[2][:0]], 2),
        np.linalg.norm(gs[0][1, 2:].astype("f8")),
        rtol=1e-6,
    )
    gs.append(np.full(1, 1e300))
    assert gradient_kernels.total_norm(emulation.cupy, gs, 1).dtype == np.float64
    for bad in (np.inf, -np.inf, np.nan):
        gs[0][2, 2] = bad
        assert not np.isfinite(gradient_kernels.total_norm(emulation.cupy, gs, 1))


def test_a_scale_adapts() -> None:
    scale, good, founds = np.full(1, 8, np.float32), np.zeros(1, np.int32), np.zeros(2, np.float32)
    seen = []
    for found in (0, 0, 1, 0, 0):
        founds[1] = found
        gradient_kernels.update_scale(emulation.cupy, scale, good, founds, 4.0, 0.25, 2)
        assert not founds.any()
        seen.append((scale[0], good[0]))
    assert seen == [(8, 1), (32, 0), (8, 0), (8, 1), (32, 0)]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_block_of_any_size_adds_up(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    x = draw(4, 50)
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    np.testing.assert_allclose(norm_kernels.norm(emulation.cupy, x, None, None, 0.0, True)[0], expected, rtol=1e-10)
    x[2, 7] = np.nan
    assert np.isnan(norm_kernels.norm(emulation.cupy, x, None, None, 0.0, True)[0][2]).all()


def test_threads_that_part_at_a_barrier_are_noticed() -> None:
    text = (
        'typedef float T; typedef float A; typedef long long Index;\nextern "C" __global__ void parts(Index n) { %s }'
    )
    kernel = emulation.RawKernel(text % "if (threadIdx.x) __syncthreads();", "parts")
    with pytest.raises(AssertionError, match="different barriers"):
        kernel((1,), (256,), (np.int64(1),))


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    xp, source = emulation.cupy, elementwise_kernels.ERROR_FUNCTIONS
    x = np.ones(3, np.float32)
    with pytest.raises(AssertionError, match="4 arguments for"):
        source.over(xp, "erf_of", x.dtype, 3, x, x, 3, 1.0)
    with pytest.raises(AssertionError, match=r"argument 0, T\*: float64"):
        source.over(xp, "erf_of", x.dtype, 3, x.astype("f8"), x, 3)
    with pytest.raises(AssertionError):
        source.over(xp, "erf_of", x.dtype, 3, np.ones((3, 2), np.float32)[:, 0], x, 3)


@pytest.mark.parametrize("name", ["erf", "erfc", "erfinv"])
def test_error_functions(name: str) -> None:
    x, op = draw(3, 4, low=-0.9, high=0.9), getattr(special, name)
    np.testing.assert_allclose(op.forward(emulation.cupy, x)[0], op.forward(np, x)[0], rtol=1e-12)
