"""Who was waited for, and where it lost the time: literal tables."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ddp.parallel.timeline.lateness import deciding, lateness

NO, NAN = -np.inf, np.nan


@pytest.mark.parametrize(
    ("arrivals", "free", "bucket"),
    [
        ([10, 20, 30], [NO, 15, 25], 2),  # the wire is quick: it waits for each of them
        ([10, 20, 30], [NO, 50, 90], 0),  # it is slow: after the first it is never idle
        ([10, 60, 65], [NO, 50, 90], 1),
        ([10, 20, 30], [NO, NO, NO], 2),  # not known when they were done
        ([20, 30], [50, 90], 0),  # only two are told, and the wire was busy at both
    ],
)
def test_the_bucket_that_decides(arrivals: list[float], free: list[float], bucket: int) -> None:
    assert deciding(np.array([arrivals]), np.array([free])).tolist() == [bucket]


@pytest.mark.parametrize(
    ("forward", "begun", "there", "last", "lost"),
    [
        # late when forward began: data, optimizer, logging
        ([100, 112], [140, 152], [180, 193], 1, [12, 0, 1]),
        # slow in forward
        ([100, 100], [150, 140], [190, 180], 0, [0, 10, 0]),
        # late, but quicker than the others in forward, and then slower
        ([100, 108], [140, 145], [180, 191], 1, [8, -3, 6]),
        # no forward: what was lost before backward is all one
        ([NAN, NAN], [140, 145], [180, 191], 1, [5, 0, 6]),
        # the median of the others
        ([100, 101, 102, 120], [140, 141, 142, 160], [180, 181, 182, 200], 3, [19, 0, 0]),
    ],
)
def test_where_the_time_was_lost(
    forward: list[float], begun: list[float], there: list[float], last: int, lost: list[float]
) -> None:
    ranks, parts = lateness(
        np.array([forward], float), np.array([begun], float), np.array([there], float)[:, :, None], np.array([[NO]])
    )
    assert ranks.tolist() == [last]
    assert parts.tolist() == [lost]


def test_it_is_told_at_the_bucket_that_decides() -> None:
    # Rank 0 came 20 late to the first bucket, and the wire was busy from then on: that rank 1 came last to the second
    # made no difference.
    arrivals = np.array([[[130, 140], [110, 150]]], float)
    forward, begun = np.array([[90, 70]], float), np.array([[100, 100]], float)
    ranks, parts = lateness(forward, begun, arrivals, np.array([[NO, 170]]))
    assert ranks.tolist() == [0]
    assert parts.tolist() == [[20, -20, 20]]
    ranks, _ = lateness(forward, begun, arrivals, np.array([[NO, 145]]))
    assert ranks.tolist() == [1]


def test_many_steps_at_once_are_the_same_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    forward, begun = rng.integers(0, 9, (20, 5)).astype(float), rng.integers(9, 20, (20, 5)).astype(float)
    arrivals, free = rng.integers(20, 40, (20, 5, 3)).astype(float), rng.integers(20, 40, (20, 3)).astype(float)
    ranks, parts = lateness(forward, begun, arrivals, free)
    for step in range(20):
        one = slice(step, step + 1)
        alone = lateness(forward[one], begun[one], arrivals[one], free[one])
        assert_array_equal(ranks[one], alone[0])
        assert_array_equal(parts[one], alone[1])
