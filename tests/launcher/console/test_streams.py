"""Standard streams that are closed, and Ctrl-C before there is a job: nothing hangs, nothing is mistaken."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest

LAUNCH = f"{sys.executable} -m launcher"

# What the command does, from the moment on at which it is ours and no longer the interpreter's start.
ENTRY = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
import launcher.__main__
print(flush=True)
sys.exit(launcher.__main__.main())
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("closed", "n"), [pytest.param("2>&-", 1, marks=pytest.mark.long), ("<&- >&- 2>&-", 2)])
def test_a_closed_stream_is_as_good_as_dev_null(run_job: Any, script: Any, closed: str, n: int) -> None:
    path = script("print('out', sys.stdin.read())")
    run_job(["sh", "-c", f"{LAUNCH} -n {n} {path} {closed}"], timeout=20, code=0, out="" if n > 1 else "out \n")


def test_what_cannot_be_printed_says_so_by_the_exit_code(run_job: Any) -> None:
    says = "ddp-launch: the output cannot be written: No space left on device\n"
    for words, code, err in (
        ("--bogus 2>/dev/full", 2, ""),
        ("--bogus 2>&-", 2, ""),
        ("--version >/dev/full 2>&-", 1, ""),
        ("--help >/dev/full", 1, says),
    ):
        run_job(["sh", "-c", f"{LAUNCH} {words}"], timeout=20, code=code, out="", err=err)


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.long), 0.15])
def test_ctrl_c_before_the_job_has_started_prints_no_traceback(start_job: Any, script: Any, delay: float) -> None:
    job = start_job([sys.executable, "-c", ENTRY, script("")])
    assert job.process.stdout.readline() == "\n"
    time.sleep(delay)
    job.process.send_signal(signal.SIGINT)
    done = job.wait(15)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.mpi
def test_ctrl_c_while_a_rank_waits_for_its_threads_prints_no_traceback(ddp_launch: Any) -> None:
    body = """
    import threading
    wait = threading.Event().wait
    threading.Thread(target=lambda: (wait(0.3), os.kill(os.getpid(), signal.SIGINT), wait(0.3))).start()
    """
    done = ddp_launch(body, n=1)
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
