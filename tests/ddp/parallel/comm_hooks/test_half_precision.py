"""fp16 and bf16: the mean to 16 bits, at half the bytes, whatever the gradients' size."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddp.errors import DtypeError
from ddp.parallel.comm_hooks import allreduce, bf16, fp16
from tests.ddp.parallel.comm_hooks.driving import drive, mean, random_steps

SHAPES = {"weight": (13, 7), "bias": (5,), "one": ()}
HALF_STEP = {fp16: 2.0**-11, bf16: 2.0**-8}  # of the last bit, relative


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """Relative to the largest element, since what cancels in the sum loses bits."""
    return float(np.abs(got - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("hook", [fp16, bf16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_the_mean_is_rounded_to_16_bits(hook: Any, ranks: int, dtype: Any) -> None:
    steps = random_steps(2, ranks, SHAPES, dtype)
    scales = [1 / ranks, 1 / 640]
    became, _, _ = drive(lambda: hook, steps, scales, [["bias", "one"], ["weight"]])
    for got, everyones, scale in zip(became, steps, scales, strict=True):
        for name, exact in mean(everyones, scale).items():
            assert got[name].dtype == dtype
            last = HALF_STEP[bf16 if dtype is ml_dtypes.bfloat16 else hook]
            assert error(got[name].astype(np.float64), exact) < 4 * last


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e6, 1e30])
def test_no_size_of_gradients_overflows_or_vanishes(size: float) -> None:
    """A sum of gradients over a large batch is beyond float16's 65504, and its mean below 6e-8."""
    steps = random_steps(1, 3, SHAPES, np.float32)
    steps = [[{name: (g * size).astype(np.float32) for name, g in rank.items()} for rank in steps[0]]]
    for scale in (1 / 3, 1e-5):
        became, _, _ = drive(lambda: fp16, steps, [scale])
        for name, exact in mean(steps[0], scale).items():
            assert error(became[0][name], exact) < 4 * HALF_STEP[fp16]


@pytest.mark.parametrize("hook", [fp16, bf16])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_arrives_everywhere(hook: Any, bad: float) -> None:
    steps = random_steps(1, 2, SHAPES, np.float32)
    steps[0][1]["bias"][2] = bad
    became, _, _ = drive(lambda: hook, steps, [0.5])
    assert not np.isfinite(became[0]["bias"][2])
    assert np.isfinite(became[0]["bias"][[0, 1, 3, 4]]).all()


@pytest.mark.parametrize("hook", [fp16, bf16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_half_the_bytes_in_two_calls(hook: Any, ranks: int) -> None:
    steps = random_steps(1, ranks, {"w": (1000, 60)}, np.float32)
    _, _, plain = drive(lambda: allreduce, steps, [1.0])
    _, _, rounded = drive(lambda: hook, steps, [1.0])
    assert [name for name, _ in rounded] == ["all_to_all", "all_gather"]
    blocks = 2 * 4 * (ranks - 1)  # a power of two for each part
    assert sum(n for _, n in rounded) == sum(n for _, n in plain) / 2 + blocks


@pytest.mark.parametrize("hook", [fp16, bf16])
def test_complex_gradients_are_refused(hook: Any) -> None:
    with pytest.raises(DtypeError, match=r"hook \w+ on bucket 0 of 1 \(w\).*complex64"):
        drive(lambda: hook, [[{"w": np.zeros(3, np.complex64)}]], [1.0])
