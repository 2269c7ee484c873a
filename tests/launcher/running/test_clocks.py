"""Deadlines of a job, and the time that does not count."""

from __future__ import annotations

import pytest

from launcher.running.clocks import Clocks


def test_what_is_due() -> None:
    clocks = Clocks()
    assert clocks.next == float("inf")
    clocks.put("limit", now=0.0, seconds=10.0)
    clocks.begin("limit", now=5.0, seconds=1.0)  # runs already
    clocks.put("kill", now=0.0, seconds=20.0)
    assert clocks.next == 10
    assert (clocks.due(9.9), clocks.due(10.0), clocks.due(20.0)) == (set(), {"limit"}, {"limit", "kill"})
    clocks.drop("limit")
    assert clocks.next == 20
    clocks.clear()
    assert clocks.next == float("inf")


def test_a_debugger_holds_what_says_how_long_the_job_may_take_and_nothing_else() -> None:
    clocks = Clocks()
    clocks.put("limit", now=0.0, seconds=10.0)
    clocks.put("kill", now=0.0, seconds=20.0)
    clocks.hold(now=4.0)
    assert clocks.next == 20
    clocks.begin("joining", now=5.0, seconds=2.0)
    clocks.release(now=104.0)
    assert (clocks.due(106.0), clocks.due(110.0)) == ({"kill", "joining"}, {"kill", "joining", "limit"})
    assert clocks.stood == 100


@pytest.mark.parametrize("moves", [(7.0,), (3.0, 4.0)])
def test_a_job_that_is_stopped_while_somebody_debugs_it_stands_still_once(moves: tuple[float, ...]) -> None:
    clocks = Clocks()
    clocks.put("limit", now=0.0, seconds=10.0)
    clocks.hold(now=4.0)
    for by in moves:
        clocks.move(by)
    clocks.release(now=24.0)  # of these 20 s it was stopped for 7
    assert clocks.stood == 20
    assert clocks.next == 30
