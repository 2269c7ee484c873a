"""Every op on the stand-in against the CPU, from the same table of cases: nothing of it may need NumPy's arrays.

What the real CuPy answers instead, `tests/ddp/test_gpu.py` finds on a machine with a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import ddp
from tests.ddp.cases.table import Case
from tests.ddp.cuda import emulation
from tests.ddp.on_devices import assert_agree, results
from tests.ddp.test_ops import CASES
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


def _each() -> Iterator[Any]:
    for i, case in enumerate(CASES):
        for k, dtype in enumerate(TOLERANCES):
            run = k == (3 if i % 2 else i // 2 % 3) if KERNELS.search(case.op) else i % SAMPLE == k
            run = run or (k == 0 and SELECTS.match(f"{case.op}-{case.label}") is not None)
            name = f"{case.op}-{case.label}-{str(dtype).removeprefix('ddp.')}"
            marks = [] if run else [pytest.mark.long]
            yield pytest.param(case, dtype, False, id=name, marks=marks)
            if CUDNN.match(case.op) and dtype is not ddp.float64:
                yield pytest.param(
                    case, dtype, True, id=f"{name}-cudnn", marks=[] if k == i % 3 else [pytest.mark.long]
                )


@pytest.mark.parametrize(("case", "dtype", "by_cudnn"), [*_each()])
def test_agrees_with_the_cpu(case: Case, dtype: Any, by_cudnn: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cudnn_fake.install(gpu, monkeypatch) if by_cudnn else None
    try:
        expected = results(case, dtype, "cpu")
    except ddp.errors.DtypeError:
        with pytest.raises(ddp.errors.DtypeError):
            results(case, dtype, "cuda")
        return
    rounding = TOLERANCES[dtype]
    assert_agree(results(case, dtype, "cuda"), expected, rounding, rounding)
    if (
        fake is not None
        and case.op.startswith(("conv1d", "conv2d", "conv_transpose"))
        and "below dilation" not in case.label
    ):
        assert fake.ran or any(0 in each.shape for each in case.inputs)
