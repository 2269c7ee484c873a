"""The path of GPU arrays on a machine without one: the CuPy of `emulation` in the place of NumPy, against NumPy itself.

Every op case runs through the tables, launches and kernels that CuPy arrays would take. What is left to a real GPU is
what `tests/ddp/test_gpu.py` runs there: CuPy's own functions, its devices, and hardware that runs threads at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp._device import CPU
from tests.ddp.cases.table import Case, draw
from tests.ddp.cuda import emulation
from tests.ddp.test_ops import CASES, IDS, leaves

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the CPU pass for CuPy's."""
    monkeypatch.setattr(CPU, "xp", emulation.cupy)


def results(case: Case, dtype: Any) -> list[Any]:
    """The values of a case, and the gradients of its inputs."""
    xs = leaves(case, dtype)
    y = case.fn(ddp, *xs)
    if y.requires_grad:
        y.backward(ddp.from_numpy(draw(*y.shape, seed=9).astype(y.dtype)))
    return [y.detach().numpy(), *[None if x.grad is None else x.grad.numpy() for x in xs]]


TOLERANCES: dict[Any, dict[str, float]] = {
    np.float64: {"rtol": 1e-10, "atol": 1e-12},
    np.float32: {"rtol": 2e-5, "atol": 2e-6},
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_agrees_with_numpy(case: Case, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(case, dtype)
    monkeypatch.setattr(CPU, "xp", emulation.cupy)
    got = results(case, dtype)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, **TOLERANCES[dtype])
