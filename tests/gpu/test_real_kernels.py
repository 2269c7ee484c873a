"""Kernels and CuPy's functions at the sizes of a GPU, by its own warps and blocks: against the CPU in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.nn import functional as F
from ddp.ops.op import BFLOAT16

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

ROUNDING: dict[Any, float] = {np.float16: 2e-3, BFLOAT16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}
each_dtype = pytest.mark.parametrize("dtype", ROUNDING)


def compared(run: Any, *shapes: tuple[int, ...], dtype: Any, shift: float = 0.0, factor: float = 1.0) -> None:
    """`run` and its gradients on the GPU in `dtype`, and on the CPU in float64 of the same numbers, from seeds."""
    random = np.random.default_rng(0)
    rounded = [(random.standard_normal(shape) + shift).astype(dtype) for shape in shapes]
    found = []
    for device, kind in (("cpu", np.float64), ("cuda", dtype)):
        xs = [ddp.from_numpy(each.astype(kind)).to(device).requires_grad_() for each in rounded]
        y = run(*xs)
        g = np.random.default_rng(3).standard_normal(y.shape).astype(dtype)
        y.backward(ddp.from_numpy(g.astype(kind)).to(device))
        found.append(
            [each.detach().cpu().double().numpy() for each in (y, *[x.grad for x in xs if x.grad is not None])]
        )
    rounding = factor * ROUNDING[dtype]
    for expected, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, rounding, rounding * max(1.0, float(np.abs(expected).max())))


@each_dtype
@pytest.mark.parametrize("n", [1, 8, 64, 100, 512, 768, 1000, 1024, 4096, 5001, 8192, 20000])
@pytest.mark.parametrize("rows", [1, 33, 3000])
def test_rows(rows: int, n: int, dtype: Any) -> None:
    compared(lambda x, w, b: F.layer_norm(x, (n,), w, b, 1e-3), (rows, n), (n,), (n,), dtype=dtype, shift=1)
    compared(lambda x, w: F.rms_norm(x, (n,), w, 1e-3), (rows, n), (n,), dtype=dtype, shift=1)


@each_dtype
@pytest.mark.parametrize("shape", [(32, 64, 56, 56), (64, 512, 7, 7), (2, 32, 130, 131), (300, 6, 4), (1, 4, 512, 512)])
def test_channels(shape: tuple[int, ...], dtype: Any) -> None:
    c = shape[1:2]
    compared(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), shape, c, c, dtype=dtype, shift=1)
    compared(lambda x, w, b: F.group_norm(x, 2, w, b), shape, c, c, dtype=dtype, shift=1)


@each_dtype
@pytest.mark.parametrize(("table", "width", "n"), [(50257, 768, 4096), (65, 384, 20000), (7, 1, 3000), (1000, 33, 9)])
def test_embeddings(table: int, width: int, n: int, dtype: Any) -> None:
    index = (np.random.default_rng(2).random(n) ** 3 * table).astype(np.int64)  # some rows are looked up often
    compared(lambda w: F.embedding(ddp.from_numpy(index).to(w.device), w, padding_idx=3), (table, width), dtype=dtype)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "a row": lambda x, y: x * y[0],
    "a column": lambda x, y: x / (y[:, :1].abs() + 1),
    "transposed": lambda x, y: x.T * y.T.contiguous(),
    "by a number": lambda x, y: x * 1.5 - 2,
    "unaligned": lambda x, y: x.flatten()[1:] * y.flatten()[:-1],
    "gelu": lambda x, y: F.gelu(x),
    "where": lambda x, y: ddp.where(x > 0, x, y),
    "rows": lambda x, y: x.sum(1),
    "columns": lambda x, y: x.mean(0),
    "all": lambda x, y: x.var(),
    "norm": lambda x, y: x.norm(),
    "amax": lambda x, y: x.amax(1),
}


@each_dtype
@pytest.mark.parametrize("name", CASES)
def test_elementwise_and_reductions(name: str, dtype: Any) -> None:
    compared(CASES[name], (257, 1024), (257, 1024), dtype=dtype, factor=10)


def test_a_sum_is_the_same_in_every_run() -> None:
    x = ddp.randn(3, 1_000_000, device="cuda")
    first = x.sum(1).tolist()
    assert all(x.sum(1).tolist() == first for _ in range(5))
