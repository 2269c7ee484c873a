"""The emulator's own checks, and reductions in blocks of any number of threads.

The op cases run through the same kernels on the stand-in for CuPy: `tests/gpu/test_cases.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddp._cuda import elementwise_kernels, norm_kernels, raw_kernel
from tests.ddp.cases.table import draw
from tests.ddp.cuda import emulation

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_block_of_any_size_adds_up(threads: int, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "THREADS", threads)
    x = draw(4, 50)
    expected = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    expected[2] = np.nan
    given = x.copy()
    given[2, 7] = np.nan
    found = norm_kernels.norm(gpu.cupy, gpu.cupy.asarray(given), None, None, 0.0, True)[0]
    np.testing.assert_allclose(found.get(), expected, rtol=1e-10)


def test_threads_that_part_at_a_barrier_are_noticed() -> None:
    text = (
        'typedef float T; typedef float A; typedef long long Index;\nextern "C" __global__ void parts(Index n) { %s }'
    )
    kernel = emulation.RawKernel(text % "if (threadIdx.x) __syncthreads();", "parts")
    with pytest.raises(AssertionError, match="different barriers"):
        kernel((1,), (256,), (np.int64(1),))


def test_a_launch_that_does_not_fit_its_kernel_is_refused(gpu: Any) -> None:
    xp, source = gpu.cupy, elementwise_kernels.ERROR_FUNCTIONS
    x = xp.ones(3, np.float32)
    with pytest.raises(ValueError, match="longer"):
        source.over(xp, "erf_of", x.dtype, 3, x, x, 3, 1.0)
    with pytest.raises(AssertionError, match=r"argument 0, T\*: float64"):
        source.over(xp, "erf_of", x.dtype, 3, x.astype("f8"), x, 3)
    with pytest.raises(AssertionError):
        source.over(xp, "erf_of", x.dtype, 3, xp.ones((3, 2), np.float32)[:, 0], x, 3)


@pytest.mark.parametrize(
    "number", [3, True, np.int32(3), np.uint8(3), np.bool(True), 0.5, np.float32(0.5), np.float16(0.5)]
)
def test_numbers_of_numpy_are_passed_as_pythons(number: Any) -> None:
    passed = raw_kernel._passed(number)
    assert passed == number
    assert np.asarray(passed).dtype == ("float64" if isinstance(number, float | np.floating) else "int64")
