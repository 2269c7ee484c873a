"""The emulator's own checks, and reductions in blocks of any number of threads.

The op cases run through the same kernels on the stand-in for CuPy: `tests/gpu/test_cases.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddp._cuda import norm_kernels, raw_kernel
from tests.ddp.cases.table import draw
from tests.ddp.cuda import emulation


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_block_of_any_size_adds_up(threads: int, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    x = draw(4, 50)
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    expected[2] = np.nan
    given = x.copy()
    given[2, 7] = np.nan
    actual = norm_kernels.norm(gpu.cupy, gpu.cupy.asarray(given), None, None, 0.0, True)[0]
    assert_allclose(actual.get(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    "number", [3, True, np.int32(3), np.uint8(3), np.bool(True), 0.5, np.float32(0.5), np.float16(0.5)]
)
def test_numbers_of_numpy_are_passed_as_pythons(number: Any) -> None:
    passed = raw_kernel._kernel_argument(number)
    assert passed == number
    assert np.asarray(passed).dtype == ("float64" if isinstance(number, float | np.floating) else "int64")
