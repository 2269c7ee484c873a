"""Products on a real GPU against the CPU in float64: what the stand-in of cuBLASLt cannot know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp._cuda import cublaslt, gemm, matmul_kernels

pytestmark = pytest.mark.gpu

xp = pytest.importorskip("cupy", reason="CuPy is not installed")
if not xp.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16")] + [BFLOAT16]
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) / 2).astype(dtype)


def close(got: Any, expected: Any, tolerance: float) -> None:
    assert got.shape == expected.shape
    found = xp.asnumpy(got).astype("f8")
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(initial=1))


def test_the_library_is_the_one_beside_cupys() -> None:
    library = cublaslt.library(xp)
    assert library is not None
    assert library.version // 10000 == xp.cuda.runtime.runtimeGetVersion() // 1000


SHAPES = [
    *[((2, 3), (3, 4)), ((1, 7), (7, 1)), ((1, 1), (1, 1)), ((3,), (3, 4)), ((5, 2, 3), (3,)), ((64, 128), (128, 96))],
    *[((257, 129), (129, 65)), ((4, 33, 17), (4, 17, 9)), ((3, 1, 16, 8), (5, 8, 24)), ((2, 4096), (4096, 3))],
    *[((70_000, 2, 3), (70_000, 3, 2)), ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((300_000, 8), (8, 1))],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_shapes(a: Any, b: Any, dtype: Any) -> None:
    x, y = numbers(a, dtype), numbers(b, dtype, 1)
    expected = np.asarray(x.astype("f8") @ y.astype("f8"))
    got = gemm.gemm(xp, xp.asarray(x), xp.asarray(y))
    assert got is not None
    assert got.dtype == dtype
    close(got, expected, TOLERANCES[dtype.name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_of_every_kind(dtype: Any) -> None:
    x, y = numbers((6, 40, 24), dtype), numbers((6, 24, 56), dtype, 1)
    expected = x.astype("f8") @ y.astype("f8")
    for first in (xp.asarray(x), xp.ascontiguousarray(xp.asarray(x).swapaxes(1, 2)).swapaxes(1, 2)):
        for second in (xp.asarray(y), xp.ascontiguousarray(xp.asarray(y).swapaxes(1, 2)).swapaxes(1, 2)):
            close(gemm.gemm(xp, first, second), expected, TOLERANCES[dtype.name])
            turned = xp.zeros((6, 56, 40), dtype).swapaxes(1, 2)
            close(gemm.gemm(xp, first, second, turned), expected, TOLERANCES[dtype.name])
    cut = xp.asarray(np.pad(x, ((0, 0), (1, 2), (3, 1))))[:, 1:-2, 3:-1]
    close(gemm.gemm(xp, cut, xp.asarray(y)), expected, TOLERANCES[dtype.name])


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: Any) -> Any:
    k = np.sqrt(2 / np.pi)
    t = np.tanh(k * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)


# Where the library has none for a dtype, the test says so: that is allowed, and worth knowing.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 36])
@pytest.mark.parametrize("name", ["RELU", "GELU"])
def test_epilogues(name: str, n: int, dtype: Any) -> None:
    m, k, p = 48, 32, 40
    rounding = 4 * TOLERANCES[dtype.name]
    x, w, b = numbers((m, k), dtype), numbers((n, k), dtype, 1), numbers((n,), dtype, 2)
    g, v = numbers((m, p), dtype, 3), numbers((p, n), dtype, 4)
    gx, gw, gb, gg, gv = (xp.asarray(each) for each in (x, w, b, g, v))
    before = x.astype("f8") @ w.T.astype("f8") + b.astype("f8")
    lead = -(-n // 128) * 128 if name == "RELU" else -(-n // 8) * 8
    aux = xp.empty((m, lead // 8), "u1") if name == "RELU" else xp.empty((m, lead), dtype)
    out = xp.empty((m, n), dtype)
    lacking = []
    if gemm.gemm(xp, gx, gw.T, out, False, "BIAS", gb) is not None:
        close(out, before, rounding)
    else:
        lacking.append("BIAS")
    if gemm.gemm(xp, gx, gw.T, out, False, f"{name}_AUX_BIAS", gb, aux, lead) is None:
        pytest.skip(f"cuBLASLt has no {', '.join([*lacking, f'{name}_AUX_BIAS'])} for {dtype} of {n} columns")
    close(out, np.maximum(before, 0) if name == "RELU" else gelu(before), rounding)
    expected = (g.astype("f8") @ v.astype("f8")) * (before > 0 if name == "RELU" else gelu_slope(before))
    back, sums = xp.empty((m, n), dtype), xp.empty(n, dtype)
    if gemm.gemm(xp, gg, gv, back, False, f"D{name}_BGRAD", sums, aux, lead) is not None:
        close(back, expected, rounding)
        close(sums, expected.sum(0), rounding)
    else:
        lacking.append(f"D{name}_BGRAD")
    weight, sums = xp.empty((p, k), dtype), xp.empty(p, dtype)
    if gemm.gemm(xp, gg.T, gx, weight, False, "BGRADB", sums) is not None:
        close(weight, g.T.astype("f8") @ x.astype("f8"), rounding)
        close(sums, g.astype("f8").sum(0), rounding)
    else:
        lacking.append("BGRADB")
    if lacking:
        pytest.skip(f"cuBLASLt has no {', '.join(lacking)} for {dtype} of {n} columns")


@pytest.fixture
def tf32() -> Iterator[None]:
    ddp.backends.cuda.matmul.allow_tf32 = True
    yield
    ddp.backends.cuda.matmul.allow_tf32 = False


def test_tf32_rounds_and_its_absence_does_not(tf32: None) -> None:
    x, y = numbers((256, 512), "f4"), numbers((512, 256), "f4", 1)
    expected = x.astype("f8") @ y
    rounded = np.abs(xp.asnumpy(gemm.gemm(xp, xp.asarray(x), xp.asarray(y))) - expected).max()
    ddp.backends.cuda.matmul.allow_tf32 = False
    exact = np.abs(xp.asnumpy(gemm.gemm(xp, xp.asarray(x), xp.asarray(y))) - expected).max()
    assert exact < 1e-4
    assert 1e-4 < rounded < 0.1


def test_more_than_two_to_the_31_elements() -> None:
    free, _ = xp.cuda.runtime.memGetInfo()
    if free < 24 << 30:
        pytest.skip("needs 24 GiB")
    rows, n = (1 << 19) + 1, 1 << 12
    x = xp.ones((rows, 64), "float16")
    w = xp.ones((n, 64), "float16")
    y = gemm.gemm(xp, x, w.T)
    assert y.size > 1 << 31
    assert float(y[-1, -1]) == float(y[0, 0]) == 64
    y.fill(1)
    back = gemm.gemm(xp, y.T, x)
    assert bool(xp.isinf(back).all())  # more than float16 holds
    del y, back
    xp.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_integers(dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, (17, 33)).astype(dtype)
    got = matmul_kernels.product(xp, xp.asarray(x), xp.asarray(x).T)
    assert got.dtype == dtype
    np.testing.assert_array_equal(xp.asnumpy(got), x @ x.T)
