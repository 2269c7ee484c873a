"""The chosen buckets: as tables, and against every plan there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ddp.parallel.planning.choosing import TOLERANCE, Forecast, Link, choose_buckets, fit_link, forecast, split_large

SLOW = Link(alpha=0.1, beta=1.0)


def end_of(plan: list[list[int]], nbytes: list[int], ready: list[float], link: Link, launch: float = 0.0) -> float:
    """When all is reduced, whatever backward does."""
    return forecast(plan, nbytes, ready, link, 0.0, launch).done[-1]


@pytest.mark.parametrize(
    ("nbytes", "ready", "link", "plan"),
    [
        ([], [], SLOW, []),
        ([4], [1.0], SLOW, [[0]]),
        ([0], [0.0], Link(alpha=0.0, beta=0.0), [[0]]),
        # All ready at once: every further bucket costs its latency and gains nothing.
        ([4, 4, 4], [2.0, 2.0, 2.0], SLOW, [[2, 1, 0]]),
        ([4, 4, 4], [0.0, 0.0, 0.0], Link(alpha=0.0, beta=1.0), [[2, 1, 0]]),
        # Nothing costs anything: one bucket does as well as three. The same where there is latency alone.
        ([4, 4, 4], [3.0, 2.0, 1.0], Link(alpha=0.0, beta=0.0), [[2, 1, 0]]),
        ([4, 4, 4], [3.0, 2.0, 1.0], Link(alpha=9.0, beta=0.0), [[2, 1, 0]]),
        # No latency: whatever is ready goes at once.
        ([4, 4, 4], [3.0, 2.0, 1.0], Link(alpha=0.0, beta=0.25), [[2], [1], [0]]),
        # The order is that of the ready times, not that of the parameters.
        ([4, 4, 4], [2.0, 3.0, 1.0], Link(alpha=0.0, beta=0.25), [[2], [0], [1]]),
        # Not used, so ready at the start: it is gone before the others come.
        ([4, 4, 4], [3.0, 0.0, 2.9], Link(alpha=0.1, beta=0.25), [[1], [2, 0]]),
        # Gradients without elements cost nothing, and get no bucket of their own.
        ([4, 0, 4, 0], [4.0, 3.0, 2.0, 1.0], Link(alpha=0.1, beta=0.25), [[3, 2], [1, 0]]),
        # The wire is faster than backward: only the last bucket is exposed, and it is as small as it can be.
        ([4, 4, 4, 4], [4.0, 3.0, 2.0, 1.0], Link(alpha=0.1, beta=0.05), [[3, 2, 1], [0]]),
    ],
)
def test_plan(nbytes: list[int], ready: list[float], link: Link, plan: list[list[int]]) -> None:
    assert choose_buckets(nbytes, ready, link) == plan


def test_six_equal_layers_on_a_slow_wire() -> None:
    """The wire takes twice as long as backward: it must start at once and never pause, and needs no more than that."""
    nbytes, ready = [10] * 6, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    link = Link(alpha=0.2, beta=0.2)
    plan = choose_buckets(nbytes, ready, link)
    assert plan == [[5], [4, 3], [2, 1, 0]]
    seen = forecast(plan, nbytes, ready, link, backward=6.0)
    assert seen.launched == (1.0, 3.0, 6.0)
    assert seen.done == pytest.approx((3.2, 7.4, 13.6))
    assert (seen.end, seen.exposed) == pytest.approx((13.6, 7.6))
    # One bucket a layer hides as much, but pays the latency six times; one for all starts when backward ends.
    assert forecast([[5], [4], [3], [2], [1], [0]], nbytes, ready, link, 6.0).end == pytest.approx(14.2)
    assert forecast([[5, 4, 3, 2, 1, 0]], nbytes, ready, link, 6.0).end == pytest.approx(18.2)


def test_forecast_launches_in_order() -> None:
    """The second bucket is complete before the first, and waits for it all the same."""
    seen = forecast([[0], [1]], [10, 10], [5.0, 1.0], Link(alpha=1.0, beta=0.1), backward=6.0)
    assert seen == Forecast(launched=(5.0, 5.0), done=(7.0, 9.0), backward=6.0, end=9.0, exposed=3.0)


def test_forecast_of_what_is_hidden() -> None:
    seen = forecast([[0]], [10], [1.0], Link(alpha=1.0, beta=0.1), backward=6.0)
    assert seen == Forecast(launched=(1.0,), done=(3.0,), backward=6.0, end=6.0, exposed=0.0)
    assert forecast([], [], [], SLOW, 6.0) == Forecast(launched=(), done=(), backward=6.0, end=6.0, exposed=0.0)


def test_launching_delays_what_comes_later() -> None:
    seen = forecast([[1], [0]], [10, 10], [2.0, 1.0], Link(alpha=0.0, beta=0.01), backward=2.0, launch=0.5)
    assert seen.launched == (1.0, 2.5)
    assert seen.done == pytest.approx((1.1, 2.6))
    assert (seen.backward, seen.end) == (3.0, 3.0)
    nbytes, ready, link = [4, 4, 4], [3.0, 2.0, 1.0], Link(alpha=0.0, beta=0.25)
    assert choose_buckets(nbytes, ready, link, launch=0.1) == [[2], [1], [0]]
    assert choose_buckets(nbytes, ready, link, launch=0.6) == [[2, 1], [0]]
    assert choose_buckets(nbytes, ready, link, launch=2.5) == [[2, 1, 0]]


def test_of_plans_that_end_alike_the_one_with_fewest_buckets() -> None:
    """A second bucket gains 2 of 423, less than we can know, or of 323, which is more; a third gains nothing."""
    nbytes, link = [1, 1, 1], Link(alpha=0.0, beta=1.0)
    assert choose_buckets(nbytes, [420.0, 410.0, 400.0], link) == [[2, 1, 0]]
    assert choose_buckets(nbytes, [320.0, 310.0, 300.0], link) == [[2, 1], [0]]


def cuts(order: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to cut a sequence into pieces; one without a piece for an empty one."""
    for joints in itertools.product([False, True], repeat=max(0, len(order) - 1)):
        at = [0, *(place for place, cut in enumerate(joints, 1) if cut), len(order)]
        yield [list(order[start:stop]) for start, stop in itertools.pairwise(at) if start < stop]


