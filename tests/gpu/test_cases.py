"""Every op on the stand-in against the CPU, from the same table of cases: nothing of it may need NumPy's arrays.

What the real CuPy answers instead, `tests/ddp/test_gpu.py` finds on a machine with a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ddp
from tests.ddp.cases.table import Case
from tests.ddp.cuda import emulation
from tests.ddp.on_devices import assert_agree, results
from tests.ddp.test_ops import CASES, OF_OP
from tests.gpu import cudnn_fake

pytestmark = pytest.mark.timeout(400)  # where no kernel is compiled yet

TOLERANCES: dict[Any, float] = {ddp.bfloat16: 5e-2, ddp.float32: 2e-5, ddp.float16: 1e-2, ddp.float64: 1e-10}
# Ops with kernels of ours: all their cases, every other one in float64, the rest in the other dtypes in turn.
KERNELS = re.compile("attention|conv|entropy|embedding|erf|feed_forward|gather|index|linear|layer_norm|rms_norm")
CUDNN = re.compile("conv|scaled_dot_product_attention")
SAMPLE = 9  # of the other cases every ninth; --long runs all, in every dtype
# CuPy selects in float32: these run in bfloat16, too.
SELECTS = re.compile("tri[lu]-|where-|.*0-d")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The kernels that most cases launch, by one run of the compiler for each dtype."""
    emulation.prepare_kernels("float16", "bfloat16", "float32", "float64", "int64", "bool")


def chosen(op: str, long: bool, by_cudnn: bool = False) -> Iterator[tuple[Case, Any]]:
    """The cases of an op that run, and in which dtype."""
    for i, case in enumerate(CASES):
        for k, dtype in enumerate(TOLERANCES):
            if case.op != op or (by_cudnn and dtype is ddp.float64):
                continue
            if by_cudnn:
                run = k == i % 3
            else:
                run = k == (3 if i % 2 else i // 2 % 3) if KERNELS.search(op) else i % SAMPLE == k
                run = run or (k == 0 and SELECTS.match(f"{op}-{case.label}") is not None)
            if run or long:
                yield case, dtype


def agree(case: Case, dtype: Any) -> bool:
    """Whether the CPU computes it; if not, the GPU may not either. Prints the case, so that a failure names it."""
    print(case.label, dtype)
    try:
        expected = results(case, dtype, "cpu")
    except ddp.errors.DtypeError:
        with pytest.raises(ddp.errors.DtypeError):
            results(case, dtype, "cuda")
        return False
    rounding = TOLERANCES[dtype]
    assert_agree(results(case, dtype, "cuda"), expected, rounding, rounding)
    return True


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[] if any(chosen(op, False)) else pytest.mark.long) for op in OF_OP]
)
def test_agrees_with_the_cpu(op: str, gpu: Any, count: Callable[[int, int], int]) -> None:
    for case, dtype in chosen(op, bool(count(0, 1))):
        agree(case, dtype)


@pytest.mark.parametrize("op", [op for op in OF_OP if CUDNN.match(op)])
def test_agrees_by_cudnn(op: str, gpu: Any, monkeypatch: pytest.MonkeyPatch, count: Callable[[int, int], int]) -> None:
    fake = cudnn_fake.install(gpu, monkeypatch)
    for case, dtype in chosen(op, bool(count(0, 1)), by_cudnn=True):
        before = len(fake.ran)
        computed = agree(case, dtype) and all(0 not in each.shape for each in case.inputs)
        if computed and op.startswith(("conv1d", "conv2d", "conv_transpose")) and "below dilation" not in case.label:
            assert len(fake.ran) > before
