"""The clock by which time limits run."""

from __future__ import annotations

import pytest

from launcher.diagnosis.job_clock import JobClock


@pytest.mark.parametrize("moves", [(), (7.0,), (3.0, 4.0)])
def test_a_job_that_is_stopped_while_a_rank_is_in_a_debugger_stands_still_once(moves: tuple[float, ...]) -> None:
    clock = JobClock()
    clock.hold(now=4.0)
    clock.hold(now=5.0)
    for by in moves:
        clock.skip(by)
    assert clock.held
    assert clock.at(24.0) == 4.0
    clock.release(now=24.0)
    assert clock.at(25.0) == 5.0
    clock.skip(2.0)
    assert clock.at(28.0) == 6.0
