"""Clocks of other nodes, read off the control messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.testing import assert_array_equal

from ddp.parallel.timeline.clocks import Clocks
from ddp.parallel.timeline.marks import ARRIVALS, DONE, LAUNCHED


def table(launched: list[float], done: list[float]) -> np.ndarray:
    rows = np.zeros((len(done), ARRIVALS))
    rows[:, LAUNCHED], rows[:, DONE] = launched, done
    return rows


def test_ranks_of_one_node_have_one_clock() -> None:
    clocks = Clocks([3, 3])
    clocks.hear(table([1, 2], [10, 700]))
    assert_array_equal(clocks.offsets(), [0, 0])


def test_the_median_of_what_was_done_last_tells_the_offset() -> None:
    clocks = Clocks([0, 1])
    assert_array_equal(clocks.offsets(), [0, 0])
    for late in (3, 5, 90):
        clocks.hear(table([0, 1000], [100, 1100 + late]))
    assert_array_equal(clocks.offsets(), [0, 1005])


def test_the_first_of_a_node_to_notice_counts_for_all_of_it() -> None:
    clocks = Clocks([0, 1, 0, 1])
    clocks.hear(table([0, 1000, 0, 1000], [150, 1104, 100, 1190]))
    assert_array_equal(clocks.offsets(), [0, 1004, 0, 1004])


def test_nobody_is_done_before_the_last_has_launched() -> None:
    # Rank 1 always notices 50 late. Where rank 0 launched last, 25 before rank 1 was done by its clock, its clock can
    # be ahead by 1025 at most.
    clocks = Clocks([0, 1])
    clocks.hear(table([0, 1000], [100, 1150]))
    clocks.hear(table([200, 1110], [201, 1225]))
    clocks.hear(table([300, 1310], [400, 1450]))
    assert_array_equal(clocks.offsets(), [0, 1025])
    # The other way round: rank 0 notices late, and rank 1 had launched only just before.
    clocks = Clocks([0, 1])
    clocks.hear(table([0, 1000], [150, 1100]))
    clocks.hear(table([200, 1300], [325, 1301]))
    clocks.hear(table([400, 1400], [550, 1500]))
    assert_array_equal(clocks.offsets(), [0, 975])


def test_a_message_whose_times_are_not_known_says_nothing() -> None:
    clocks = Clocks([0, 1])
    clocks.hear(table([0, 0], [100, 0]))
    assert_array_equal(clocks.offsets(), [0, 0])


def test_clocks_that_drift_are_followed() -> None:
    clocks = Clocks([0, 1])
    for number in range(200):
        clocks.hear(table([1000 * number, 1001 * number], [1000 * number + 100, 1001 * number + 100]))
    assert 136 <= clocks.offsets()[1] <= 199


def test_the_offset_of_simulated_nodes_is_found(count: Callable[[int, int], int]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count(50, 1000)):
        nodes = rng.integers(0, 3, 6)
        true = rng.integers(-(10**15), 10**15, 3)[nodes]
        true -= true[0]
        clocks = Clocks(nodes.tolist())
        for _ in range(40):
            launched = 10**14 + rng.integers(0, 10**7, 6)
            done = launched.max() + 100_000 + rng.integers(0, 200_000, 6)
            clocks.hear(table((launched + true).tolist(), (done + true).tolist()))
        assert abs(clocks.offsets() - true).max() <= 200_000  # no more than notice takes
