"""The bucket plan: the cut by size, when it ends, and the value that holds it, as tables."""

from __future__ import annotations

import json

import pytest

from ddp.errors import ParallelError
from ddp.parallel.bucket_plan import Link, Plan, choose_cap, end_of, plan_buckets


@pytest.mark.parametrize(
    ("nbytes", "options", "plan"),
    [
        ([4, 4, 8], {"cap": 8}, [[2], [1, 0]]),
        ([], {"cap": 8}, []),
        ([1], {"cap": 8}, [[0]]),
        ([1, 1, 1], {"cap": 8}, [[2, 1, 0]]),
        # One that is larger than the cap has a bucket to itself, and nothing is split.
        ([4, 100, 4], {"cap": 8}, [[2], [1], [0]]),
        # The first bucket is small, so that communication starts early.
        ([4, 4, 4, 4], {"cap": 8, "first": 4}, [[3], [2, 1], [0]]),
        ([4, 4, 4], {"cap": 8, "first": 1}, [[2], [1, 0]]),
        # Kinds never share a bucket; a bucket's turn comes when its last gradient does.
        ([4, 4, 4, 4], {"cap": 8, "kinds": "abab"}, [[3, 1], [2, 0]]),
        ([4, 4, 4, 4], {"cap": 8, "kinds": "abbb"}, [[3, 2], [1], [0]]),
        ([4, 4, 4], {"cap": 100, "kinds": "aba"}, [[1], [2, 0]]),
        ([0, 0], {"cap": 8}, [[1, 0]]),
    ],
)
def test_plan(nbytes: list[int], options: dict[str, object], plan: list[list[int]]) -> None:
    assert plan_buckets(nbytes, **options) == plan


def test_an_order_of_arrival_takes_the_place_of_reversed_model_order() -> None:
    assert plan_buckets([4, 4, 4, 4], cap=8, order=[1, 3, 0, 2]) == [[1, 3], [0, 2]]
    assert plan_buckets([4, 4, 4], cap=100, kinds="aba", order=[0, 1, 2]) == [[1], [0, 2]]


# Ready at 1, 2, 3, 4 s, the last gradient first, as backward makes them.
READY = [4.0, 3.0, 2.0, 1.0]


def test_when_a_plan_ends() -> None:
    """Buckets wait for their last gradient and for the bucket before."""
    plan = [[3, 2], [1, 0]]
    link = Link(alpha=0.5, beta=0.1)
    assert end_of(plan, [10, 10, 10, 10], READY, link, backward=4.0) == 7.0
    assert end_of(plan, [10, 10, 10, 10], READY, link, backward=9.0) == 9.0


@pytest.mark.parametrize(
    ("alpha", "beta", "expected"),
    [
        (1.0, 0.0, 1 << 20),  # latency alone: one bucket
        (0.0, 1e-6, 1 << 16),  # bandwidth alone: as small as they go
        (1e-3, 1e-6, 1 << 16),  # latency of 2 % of a bucket: 50 KB
        (1e-2, 1e-6, 1 << 18),  # a fourth of a second a bucket: small enough for the last, and few calls
    ],
)
def test_the_cap_whose_plan_ends_first(alpha: float, beta: float, expected: int) -> None:
    link = Link(alpha=alpha, beta=beta)
    sizes = [1 << 16] * 16
    ready = [16.0 - index for index in range(16)]
    chosen = choose_cap(lambda cap: plan_buckets(sizes, cap), sizes, ready, link, 0.0)
    caps = [1 << power for power in range(16, 21)]
    ends = {cap: end_of(plan_buckets(sizes, cap), sizes, ready, link, 0.0) for cap in caps}
    assert ends[min(chosen, 1 << 20)] <= 1.005 * min(ends.values())
    if expected != 1 << 18:
        assert min(chosen, 1 << 20) == expected


PLAN = Plan(buckets=(("b", "a"), ("c",)), nbytes=(1 << 20, 1 << 19), origin="in reversed model order")


def test_a_plan_is_a_json_value_and_back() -> None:
    assert Plan.from_state(json.loads(json.dumps(PLAN.state()))) == PLAN
    for wrong in (
        {},
        {"buckets": [["a"]], "nbytes": [], "from": ""},
        {"buckets": [[]], "nbytes": [1], "from": ""},
        {"buckets": [["a"]], "nbytes": [float("inf")], "from": ""},
    ):
        with pytest.raises(ParallelError, match="plan"):
            Plan.from_state(wrong)


def test_a_plan_prints_as_a_table() -> None:
    assert str(PLAN).splitlines() == [
        "2 buckets, 1.50 MiB, in reversed model order",
        "bucket   MiB  gradients  first ... last",
        "     0  1.00          2  b ... a",
        "     1  0.50          1  c",
    ]
