"""What is made of ranks that leave with 75: stopped as asked, unless others were killed or crashed on their way."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from collectives.world import STOPPED
from launcher.diagnosis.failures import NotStopped, Stop, stop_of

AS_ASKED = "stopped as asked{}, state saved: start the same command to go on"
LATE = "{} ended before all had saved (more time: --grace): start the same command to go on from the checkpoint before"


@pytest.mark.parametrize(
    ("ends", "steps", "stop", "text"),
    [
        ([0, 0], [], None, ""),
        ([0, 3], [], None, ""),
        ([-15, -15], [], None, ""),
        ([STOPPED, STOPPED], [120, 120], Stop(120), AS_ASKED.format(" at step 120")),
        ([STOPPED, STOPPED], [], Stop(None), AS_ASKED.format("")),
        ([STOPPED, STOPPED], [7], Stop(7), AS_ASKED.format(" at step 7")),
        ([STOPPED, STOPPED], [7, 8], Stop(None), AS_ASKED.format("")),  # they do not agree
        ([STOPPED, STOPPED], [0, 0], Stop(0), AS_ASKED.format(" at step 0")),
        ([0, STOPPED], [5], Stop(5), AS_ASKED.format(" at step 5")),  # rank 0 had nothing left to do
        ([STOPPED, -9], [5], Stop(5, (1,)), LATE.format("rank 1 was")),
        ([-9, STOPPED, -15, 3], [], Stop(None, (0, 2, 3)), LATE.format("ranks 0, 2, 3 were")),
        ([STOPPED, None], [], Stop(None, (1,)), LATE.format("rank 1 was")),
    ],
)
def test_how_a_job_stopped(ends: list[int | None], steps: Collection[int], stop: Stop | None, text: str) -> None:
    found = stop_of(dict(enumerate(ends)), steps)
    assert found == stop
    assert str(found or "") == text


def test_who_went_on_is_a_failure() -> None:
    failure = NotStopped(at=0.0, ranks=(1, 2), seconds=10.0)
    assert str(failure) == "ranks 1, 2 went on for 10 s after the others had stopped as asked (more time: --grace)"
    assert failure.code == 1
