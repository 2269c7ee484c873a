"""Steps made by hand, and what the timelines of their ranks make of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ddp.parallel.stats import ClockOffsets, Lateness
from tests.ddp.parallel.steps import Ranks, make_step


def assert_spreads(stats: Any, **expected: float | None) -> None:
    for name, value in expected.items():
        found = getattr(stats, name)
        if value is None:
            assert found is None, name
        else:
            assert (found.mean, found.median) == (pytest.approx(value), pytest.approx(value)), name


def test_the_parts_of_a_step() -> None:
    ranks = Ranks(2)
    for number in range(4):
        ranks.run(make_step(number, 100 * number), make_step(number, 100 * number))
    stats = ranks.stats()[0]
    assert (stats.rank, stats.size, stats.steps, stats.compared) == (0, 2, 4, 3)
    # Buckets are under way from 60 to 80 and from 90 to 99; backward computes until 90, ends at 100.
    assert_spreads(stats, step=100, forward=29, backward=40, exposed=10, other=21)
    assert_spreads(stats, communication=29, hidden=20, behind=0)
    assert stats.hidden_share == pytest.approx(20 / 29)
    first, second = stats.buckets
    assert (first.names, first.mib, first.exposed) == (("out",), 1.0, 0.0)
    assert (second.names, second.mib) == (("first", "second"), 2.0)
    assert [first.ready, first.launched, first.done] == pytest.approx([10, 10, 30])
    assert [second.ready, second.launched, second.done, second.exposed] == pytest.approx([40, 40, 49, 9])
    assert stats.waited_for() == "no rank was waited for: they arrived together"


def test_a_late_rank_is_named_with_the_reason() -> None:
    ranks = Ranks(3)
    for number in range(5):
        late = 8.0 if number != 2 else 0.0
        ranks.run(*(make_step(number, 100 * number, late if rank == 1 else 0.0) for rank in range(3)))
    for stats in ranks.stats():
        assert stats.compared == 4
        never = Lateness(steps=0, late=0.0, before=0.0, forward=0.0, backward=0.0)
        assert stats.lateness[0] == stats.lateness[2] == never
        late = stats.lateness[1]
        assert (late.steps, late.late, late.before) == (3, pytest.approx(8.0), pytest.approx(8.0))
        assert (late.forward, late.backward) == (pytest.approx(0.0), pytest.approx(0.0))
        assert stats.waited_for() == (
            "rank 1 was waited for in 75 % of steps, 8.0 ms on average: 8.0 ms late already when forward began (data, "
            "optimizer or logging)"
        )
    others, late = ranks.stats()[0], ranks.stats()[1]
    # Of the 10 ms that the others wait, 8 are for a rank that has not come, and no faster wire would help.
    assert_spreads(others, exposed=10)
    assert others.behind.mean == pytest.approx(6.0)
    assert_spreads(late, behind=0)
    assert late.exposed.mean == pytest.approx(10 - 4 / 5 * 8)


def test_ranks_that_are_late_in_turn_are_not_blamed() -> None:
    ranks = Ranks(2)
    for number in range(5):
        ranks.run(make_step(number, 100 * number, 4.0 * (number % 2)), make_step(number, 100 * number, 2.0))
    stats = ranks.stats()[0]
    assert stats.compared == 4
    assert stats.waited_for() == (
        "no rank stands out: waited 2.0 ms a step for one or another (rank 0 in 50 %, rank 1 in 50 % of steps)"
    )


def test_before_there_is_anything_to_say() -> None:
    ranks = Ranks(2)
    stats = ranks.stats()[0]
    assert (stats.steps, stats.compared, stats.step, stats.backward) == (0, 0, None, None)
    assert stats.waited_for() == "nothing is known yet of when the other ranks arrived"
    assert "rank 0 of 2, no step yet" in str(stats)
    assert ranks.timelines[0].summary() == "no step"
    ranks.run(make_step(0, 0), make_step(0, 0))
    assert_spreads(ranks.stats()[0], step=None, other=None, backward=40)
    assert ranks.timelines[0].summary() == (
        "1 step: forward 29.0, backward 40.0, exposed communication 10.0 (of 29.0, 69 % hidden) ms; nothing is known "
        "yet of when the other ranks arrived"
    )


def test_a_summary_begins_a_new_period_and_its_pause_counts_nowhere() -> None:
    ranks = Ranks(2)
    for number in range(3):
        ranks.run(make_step(number, 100 * number), make_step(number, 100 * number, 5.0))
    line = ranks.timelines[0].summary()
    assert line == (
        "3 steps of 100.0 ms: forward 29.0, backward 40.0, exposed communication 10.0 (of 29.0, 69 % hidden), other "
        "21.0 ms; rank 1 was waited for in 100 % of steps, 5.0 ms on average: 5.0 ms late already when forward began "
        "(data, optimizer or logging)"
    )
    # Only rank 0 asked for it. It is still heard by rank 1, of the step before, too.
    for number in range(3, 5):
        ranks.run(make_step(number, 9000 + 100 * number), make_step(number, 9000 + 100 * number, 5.0))
    mine, theirs = ranks.stats()
    assert (mine.steps, theirs.steps) == (2, 5)
    assert (mine.compared, theirs.compared) == (1, 4)
    assert_spreads(mine, step=100)
    assert theirs.step.mean == pytest.approx((3 * 100 + 9100) / 4)


@pytest.mark.parametrize(
    ("nodes", "tables", "offsets"),
    [
        ([3, 3], [[10, 700]], [0, 0]),  # one node, one clock
        ([0, 1], [], [0, 0]),
        ([0, 1], [[100, 1103], [100, 1105], [100, 1190]], [0, 1005]),  # the median
        ([0, 1, 0, 1], [[150, 1104, 100, 1190]], [0, 1004, 0, 1004]),  # the first of a node to notice counts for it
        ([0, 1], [[100, 1103], [0, 1190]], [0, 1003]),  # a rank that does not know says 0
    ],
)
def test_clock_offsets(nodes: list[int], tables: list[list[float]], offsets: list[float]) -> None:
    clocks = ClockOffsets(nodes)
    for done in tables:
        clocks.receive(np.array([[0.0, 0.0, at, 0.0] for at in done]))
    assert clocks.offsets().tolist() == offsets


def test_statistics_are_json_and_print_as_a_table() -> None:
    ranks = Ranks(2)
    for number in range(3):
        ranks.run(make_step(number, 100 * number), make_step(number, 100 * number, 8.0))
    stats = ranks.stats()[0]
    found = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert found["steps"] == 3
    assert found["backward"] == {"mean": pytest.approx(40.0), "median": pytest.approx(40.0)}
    assert found["buckets"][1]["names"] == ["first", "second"]
    assert found["lateness"][1]["steps"] == 2
    lines = str(stats).splitlines()
    assert lines[0] == "rank 0 of 2, 3 steps; host times in ms"
    assert "  hidden behind backward                    20.00    20.00   69 % of it" in lines
    assert "     1     2.00    40.00    40.00    49.00     9.00  first ... second" in lines
    assert "   1          100 %     8.00     8.00     0.00     0.00" in lines
    assert lines[-1].startswith("rank 1 was waited for in 100 % of steps")
