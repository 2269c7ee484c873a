"""PowerSGD and TopK: what they leave out of a step comes later, and every dtype is exact to its last bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp.parallel.comm_hooks import PowerSGD, TopK
from tests.ddp.parallel.comm_hooks.driving import drive, left_out, mean, random_steps
from tests.ddp.parallel.ranks import assert_same

SHAPES = {"tall": (20, 8), "wide": (8, 30), "bias": (7,), "scalar": ()}
PLAN = [["scalar", "wide"], ["tall", "bias"]]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("hook", "compressed"), [(lambda: PowerSGD(2, start_iter=2), ["tall", "wide"]), (lambda: TopK(0.05), [*SHAPES])]
)
def test_nothing_is_lost_while_the_scale_changes(hook: Any, compressed: list[str], ranks: int) -> None:
    """The sum of what came out and what is remembered is the sum of the means."""
    steps = random_steps(12, ranks, SHAPES)
    scales = list(np.random.default_rng(1).uniform(0.001, 5, 12))
    became, hooks, _ = drive(hook, steps, scales, PLAN)
    assert sorted(hooks[0].state_dict()["errors"]) == sorted(compressed)
    for name in SHAPES:
        put_in = sum(mean(everyones, scale)[name] for everyones, scale in zip(steps, scales, strict=True))
        left = left_out(hooks, name) if name in compressed else np.zeros(SHAPES[name])
        assert (np.abs(left).max() > 0.1) == (name in compressed and name != "scalar")
        assert_same(sum(got[name] for got in became) + left, put_in, 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("hook", [lambda: PowerSGD(100, 0, min_compression_rate=0), lambda: TopK(1.0)])
def test_other_dtypes(hook: Any, dtype: Any) -> None:
    steps = random_steps(2, 2, SHAPES, dtype)
    became, hooks, calls = drive(hook, steps, [0.5] * 2, PLAN)
    for got, everyones in zip(became, steps, strict=True):
        for name, exact in mean(everyones, 0.5).items():
            assert got[name].dtype == dtype
            assert_same(got[name].astype(np.float64), exact, 8 * ml_dtypes.finfo(dtype).eps)
    assert hooks[0].state_dict()["errors"]["wide"].dtype == ddp.float32
    # Each entry of TopK is a float32 and its place.
    assert isinstance(hooks[0], PowerSGD) or calls[0] == ("all_gather", (1 + 8 * 30) * 8)
