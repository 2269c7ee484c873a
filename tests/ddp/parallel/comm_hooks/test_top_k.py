"""TopK: the largest entries and only these are sent, ties in one order, and the others come later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.parallel.comm_hooks import TopK
from ddp.parallel.comm_hooks.top_k import largest
from tests.ddp.parallel.comm_hooks.driving import drive, left_out, mean, random_steps
from tests.ddp.parallel.ranks import assert_same

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
        assert_same(became[0][name].reshape(-1), expected, 1e-15)
    each = 8 + 4  # a float64 and its place
    assert calls == [("all_gather", (ranks - 1) * 31 * each), ("all_gather", (ranks - 1) * each)]


def test_what_no_rank_used_keeps_its_error() -> None:
    """Its gradient of that step is not taken, so what the hook made of it was not sent."""
    steps = random_steps(4, 2, {"w": (20, 10)})
    for rank in steps[2]:
        rank["w"][...] = 0
    became, hooks, _ = drive(lambda: TopK(0.1), steps, [0.5] * 4, unused={2: ["w"]})
    taken = became[0]["w"] + became[1]["w"] + became[3]["w"]
    put_in = sum(mean(everyones, 0.5)["w"] for everyones in steps)
    assert_same(taken + left_out(hooks, "w"), put_in, 1e-12)


def test_what_it_refuses() -> None:
    for ratio in (0, -1, 1.5, 10**400, float("nan"), "x", None, True):
        with pytest.raises(ArgumentError, match=f"TopK: expected a ratio .*got {ratio!r:.60}"):
            TopK(ratio)  # type: ignore[arg-type]
    TopK(np.float32(0.5))
    for state in ({"steps": 3}, 3, {"errors": None}, {"errors": {"a": "x"}}):
        with pytest.raises(StateDictError, match=r"TopK: (errors: )?expected a dict of (errors|tensors), got"):
            TopK().load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="complex128"):
        drive(TopK, [[{"w": np.zeros((9, 9), complex)}]], [1.0])
