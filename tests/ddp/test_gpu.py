"""Every op on a GPU against the CPU, from the same tables of cases; skipped where there is none.

`tests/ddp/cuda` covers what can be known without one: that the kernels compile, and that their formulas are right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.ops import OPS
from tests.ddp.cases.table import Case
from tests.ddp.on_devices import assert_agree, results
from tests.ddp.test_ops import CASES

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

TOLERANCES: dict[Any, dict[str, float]] = {
    ddp.float64: {"rtol": 1e-9, "atol": 1e-10},
    ddp.float32: {"rtol": 1e-4, "atol": 1e-5},
    ddp.float16: {"rtol": 1e-2, "atol": 1e-2},
    ddp.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}
# In 16 bits, ops with a device kernel of their own.
BOTH = [(case, dtype) for case in CASES for dtype in (ddp.float64, ddp.float32)]
OWN = [case for case in CASES if OPS[case.op].device_kernel is not OPS[case.op]]
ALL = BOTH + [(case, dtype) for case in OWN for dtype in (ddp.float16, ddp.bfloat16)]


@pytest.mark.parametrize(("case", "dtype"), ALL, ids=[f"{case.op}-{case.label}-{dtype.name}" for case, dtype in ALL])
def test_agrees_with_the_cpu(case: Case, dtype: Any) -> None:
    assert_agree(results(case, dtype, "cuda"), results(case, dtype, "cpu"), **TOLERANCES[dtype])


@pytest.mark.parametrize("rows", [1, 70_000])
def test_more_rows_than_blocks(rows: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 300)).astype(np.float32)
    on_gpu = ddp.from_numpy(x).to("cuda")
    assert_allclose(on_gpu.softmax(1).cpu().numpy(), ddp.from_numpy(x).softmax(1).numpy(), atol=1e-6)
    norm = ddp.nn.functional.layer_norm
    assert_allclose(norm(on_gpu, (300,)).cpu().numpy(), norm(ddp.from_numpy(x), (300,)).numpy(), rtol=1e-4, atol=1e-5)
