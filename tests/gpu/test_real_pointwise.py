"""Elementwise ops and reductions on a GPU against the CPU: what CuPy's own functions make of every dtype and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "a row": lambda x, y: x * y[0],
    "a column": lambda x, y: x / (y[:, :1].abs() + 1),
    "transposed": lambda x, y: x.T * y.T.contiguous(),
    "by a number": lambda x, y: x * 1.5 - 2,
    "unaligned": lambda x, y: x.flatten()[1:] * y.flatten()[:-1],
    "gelu": lambda x, y: ddp.nn.functional.gelu(x),
    "sin": lambda x, y: (x * 100).sin(),
    "where": lambda x, y: ddp.where(x > 0, x, y),
    "rows": lambda x, y: x.sum(1),
    "columns": lambda x, y: x.mean(0),
    "all": lambda x, y: x.var(),
    "norm": lambda x, y: x.norm(),
    "amax": lambda x, y: x.amax(1),
}


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.float64, ddp.float16, ddp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    given = [ddp.from_numpy(rng.standard_normal((257, 1024))).to(dtype) for _ in range(2)]
    found = []
    for device in ("cpu", "cuda"):
        x, y = (each.to(device).detach().requires_grad_() for each in given)
        z = CASES[name](x, y)
        z.backward(ddp.ones(*z.shape, dtype=z.dtype, device=device))
        found.append([each.detach().cpu().double().numpy() for each in (z, x.grad, y.grad) if each is not None])
    rounding = {ddp.float64: 1e-9, ddp.float32: 1e-4}.get(dtype, 3e-2)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * max(1, np.abs(one).max()))


def test_a_sum_is_the_same_in_every_run() -> None:
    x = ddp.randn(3, 1_000_000, device="cuda")
    first = x.sum(1).tolist()
    assert all(x.sum(1).tolist() == first for _ in range(5))
