"""PowerSGD: exact at full rank, what it leaves out comes later, and it is the algorithm of the paper."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.parallel.comm_hooks import PowerSGD
from tests.ddp.parallel.comm_hooks.driving import drive, left_out, mean, random_steps
from tests.ddp.parallel.ranks import assert_same

SHAPES = {"conv": (6, 3, 2, 2), "bias": (6,), "tall": (20, 8), "wide": (8, 30), "scalar": ()}
PLAN = [["scalar", "wide"], ["tall", "bias", "conv"]]


def test_the_first_steps_are_exact_and_what_is_not_worth_it_always_is() -> None:
    steps = random_steps(3, 2, SHAPES)
    became, _, calls = drive(lambda: PowerSGD(1, start_iter=2), steps, [0.5] * 3, PLAN)
    for number, (got, everyones) in enumerate(zip(became, steps, strict=True)):
        for name, exact in mean(everyones, 0.5).items():
            if number < 2 or name in ("bias", "scalar"):
                assert_same(got[name], exact, 1e-15)
            elif name != "conv":
                assert np.linalg.matrix_rank(got[name].reshape(len(got[name]), -1)) == 1
    assert [name for name, _ in calls] == ["all_reduce"] * (2 + 2 + 4)
    wide, tall = (8 + 1, 30), (20 + 6 + 6, 8 + 12)  # P and what is exact, Q; the conv is 6 x 12, worth it at rank 1
    assert sorted(n / 8 for _, n in calls[4:]) == sorted([*wide, *tall])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_overflowed_leaves_nothing_behind(bad: float) -> None:
    steps = random_steps(5, 2, {"w": (20, 10)})
    steps[1][0]["w"][3, 4] = bad
    became, hooks, _ = drive(lambda: PowerSGD(2, 0), steps, [0.5] * 5)
    assert not np.isfinite(became[1]["w"]).all()  # so that whoever scales the loss sees it
    for got in became[2:]:
        assert np.isfinite(got["w"]).all()
        assert np.abs(got["w"]).max() > 0.1
    after = sum(mean(everyones, 0.5)["w"] for everyones in steps[2:])
    assert_same(sum(got["w"] for got in became[2:]) + left_out(hooks, "w"), after, 1e-12)


def test_what_it_refuses() -> None:
    wrong: tuple[Any, ...] = (-1, "x", None, True, float("nan"))
    for name, value in itertools.product(("matrix_approximation_rank", "start_iter", "min_compression_rate"), wrong):
        with pytest.raises(ArgumentError, match=f"PowerSGD: expected .*{value!r}"):
            PowerSGD(**{name: value})
    PowerSGD(np.int64(2), np.int32(1), min_compression_rate=np.float32(1))
    hook = PowerSGD()
    for state, message in (
        ({"steps": 3}, r"expected a dict of steps, queries, errors, got \['steps'\]"),
        (3, "expected a dict of steps, queries, errors, got 3"),
        ({"steps": "x", "queries": {}, "errors": {}}, "expected a whole number of steps, at least 0, got 'x'"),
        ({"steps": 3, "queries": {"a": np.ones(2)}, "errors": {"a": "x"}}, "errors: expected a dict of tensors, got"),
        ({"steps": 3, "queries": None, "errors": {}}, "queries: expected a dict of tensors, got None"),
    ):
        with pytest.raises(StateDictError, match=f"PowerSGD: {message}"):
            hook.load_state_dict(state)
        assert hook.state_dict() == {"steps": 0, "queries": {}, "errors": {}}
    with pytest.raises(DtypeError, match="complex128"):
        drive(lambda: PowerSGD(1, 0), [[{"w": np.zeros((9, 9), complex)}]], [1.0])


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_the_algorithm_of_the_paper(rank: int, ranks: int) -> None:
    """Vogels et al. 2019, algorithms 1 and 2, of the mean: everything is linear."""
    shapes = {"a": (12, 9), "b": (7,), "c": (10, 16)}
    steps = random_steps(5, ranks, shapes)
    scales = [0.5, 0.1, 2.0, 1.0, 0.3]
    draws = np.random.default_rng(1)
    queries = {name: draws.standard_normal((shapes[name][1], rank)) for name in ("a", "c")}

    def make_hook() -> PowerSGD:
        hook = PowerSGD(rank, 0, min_compression_rate=1)
        hook.load_state_dict({"steps": 0, "queries": queries, "errors": {}})
        return hook

    became, hooks, _ = drive(make_hook, steps, scales)
    for name, query in queries.items():
        error = np.zeros(shapes[name])
        for got, everyones, scale in zip(became, steps, scales, strict=True):
            matrix = mean(everyones, scale)[name] + error
            basis = np.linalg.qr(matrix @ query)[0]
            query = matrix.T @ basis
            error = matrix - basis @ query.T
            assert_same(got[name], basis @ query.T, 1e-10)
        assert_same(left_out(hooks, name), error, 1e-10)
