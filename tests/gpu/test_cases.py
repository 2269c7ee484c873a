"""Every op on the stand-in against the CPU, from the same table of cases: nothing of it may need NumPy's arrays.

What the real CuPy answers instead, `tests/ddp/test_gpu.py` finds on a machine with a GPU.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp.cases.table import Case, draw
from tests.ddp.cuda import emulation, typed
from tests.ddp.test_ops import CASES

pytestmark = [
    pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU"),
    pytest.mark.timeout(400),  # where no kernel is compiled yet
]

TOLERANCES: dict[Any, float] = {ddp.float32: 2e-5, ddp.bfloat16: 3e-2}
SAMPLE = 60  # a dtype; --long runs all


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The kernels that most cases launch, by one run of the compiler for each dtype."""
    if emulation.COMPILER is not None:
        for dtype in ("float32", "bfloat16", "int64", "bool"):
            emulation.prepare(list(typed.sources(dtype).values()))


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
        x = ddp.from_numpy(array).to(dtype) if floating else ddp.from_numpy(array.copy())
        xs.append(x.to(device).detach().requires_grad_(floating))
    y = case.fn(At(device), *xs)
    assert y.device.type == device
    if y.requires_grad:
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9)).to(device, y.dtype))
    return [bare(y), *[None if x.grad is None else bare(x.grad) for x in xs]]


def bare(x: Any) -> Any:
    x = x.detach().cpu()
    return (x.float() if x.dtype is ddp.bfloat16 else x).numpy()


def chosen(dtype: Any) -> list[Case]:
    dice = random.Random(str(dtype))
    return dice.sample(CASES, SAMPLE)


RUNS = [(case, dtype) for dtype in TOLERANCES for case in chosen(dtype)]
REST = [(case, dtype) for dtype in TOLERANCES for case in CASES if (case, dtype) not in RUNS]
ALL = [*RUNS, *[pytest.param(case, dtype, marks=pytest.mark.long) for case, dtype in REST]]
IDS = [f"{case.op}-{case.label}-{str(dtype).removeprefix('ddp.')}" for case, dtype in [*RUNS, *REST]]


@pytest.mark.parametrize(("case", "dtype"), ALL, ids=IDS)
def test_agrees_with_the_cpu(case: Case, dtype: Any, gpu: Any) -> None:
    agree(case, dtype)


def agree(case: Case, dtype: Any) -> None:
    try:
        expected = results(case, dtype, "cpu")
    except ddp.errors.DtypeError:
        with pytest.raises(ddp.errors.DtypeError):
            results(case, dtype, "cuda")
        return
    got = results(case, dtype, "cuda")
    rounding = TOLERANCES[dtype]
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            size = np.abs(other.astype("f8")).max(initial=1, where=np.isfinite(other))
            np.testing.assert_allclose(one.astype("f8"), other.astype("f8"), rtol=rounding, atol=rounding * size)
