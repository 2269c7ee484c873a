"""No rank ends alone: every way of leaving, under the bare engine, ends the job in time with the right status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from collectives.engine.shutdown import ExitStatus, exit_code, job_status
from collectives.transport import LOST
from collectives.world import STOPPED

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

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    return lambda middle: run_script(SCRIPT.format(middle=middle), timeout=20)


@pytest.mark.mpi
class TestUnderTheBareEngine:
    def test_a_good_end(self, run: Run) -> None:
        done = run("")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done") == 2  # engines tear lines

    def test_an_exception(self, run: Run) -> None:
        done = run("if comm.rank == 1: raise ValueError('boom')")
        assert done.returncode == 1
        assert "ValueError: boom" in done.stderr
        assert "rank 1 has failed (exit status 1) while rank 0 waits in all_reduce #1 (script.py:9)" in done.stderr

    def test_leaving_with_0_while_others_wait(self, run: Run) -> None:
        done = run("if comm.rank == 1: raise SystemExit")
        assert done.returncode != 0
        assert "rank 1 has left (exit status 0) while rank 0 waits in all_reduce #1" in done.stderr

    def test_an_exit_status(self, run: Run) -> None:
        done = run("if comm.rank == 1: sys.exit(3)")
        assert done.returncode == 3
        assert "rank 1 has failed (exit status 3)" in done.stderr

    def test_ctrl_c_on_one_rank(self, run: Run) -> None:
        done = run("if comm.rank == 1: signal.raise_signal(signal.SIGINT)")
        assert done.returncode == 130
        assert "KeyboardInterrupt" in done.stderr

    def test_an_exit_that_was_caught_is_no_exit(self, run: Run) -> None:
        done = run("try: sys.exit(3)\nexcept SystemExit: pass")
        assert done.returncode == 0, done.stderr

    def test_what_was_queued_is_finished_before_leaving(self, run: Run) -> None:
        done = run(
            "time.sleep(0.3 * comm.rank)\n"
            "work = comm.all_reduce(np.ones(100_000), async_op=True)\n"
            "if comm.rank == 0: sys.exit(0)\n"
            "print(work.wait()[0])\nsys.exit(0)"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2.0"]

    def test_a_broken_communicator_that_was_forgiven(self, run: Run) -> None:
        done = run(
            "twin = comm.duplicate()\ntwin.timeout = 0.2\n"
            "if comm.rank == 0:\n"
            "    try: twin.all_reduce(np.ones(1))\n"
            "    except collectives.CollectiveTimeout: print('forgiven')"
        )
        assert done.returncode == 0, done.stderr
        assert "forgiven" in done.stdout


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