def instance(rng: random.Random, most: int) -> tuple[list[int], list[float], Link, float]:
    """Gradients with ties and empty ones among them; costs that do and do not matter."""
    number = rng.randint(1, most)
    nbytes = [rng.choice([0, 5, rng.randint(0, 100)]) for _ in range(number)]
    ready = [rng.choice([0.0, 3.0, 20 * rng.random()]) for _ in range(number)]
    link = Link(alpha=rng.choice([0.0, 0.01, 1.0, 5 * rng.random()]), beta=rng.choice([0.0, 0.01, 0.1, rng.random()]))
    return nbytes, ready, link, rng.choice([0.0, 0.0, 0.1, rng.random()])


def in_order(ready: list[float]) -> list[int]:
    return sorted(range(len(ready)), key=lambda index: (ready[index], -index))


def test_no_plan_is_better(count: Callable[[int, int], int]) -> None:
    rng = random.Random(0)
    for _ in range(count(300, 5_000)):
        nbytes, ready, link, launch = instance(rng, 9)
        chosen = choose_buckets(nbytes, ready, link, launch=launch)
        ends = [(end_of(plan, nbytes, ready, link, launch), len(plan)) for plan in cuts(in_order(ready))]
        limit = min(ends)[0] * (1 + TOLERANCE)
        assert end_of(chosen, nbytes, ready, link, launch) <= limit * (1 + 1e-12)
        fewest = [min(many for end, many in ends if end <= limit * slack) for slack in (1 + 1e-12, 1 - 1e-12)]
        assert fewest[0] <= len(chosen) <= fewest[1]
        assert [index for bucket in chosen for index in bucket] == in_order(ready)


def test_kinds_never_share_a_bucket() -> None:
    link = Link(alpha=0.1, beta=0.25)
    # Cut as one sequence would be, and every stretch sorted by kind.
    assert choose_buckets([4, 4, 4, 4], [4.0, 3.0, 2.0, 1.0], link, "aabb") == [[3], [2], [1], [0]]
    # The few small ones of another kind wait for each other.
    nbytes, ready = [8, 1, 8, 1, 8, 1], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert choose_buckets(nbytes, ready, Link(alpha=0.4, beta=0.1), "ababab") == [[4], [2], [5, 3, 1], [0]]
    assert choose_buckets([4, 4], [2.0, 1.0], SLOW, "aa") == choose_buckets([4, 4], [2.0, 1.0], SLOW)
    assert choose_buckets([], [], SLOW, []) == []


