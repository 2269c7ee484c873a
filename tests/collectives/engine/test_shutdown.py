"""No rank ends alone: every way of leaving, under the bare engine, ends the job in time with the right status."""

from __future__ import annotations

import sys

import pytest

from collectives.engine.shutdown import ExitStatus, exit_code, job_status
from collectives.transport import LOST
from collectives.world import STOPPED
from tests.conftest import Run

LONG = pytest.mark.long
SCRIPT = """
import os, signal, sys, time
import numpy as np
import collectives

comm = collectives.init(timeout=20)
comm.all_reduce(np.ones(1))
{middle}
comm.all_reduce(np.ones(1))
print("done", comm.rank)
"""


# What was queued is finished before rank 0 leaves.
QUEUED = """
time.sleep(0.3 * comm.rank)
work = comm.all_reduce(np.ones(100_000), async_op=True)
if comm.rank == 0: sys.exit(0)
print(work.wait()[0])
sys.exit(0)
"""

FORGIVEN = """
twin = comm.duplicate()
twin.timeout = 0.2
if comm.rank == 0:
    try: twin.all_reduce(np.ones(1))
    except collectives.CollectiveTimeout: print('forgiven')
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("middle", "status", "says"),
    [
        (
            "if comm.rank == 1: raise ValueError('boom')",
            1,
            "rank 1 has failed (exit status 1) while rank 0 waits in all_reduce #1 (script.py:9)",
        ),
        ("if comm.rank == 1: signal.raise_signal(signal.SIGINT)", 130, "KeyboardInterrupt"),
        (QUEUED, 0, "2.0"),
        (FORGIVEN, 0, "forgiven"),
        # How a status is found, and which of several counts, is tested below.
        pytest.param("if comm.rank == 1: raise SystemExit", None, "rank 1 has left (exit status 0)", marks=LONG),
        pytest.param("if comm.rank == 1: sys.exit(3)", 3, "rank 1 has failed (exit status 3)", marks=LONG),
        pytest.param("try: sys.exit(3)\nexcept SystemExit: pass", 0, "done", marks=LONG),
    ],
    ids=[
        "raises",
        "is interrupted",
        "has queued",
        "has forgiven a timeout",
        "exits",
        "exits with 3",
        "catches an exit",
    ],
)
def test_every_way_of_leaving(run_script: Run, middle: str, status: int | None, says: str) -> None:
    """status: None for any but 0"""
    done = run_script(SCRIPT.format(middle=middle), timeout=20)
    assert done.returncode == status if status is not None else done.returncode != 0, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("status", "code"), [(None, 0), (0, 0), (3, 3), (256 + 7, 7), (-1, 255), ("words", 1), (True, 1)]
)
def test_exit_codes_are_pythons(status: object, code: int) -> None:
    assert exit_code(status) == code


@pytest.mark.parametrize(
    ("mine", "before", "after", "expected"),
    [
        (0, [], [0], 0),
        (3, [], [0], 3),
        (1, [3], [], 3),
        (0, [0], [5], 5),
        (1, [0], [7], 1),
        (STOPPED, [], [STOPPED], STOPPED),
        (0, [], [STOPPED], STOPPED),
        (STOPPED, [STOPPED], [1], 1),
        (0, [], [LOST], 1),
    ],
)
def test_the_first_failure_gives_the_status(mine: int, before: list[int], after: list[int], expected: int) -> None:
    assert job_status(mine, before, after) == expected


def test_the_status_is_seen_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    status = ExitStatus(lambda: calls[0])
    status.watch()
    assert status.status() == 0
    with pytest.raises(SystemExit):
        sys.exit(4)
    assert status.status() == 4
    calls[0] += 1  # somebody caught it and went on
    assert status.status() == 0
    sys.excepthook(ValueError, ValueError(), None)
    assert status.status() == 1
