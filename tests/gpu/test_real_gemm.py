"""Large products on a real GPU against the CPU in float64; small ones and layouts: `test_gemm.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._cuda import cublaslt, gemm, matmul_kernels
from tests.gpu.test_gemm import DTYPES, close, numbers

pytestmark = pytest.mark.gpu

xp = pytest.importorskip("cupy", reason="CuPy is not installed")
if not xp.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def test_the_library_is_the_one_beside_cupys() -> None:
    library = cublaslt.library(xp)
    assert library is not None
    assert library.version // 10000 == xp.cuda.runtime.runtimeGetVersion() // 1000


SHAPES: list[Any] = [
    *[((64, 128), (128, 96)), ((257, 129), (129, 65)), ((4, 33, 17), (4, 17, 9)), ((3, 1, 16, 8), (5, 8, 24))],
    *[((2, 4096), (4096, 3)), ((70_000, 2, 3), (70_000, 3, 2)), ((300_000, 8), (8, 1))],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_shapes(a: Any, b: Any, dtype: Any) -> None:
    x, y = numbers(a, dtype), numbers(b, dtype, 1)
    expected = np.asarray(x.astype("f8") @ y.astype("f8"))
    got = gemm.gemm(xp, xp.asarray(x), xp.asarray(y))
    assert got is not None
    assert got.dtype == dtype
    close(got, expected, dtype)


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
