"""Steps made by hand, and what the timelines of their ranks make of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ddp.parallel.stats import ClockOffsets
from tests.ddp.parallel.steps import Ranks, make_step


def after(*late: list[float]) -> Ranks:
    """Ranks that have made steps. late: of each step, ms that each rank was late"""
    ranks = Ranks(len(late[0]))
    for number, each in enumerate(late):
        ranks.run(*(make_step(number, 100 * number, ms) for ms in each))
    return ranks


@pytest.mark.parametrize(
    ("late", "sentence"),
    [
        ([[0, 0]], "nothing is known yet of when the other ranks arrived"),
        ([[0, 0]] * 4, "no rank was waited for: they arrived together"),
        (
            [[0, ms, 0] for ms in (8, 8, 0, 8, 8)],
            "rank 1 was waited for in 75 % of steps, 8.0 ms on average, lost most of all before forward",
        ),
        ([[4 * (number % 2), 2] for number in range(5)], "no rank stands out: waited 2.0 ms a step for one or another"),
    ],
)
def test_which_rank_was_waited_for(late: list[list[float]], sentence: str) -> None:
    assert after(*late).stats()[0].waited_for().startswith(sentence)


def test_a_summary_begins_a_new_period_and_its_pause_counts_nowhere() -> None:
    ranks = Ranks(2)
    assert str(ranks.stats()[0]) == "rank 0 of 2, no step yet"
    assert ranks.timelines[0].summary() == "no step"
    ranks.run(make_step(0, 0), make_step(0, 0))
    assert (ranks.stats()[0].step, ranks.stats()[0].other) == (None, None)
    assert ranks.timelines[0].summary() == (
        "1 step: forward 29.0, backward 40.0, exposed communication 10.0 (of 29.0, 69 % hidden) ms; nothing is known "
        "yet of when the other ranks arrived"
    )
    ranks = after(*[[0, 5]] * 3)
    assert ranks.timelines[0].summary() == (
        "3 steps of 100.0 ms: forward 29.0, backward 40.0, exposed communication 10.0 (of 29.0, 69 % hidden), other "
        "21.0 ms; rank 1 was waited for in 100 % of steps, 5.0 ms on average, lost most of all before forward (data, "
        "optimizer or logging)"
    )
    # Only rank 0 asked for it. It is still heard by rank 1, of the step before, too.
    for number in range(3, 5):
        ranks.run(make_step(number, 9000 + 100 * number), make_step(number, 9000 + 100 * number, 5.0))
    mine, theirs = ranks.stats()
    assert (mine.steps, theirs.steps) == (2, 5)
    assert (mine.compared, theirs.compared) == (1, 4)
    assert [mine.step, theirs.step] == pytest.approx([100, (3 * 100 + 9100) / 4])


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
    stats: Any = after(*[[0, 8]] * 3).stats()[0]
    document = json.loads(json.dumps(asdict(stats), allow_nan=False))
    assert (document["steps"], document["backward"]) == (3, pytest.approx(40.0))
    assert document["buckets"][1]["names"] == ["first", "second"]
    assert document["lateness"][1]["steps"] == 2
    lines = str(stats).splitlines()
    # Buckets are under way from 60 to 80 and from 90 to 99; backward computes until 90, ends at 100.
    assert "     0  1.00  10.00     10.00  30.00     0.00  out" in lines
    assert lines[0] == "rank 0 of 2, 3 steps; host times in ms, the mean over steps"
    assert "  hidden behind backward                  20.00" in lines
    assert "     1  2.00  40.00     40.00  49.00     9.00  first ... second" in lines
    assert lines[-1].startswith("rank 1 was waited for in 100 % of steps")
