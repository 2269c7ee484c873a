"""Every op on a GPU against the CPU, from the same tables of cases; skipped where there is none.

`tests/ddp/cuda` covers what can be known without one: that the kernels compile, and that their formulas are right.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.ops import OPS
from tests.ddp.cases.table import Case, draw
from tests.ddp.test_ops import CASES

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

TOLERANCES: dict[Any, dict[str, float]] = {
    np.float64: {"rtol": 1e-9, "atol": 1e-10},
    np.float32: {"rtol": 1e-4, "atol": 1e-5},
    np.float16: {"rtol": 1e-2, "atol": 1e-2},
}
# In float16 those that have kernels for it.
BOTH = [(case, dtype) for case in CASES for dtype in (np.float64, np.float32)]
HALF = [(case, np.float16) for case in CASES if OPS[case.op].launched is not OPS[case.op]]


class At:
    """`ddp`, whose new tensors are on a device."""

    MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")

    def __init__(self, device: str) -> None:
        self.device_name = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(ddp, name)
        return functools.partial(found, device=self.device_name) if name in self.MAKERS else found


def results(case: Case, dtype: Any, device: str) -> list[Any]:
    """The value of a case and the gradients of its inputs, as NumPy arrays."""
    xs = []
    for array in case.inputs:
        floating = array.dtype == np.float64
        x = ddp.from_numpy(array.astype(dtype) if floating else array.copy())
        xs.append(x.to(device).requires_grad_(floating))
    y = case.fn(At(device), *xs)
    assert y.device.type == device
    if y.requires_grad:
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9)).to(device, y.dtype))
    return [y.detach().cpu().numpy(), *[None if x.grad is None else x.grad.cpu().numpy() for x in xs]]


@pytest.mark.parametrize(
    ("case", "dtype"), BOTH + HALF, ids=[f"{case.op}-{case.label}-{dtype.__name__}" for case, dtype in BOTH + HALF]
)
def test_agrees_with_the_cpu(case: Case, dtype: Any) -> None:
    got, expected = results(case, dtype, "cuda"), results(case, dtype, "cpu")
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            size = np.abs(other.astype("f8")).max(initial=1, where=np.isfinite(other))
            tolerance = {**TOLERANCES[dtype], "atol": TOLERANCES[dtype]["atol"] * size}
            np.testing.assert_allclose(one.astype("f8"), other.astype("f8"), **tolerance)


def test_a_training_run_is_the_same() -> None:
    def losses(device: str) -> list[float]:
        ddp.manual_seed(0)
        model = ddp.nn.Sequential(
            *(ddp.nn.Conv2d(1, 4, 3), ddp.nn.BatchNorm2d(4), ddp.nn.GELU(), ddp.nn.MaxPool2d(2), ddp.nn.Flatten()),
            *(ddp.nn.Linear(36, 16), ddp.nn.LayerNorm(16), ddp.nn.Linear(16, 3)),
        ).to(device)
        optimizer = ddp.optim.AdamW(model.parameters(), lr=1e-2)
        x, target = ddp.randn(32, 1, 8, 8).to(device), ddp.randint(0, 3, (32,)).to(device)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = ddp.nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    np.testing.assert_allclose(losses("cuda"), losses("cpu"), rtol=1e-3)


def test_dropout_keeps_the_expectation() -> None:
    y = ddp.nn.functional.dropout(ddp.ones(200, 200, device="cuda", requires_grad=True), 0.25)
    assert set(y.flatten().tolist()) == {0.0, pytest.approx(4 / 3)}
    assert y.mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("rows", [1, 70_000])
def test_more_rows_than_blocks(rows: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 300)).astype(np.float32)
    on_gpu = ddp.from_numpy(x).to("cuda")
    np.testing.assert_allclose(on_gpu.softmax(1).cpu().numpy(), ddp.from_numpy(x).softmax(1).numpy(), atol=1e-6)
    norm = ddp.nn.functional.layer_norm
    np.testing.assert_allclose(
        norm(on_gpu, (300,)).cpu().numpy(), norm(ddp.from_numpy(x), (300,)).numpy(), rtol=1e-4, atol=1e-5
    )
