"""Deadlines of a job, and the time that does not count."""

from __future__ import annotations

import pytest

from launcher.supervisor.shutdown import Deadlines


def test_what_is_due() -> None:
    deadlines = Deadlines()
    assert deadlines.next == float("inf")
    deadlines.put("limit", now=0.0, seconds=10.0)
    deadlines.begin("limit", now=5.0, seconds=1.0)  # runs already
    deadlines.put("kill", now=0.0, seconds=20.0)
    assert deadlines.next == 10
    assert (deadlines.due(9.9), deadlines.due(10.0), deadlines.due(20.0)) == (set(), {"limit"}, {"limit", "kill"})
    deadlines.drop("limit")
    assert deadlines.next == 20
    deadlines.clear()
    assert deadlines.next == float("inf")


def test_a_debugger_holds_what_says_how_long_the_job_may_take_and_nothing_else() -> None:
    deadlines = Deadlines()
    deadlines.put("limit", now=0.0, seconds=10.0)
    deadlines.put("kill", now=0.0, seconds=20.0)
    deadlines.hold(now=4.0)
    assert deadlines.next == 20
    deadlines.begin("joining", now=5.0, seconds=2.0)
    deadlines.release(now=104.0)
    assert (deadlines.due(106.0), deadlines.due(110.0)) == ({"kill", "joining"}, {"kill", "joining", "limit"})
    assert deadlines.stood == 100


@pytest.mark.parametrize("moves", [(7.0,), (3.0, 4.0)])
def test_a_job_that_is_stopped_while_somebody_debugs_it_stands_still_once(moves: tuple[float, ...]) -> None:
    deadlines = Deadlines()
    deadlines.put("limit", now=0.0, seconds=10.0)
    deadlines.hold(now=4.0)
    for by in moves:
        deadlines.move(by)
    deadlines.release(now=24.0)  # of these 20 s it was stopped for 7
    assert deadlines.stood == 20
    assert deadlines.next == 30
