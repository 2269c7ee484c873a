"""Every op on the stand-in against the CPU, from the same table of cases: nothing of it may need NumPy's arrays.

What the real CuPy answers instead, `tests/ddp/test_gpu.py` finds on a machine with a GPU.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import ddp
from tests.ddp.cases.table import Case
from tests.ddp.cuda import emulation, typed
from tests.ddp.on_devices import assert_agree, results
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
    typed.prepare("float32", "bfloat16", "int64", "bool")


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
    rounding = TOLERANCES[dtype]
    assert_agree(results(case, dtype, "cuda"), expected, rounding, rounding)
