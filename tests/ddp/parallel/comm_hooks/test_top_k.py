"""TopK: the largest entries and only these are sent, ties in one order, and the others come later."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.parallel.comm_hooks import TopK
from ddp.parallel.comm_hooks.top_k import largest
from tests.ddp.parallel.comm_hooks.driving import drive, mean, random_steps

SHAPES = {"weight": (20, 15), "bias": (7,), "one": ()}
PLAN = [["one", "weight"], ["bias"]]


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.5, 1e-30, np.inf]), max_size=200), st.data())
@settings(deadline=None)
def test_the_largest_of_any_numbers(numbers: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(min(1, len(numbers)), len(numbers)))
    expected = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:count])
    for dtype in (np.float32, np.float64):
        assert largest(np.array(numbers, dtype), count).tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_sends_its_largest_entries(ranks: int) -> None:
    steps = random_steps(1, ranks, SHAPES)
    became, _, calls = drive(lambda: TopK(0.1), steps, [0.5], PLAN)
    for name, count in {"weight": 30, "bias": 1, "one": 1}.items():
        expected = np.zeros(steps[0][0][name].size)
        for g in steps[0]:
            flat = g[name].reshape(-1)
            chosen = np.argsort(-np.abs(flat))[:count]
            expected[chosen] += 0.5 * flat[chosen]
        assert_allclose(became[0][name].reshape(-1), expected, rtol=0, atol=1e-15)
    each = 8 + 4  # a float64 and its place
    assert calls == [("all_gather", (ranks - 1) * 31 * each), ("all_gather", (ranks - 1) * each)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_is_lost_while_the_scale_changes(ranks: int) -> None:
    steps = random_steps(12, ranks, SHAPES)
    scales = list(np.random.default_rng(1).uniform(0.001, 5, 12))
    became, hooks, _ = drive(lambda: TopK(0.05), steps, scales, PLAN)
    for name in SHAPES:
        put_in = sum(mean(everyones, scale)[name] for everyones, scale in zip(steps, scales, strict=True))
        came_out = sum(got[name] for got in became)
        left = sum(hook.state_dict()["errors"][name].numpy() for hook in hooks)
        assert_allclose(came_out + left, put_in, rtol=0, atol=1e-12)
        assert name == "one" or np.abs(left).max() > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes(dtype: Any) -> None:
    steps = random_steps(1, 2, SHAPES, dtype)
    became, hooks, calls = drive(lambda: TopK(1.0), steps, [0.5])
    for name, exact in mean(steps[0], 0.5).items():
        assert became[0][name].dtype == dtype
        assert_allclose(became[0][name].astype(np.float64), exact, rtol=0, atol=4 * ml_dtypes.finfo(dtype).eps)
        assert hooks[0].state_dict()["errors"][name].dtype == ddp.float32
    assert calls == [("all_gather", (300 + 7 + 1) * 8)]


def test_what_no_rank_used_keeps_its_error() -> None:
    """Its gradient of that step is not taken, so what the hook made of it was not sent."""
    steps = random_steps(4, 2, {"w": (20, 10)})
    for rank in steps[2]:
        rank["w"][...] = 0
    became, hooks, _ = drive(lambda: TopK(0.1), steps, [0.5] * 4, unused={2: ["w"]})
    taken = became[0]["w"] + became[1]["w"] + became[3]["w"]
    put_in = sum(mean(everyones, 0.5)["w"] for everyones in steps)
    left = sum(hook.state_dict()["errors"]["w"].numpy() for hook in hooks)
    assert_allclose(taken + left, put_in, rtol=0, atol=1e-12)


def test_what_it_refuses() -> None:
    for ratio in (0, -1, 1.5, float("nan"), "x", None, True):
        with pytest.raises(ArgumentError, match=f"TopK: expected a ratio .*got {ratio!r}"):
            TopK(ratio)  # type: ignore[arg-type]
    TopK(np.float32(0.5))
    with pytest.raises(StateDictError, match="errors"):
        TopK().load_state_dict({"steps": 3})
    with pytest.raises(DtypeError, match="complex128"):
        drive(TopK, [[{"w": np.zeros((9, 9), complex)}]], [1.0])
