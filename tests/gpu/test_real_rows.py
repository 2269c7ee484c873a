"""Norms, dropout and embeddings on a real GPU, by warps and blocks of its own sizes: against the CPU in float64."""

from __future__ import annotations

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


def compared(run: Any, arrays: list[Any], dtype: Any) -> None:
    """`run` and its gradients on the GPU in `dtype`, beside the CPU in float64 of the same numbers."""
    rounded = [each.astype(dtype) for each in arrays]
    found = []
    for device, kind in (("cpu", np.float64), ("cuda", dtype)):
        xs = [ddp.from_numpy(each.astype(kind)).to(device).requires_grad_() for each in rounded]
        y = run(*xs)
        g = np.random.default_rng(3).standard_normal(y.shape).astype(dtype)
        y.backward(ddp.from_numpy(g.astype(kind)).to(device))
        found.append([each.detach().cpu().double().numpy() for each in (y, *[x.grad for x in xs])])
    for expected, got in zip(*found, strict=True):
        atol = ROUNDING[dtype] * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(got, expected, rtol=ROUNDING[dtype], atol=atol)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", [1, 8, 64, 100, 512, 768, 1000, 1024, 4096, 5001, 8192, 20000])
@pytest.mark.parametrize("rows", [1, 33, 3000])
def test_rows(rows: int, n: int, dtype: Any) -> None:
    random = np.random.default_rng(n)
    arrays = [random.standard_normal((rows, n)) + 2, random.standard_normal(n), random.standard_normal(n)]
    compared(lambda x, w, b: F.layer_norm(x, (n,), w, b, 1e-3), arrays, dtype)
    compared(lambda x, w: F.rms_norm(x, (n,), w, 1e-3), arrays[:2], dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(32, 64, 56, 56), (64, 512, 7, 7), (2, 32, 130, 131), (300, 6, 4), (1, 4, 512, 512)])
def test_channels(shape: tuple[int, ...], dtype: Any) -> None:
    random = np.random.default_rng(1)
    arrays = [random.standard_normal(shape) + 1, random.standard_normal(shape[1]), random.standard_normal(shape[1])]
    compared(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), arrays, dtype)
    compared(lambda x, w, b: F.group_norm(x, 2, w, b), arrays, dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("table", "width", "n"), [(50257, 768, 4096), (65, 384, 20000), (7, 1, 3000), (1000, 33, 9)])
def test_embeddings(table: int, width: int, n: int, dtype: Any) -> None:
    random = np.random.default_rng(2)
    index = (random.random(n) ** 3 * table).astype(np.int64)  # some rows are looked up often

    def run(w: Any) -> Any:
        return F.embedding(ddp.from_numpy(index).to(w.device), w, padding_idx=3)

    compared(run, [random.standard_normal((table, width))], dtype)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p: float) -> None:
    ddp.manual_seed(0)
    x = ddp.ones(1000, 4097, device="cuda", dtype=ddp.bfloat16).requires_grad_()
    y = F.dropout(x, p)
    y.backward(ddp.ones(1000, 4097, device="cuda", dtype=ddp.bfloat16))
    kept = y.detach().cpu().float().numpy() != 0
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size)
    flat = kept.reshape(-1) - kept.mean()
    for apart in (1, 2, 4, 4097):
        assert abs((flat[apart:] * flat[:-apart]).mean()) / (p * (1 - p)) < 5 / np.sqrt(kept.size)
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.cpu().float().numpy(), y.detach().cpu().float().numpy())