def test_with_kinds_hardly_any_plan_is_better(count: Callable[[int, int], int]) -> None:
    """A heuristic: against all ways to cut each kind's sequence, launched as they are complete."""
    rng = random.Random(0)
    excess = []
    for _ in range(count(100, 2_000)):
        nbytes, ready, link, launch = instance(rng, 8)
        kinds = [rng.choice("ab") for _ in nbytes]
        order = in_order(ready)
        of_kinds = [list(cuts([index for index in order if kinds[index] == kind])) for kind in "ab"]
        plans = (
            sorted(both[0] + both[1], key=lambda bucket: order.index(bucket[-1]))
            for both in itertools.product(*of_kinds)
        )
        best = min(end_of(plan, nbytes, ready, link, launch) for plan in plans)
        chosen = choose_buckets(nbytes, ready, link, kinds, launch)
        assert all(len({kinds[index] for index in bucket}) == 1 for bucket in chosen)
        assert sorted(index for bucket in chosen for index in bucket) == list(range(len(nbytes)))
        assert chosen == sorted(chosen, key=lambda bucket: order.index(bucket[-1]))
        excess.append(end_of(chosen, nbytes, ready, link, launch) / best - 1 if best > 0 else 0.0)
    assert max(excess) < 0.15
    assert sorted(excess)[len(excess) * 9 // 10] <= 2 * TOLERANCE


def test_many_gradients() -> None:
    """Wire and backward are equally fast, and latency is nothing: the most buckets there can be, and still few."""
    nbytes, ready = [1] * 2000, [float(time) for time in range(2000, 0, -1)]
    link = Link(alpha=0.0, beta=1.0)
    chosen = choose_buckets(nbytes, ready, link)
    assert end_of(chosen, nbytes, ready, link) <= 2001 * (1 + 2 * TOLERANCE)
    assert len(chosen) < 2 / TOLERANCE
    by_kind = choose_buckets(nbytes, ready, link, ["a", "b"] * 1000)
    assert end_of(by_kind, nbytes, ready, link) <= 2001 * (1 + 3 * TOLERANCE)


@pytest.mark.parametrize(
    ("samples", "alpha", "beta"),
    [
        ([(1, 3.0), (2, 5.0), (4, 9.0)], 1.0, 2.0),
        # The fastest of a size counts, in whatever order they come.
        ([(4, 9.0), (1, 3.0), (4, 90.0), (2, 5.0), (1, 30.0), (2, 50.0)], 1.0, 2.0),
        # One size that is wrong does not move the line.
        ([(1, 3.0), (2, 5.0), (4, 9.0), (8, 99.0), (16, 33.0)], 1.0, 2.0),
        ([(1, 90.0), (2, 5.0), (4, 9.0), (8, 17.0), (16, 33.0)], 1.0, 2.0),
        # Never less than nothing.
        ([(1, 1.5), (10, 20.0), (100, 200.0)], 0.0, 2.0),
        ([(1, 5.0), (10, 5.0), (100, 4.9)], 4.9, 0.0),
        # One size says nothing of latency, nor none of bandwidth.
        ([(4, 8.0)], 0.0, 2.0),
        ([(0, 8.0)], 8.0, 0.0),
    ],
)
def test_fit(samples: list[tuple[int, float]], alpha: float, beta: float) -> None:
    link = fit_link(samples)
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta))


def test_fit_of_a_wire_that_lets_small_sizes_pass_at_once() -> None:
    """Measured at 1 Gbit/s behind a token bucket: most sizes are small, and the bandwidth shows in the large ones."""
    sizes = [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
    link = fit_link(list(zip(sizes, [85e-6, 85e-6, 84e-6, 2061e-6, 7523e-6, 34979e-6], strict=True)))
    assert link.beta == pytest.approx(8.4e-9, rel=0.02)
    assert 0 < link.alpha < 100e-6


def test_fit_finds_latency_beside_a_large_size() -> None:
    """By absolute errors, a percent at the largest size would hide the latency of all others."""
    samples = [(4096 * 4**step, 1e-4 + 8e-9 * 4096 * 4**step) for step in range(6)]
    samples[-1] = (samples[-1][0], samples[-1][1] * 1.01)
    link = fit_link(samples)
    assert (link.alpha, link.beta) == pytest.approx((1e-4, 8e-9), rel=0.011)


@pytest.mark.parametrize(
    ("plan", "nbytes", "link", "split"),
    [
        ([[0, 1, 2]], [4, 4, 4], Link(alpha=0.08, beta=1.0), [[0], [1], [2]]),
        ([[0, 1, 2]], [4, 4, 4], Link(alpha=0.16, beta=1.0), [[0, 1, 2]]),  # a rest of 4 bytes would not be enough
        ([[0, 1, 2, 3]], [4, 4, 4, 4], Link(alpha=0.16, beta=1.0), [[0, 1], [2, 3]]),
        ([[0, 1]], [4, 4], Link(alpha=1.0, beta=1.0), [[0, 1]]),  # latency counts
        ([[2, 1], [0]], [4, 4, 4], Link(alpha=0.0, beta=1.0), [[2], [1], [0]]),
        ([[0, 1], [2]], [4, 4, 4], Link(alpha=0.1, beta=0.0), [[0, 1], [2]]),  # bytes cost nothing
        ([[0, 1, 2, 3]], [1, 9, 1, 9], Link(alpha=0.2, beta=1.0), [[0, 1], [2, 3]]),
        ([], [], Link(alpha=0.0, beta=1.0), []),
    ],
)
def test_large_buckets_are_cut_where_latency_does_not_count(
    plan: list[list[int]], nbytes: list[int], link: Link, split: list[list[int]]
) -> None:
    assert split_large(plan, nbytes, link) == split
