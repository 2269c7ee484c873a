"""`breakpoint()` in ranks: one has the debugger, and no time limit of the job runs meanwhile."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.launcher.conftest import LAUNCH, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

SUM = """
import numpy as np, collectives
comm = collectives.init(timeout=3)
x = 41 + comm.rank
breakpoint()
y = comm.all_reduce(np.full(3, x))
print("sum", y[0])
"""


#: Lines from where pdb stops to the one after `breakpoint()`: from Python 3.13 on it stops at the call itself.
STEPS = 1 if sys.version_info >= (3, 13) else 0


class Debugged:
    """A job whose standard input and output this test holds."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.seen = ""

    def await_prompt(self) -> str:
        """What came up to the next prompt."""
        self.seen = wait_for(self.job.process.stdout, "(Pdb) ", 1)
        return self.seen

    def say(self, line: str) -> None:
        self.job.process.stdin.write(line + "\n")
        self.job.process.stdin.flush()

    def end(self, code: int) -> tuple[str, list[str]]:
        """What came on standard output, and on the other but for who passed a breakpoint."""
        done = self.job.wait(20, code=code)
        return done.stdout, others(done)


def others(done: Any) -> list[str]:
    return [line for line in done.stderr.splitlines() if "passes breakpoint() at" not in line]


@pytest.fixture
def debug(start_job: Any, script: Any) -> Any:
    """Starts a script of these lines under the launcher, with a pipe as standard input."""

    def start(body: str, options: Sequence[str] = ()) -> Debugged:
        return Debugged(start_job([*LAUNCH, "-n", "2", *options, script(body)], stdin=subprocess.PIPE))

    return start


def test_others_wait_in_a_collective_longer_than_its_time_limit(debug: Any) -> None:
    session = debug(SUM, options=["--timeout", "6"])
    session.await_prompt()
    for _ in range(STEPS):
        session.say("n")
        session.await_prompt()
    assert "-> y = comm.all_reduce(np.full(3, x))" in session.seen
    time.sleep(3.5)  # more than that limit; with the pause below also more than that of the whole job
    session.say("p x")
    assert "41" in session.await_prompt()
    session.say("n")  # the all_reduce, which needs the other rank
    session.await_prompt()
    session.say("p y[0]")
    assert "83" in session.await_prompt()
    time.sleep(3.5)  # the other rank has ended, and waits for this one to leave the world with it
    session.say("c")
    out, err = session.end(0)
    assert "sum 83" in out
    assert not err


@pytest.mark.long
def test_a_time_limit_runs_again_after_the_debugger(debug: Any) -> None:
    session = debug(SUM.replace("y = ", "if comm.rank == 0: time.sleep(30)\ny = "))
    session.await_prompt()
    time.sleep(3.5)
    session.say("c")
    _, err = session.end(1)
    assert re.search(r"all_reduce #0.* was not complete after 3 s", "\n".join(err))


@pytest.mark.parametrize("how", ["exit", pytest.param("Ctrl-C", marks=pytest.mark.long)])
def test_quitting_ends_the_job_with_one_line(debug: Any, how: str) -> None:
    session = debug(SUM)
    session.await_prompt()
    start = time.monotonic()
    if how == "exit":
        session.say("exit")
        why = f"rank 0's debugger was quit at job.py:{9 - STEPS}: ending the job (Ctrl-C kills it at once)"
    else:
        session.job.process.send_signal(signal.SIGINT)
        why = "Ctrl-C: ending the job (once more kills it at once)"
    session.job.process.wait(20)  # with standard input still open
    assert time.monotonic() - start < 4  # not after the grace
    assert session.end(130)[1] == [f"ddp-launch: {why}"]


def test_quitting_ends_the_process_if_no_signal_comes(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    body = """
import sys
from launcher import debugger
debugger._SHUTDOWN_LIMIT = 0.0
debugger.stop_at(sys._getframe())
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", body], input="q\n", capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "bdb.BdbQuit")
    assert "not reached" not in done.stdout


def test_a_rank_that_does_not_come_to_init_is_named(ddp_launch: Any) -> None:
    body = "if rank == 1:\n    time.sleep(30)\nimport collectives\ncollectives.init(timeout=1.5)"
    text = "ddp-launch: rank 1 did not come to collectives.init() within 1.5 s, where rank 0 waited"
    assert ddp_launch(body, code=1).last == text


def test_without_standard_input_it_ends_and_says_why(ddp_launch: Any) -> None:
    done = ddp_launch("breakpoint()\nprint('not reached')", code=130)
    [said] = others(done)
    assert said.startswith("ddp-launch: rank 0 stands in breakpoint()")
    assert said.endswith("standard input has ended: ending the job (Ctrl-C kills it at once)")
    assert "0: not reached" not in done.stdout


def test_another_rank_may_have_the_debugger_and_is_named_once(debug: Any) -> None:
    body = """
    for _ in range(1 if rank == 1 else 3):
        breakpoint()
    print(("read" if rank == 1 else "end"), repr(sys.stdin.readline()))
    """
    session = debug(body, options=["--debug-rank", "1"])
    assert "1: > " in session.await_prompt()
    session.say("p rank * 100")
    assert "100" in session.await_prompt()
    session.say("c")
    session.say("Ann")
    text = "0: ddp-launch: rank 0 passes breakpoint() at job.py:6: --debug-rank 0 gives it the debugger\n"
    assert "read 'Ann\\n'" in session.job.wait(20, code=0, err=text).stdout


def test_the_users_choice_of_a_debugger_counts(ddp_launch: Any) -> None:
    ddp_launch("breakpoint()\nprint('over')", n=1, env={"PYTHONBREAKPOINT": "builtins.print"}, out="\nover\n")
