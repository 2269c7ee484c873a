"""How the job goes, as sentences; and when the line is painted."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.console.status import StatusLine, StepRate, sentence


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ({}, "4/4 ranks up, 0:05"),
        ({"n": 1, "up": 1, "seconds": 90061}, "1/1 rank up, 25:01:01"),
        ({"up": 2}, "2/4 ranks up, 0:05"),
        ({"up": 3, "ended": 1}, "3/4 ranks up, 1 ended, 0:05"),
        (
            {"step": 1200, "rate": 8.31, "restarts": 1, "seconds": 185.2},
            "4/4 ranks up, step 1200, 8.3 steps/s, 1 restart, 3:05",
        ),
        ({"step": 7, "rate": 0.0}, "4/4 ranks up, step 7, 0.0 steps/s, 0:05"),
        ({"step": 7, "rate": 0.02}, "4/4 ranks up, step 7, 50 s/step, 0:05"),
        ({"step": 7, "rate": 1234.5}, "4/4 ranks up, step 7, 1234 steps/s, 0:05"),
        ({"restarts": 2}, "4/4 ranks up, 2 restarts, 0:05"),
        ({"debugging": frozenset({0})}, "4/4 ranks up, rank 0 in a debugger, 0:05"),
        ({"debugging": frozenset({0, 1, 2})}, "4/4 ranks up, ranks 0-2 in a debugger, 0:05"),
        ({"restarts": 1, "up": 0, "ended": 4, "pause": 3.2}, "restart 2 in 4 s, 0:05"),
    ],
)
def test_sentences(progress: dict[str, Any], text: str) -> None:
    usual = {"n": 4, "up": 4, "ended": 0, "step": None, "rate": None, "restarts": 0, "seconds": 5.0}
    assert sentence(**{**usual, **progress}) == text


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        ([], None),
        ([(0, 5)], None),
        ([(0, 5), (0.4, 9)], None),  # too near to say
        ([(0, 5), (1, 13)], 8.0),
        ([(0, 0), (5, 5), (15, 105), (25, 205)], 10.0),  # what was long ago does not count
        ([(0, 100), (1, 110), (2, 0), (3, 20)], 20.0),  # it counts anew
        ([(0, 100), (10, 100), (20, 100)], 0.0),
    ],
)
def test_pace(samples: list[tuple[float, int]], rate: float | None) -> None:
    step_rate = StepRate(window=10.0)
    for now, step in samples:
        step_rate.add(step, now)
    assert step_rate.rate == rate


class Shown:
    """Stands for the console."""

    def __init__(self, repaints: bool = True) -> None:
        self.repaints = repaints
        self.lines: list[str] = []

    def status(self, text: str) -> None:
        self.lines.append(text)


def follow(repaints: bool = True) -> tuple[StatusLine, Shown]:
    shown: Any = Shown(repaints)
    line = StatusLine(shown, now=100.0)
    line.attempt_started(0, 2)
    for rank in (0, 1):
        line.rank_started(rank, {})
    return line, shown


def test_it_is_painted_after_a_second_and_at_most_twice_a_second() -> None:
    line, shown = follow()
    due = line.tick(100.0)
    assert (due, shown.lines) == (101.0, [])
    for hundredth in range(300):
        line.tick(101.0 + hundredth / 100)
    assert len(shown.lines) == 6
    assert shown.lines[0] == "ddp-launch: 2/2 ranks up, 0:01"


def test_off_a_terminal_it_is_a_line_every_ten_seconds() -> None:
    line, shown = follow(repaints=False)
    for second in range(31):
        line.tick(100.0 + second)
    assert [text[-4:] for text in shown.lines] == ["0:10", "0:20", "0:30"]


def test_steps_are_those_of_the_slowest_and_start_anew() -> None:
    line, shown = follow()
    for second in range(4):
        line.heartbeat(0, {"step": 10 * second}, 101.0 + second)
        line.heartbeat(1, {"step": 10 * second - 1 if second else None}, 101.5 + second)
    line.tick(105.0)
    line.attempt_started(1, 2)
    line.tick(106.0)
    assert shown.lines == [
        "ddp-launch: 2/2 ranks up, step 29, 10.0 steps/s, 0:05",
        "ddp-launch: 0/2 ranks up, 1 restart, 0:06",
    ]


def test_while_a_restart_is_waited_for_it_says_how_long_that_takes() -> None:
    line, shown = follow()
    for rank in (0, 1):
        line.rank_ended(rank, 1)
    line.restart_pending(until=104.0)
    line.tick(101.0)
    line.resumed(1.0)
    line.tick(102.0)
    line.attempt_started(1, 2)
    line.tick(105.0)
    assert shown.lines == [
        "ddp-launch: restart 1 in 3 s, 0:01",
        "ddp-launch: restart 1 in 3 s, 0:02",
        "ddp-launch: 0/2 ranks up, 1 restart, 0:05",
    ]


def test_when_all_ranks_have_ended_there_is_nothing_to_say() -> None:
    line, shown = follow()
    line.rank_ended(0, 0)
    line.tick(101.0)
    line.rank_ended(1, 0)
    line.tick(102.0)
    assert shown.lines == ["ddp-launch: 1/2 ranks up, 1 ended, 0:01", ""]
