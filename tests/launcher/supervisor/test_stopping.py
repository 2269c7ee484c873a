"""Ranks that stop as they were asked to and leave with 75: one line, no failure, no restart, time for the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from collectives.world import STOPPED
from launcher.linux import stat_of
from tests.conftest import ROOT, executable
from tests.launcher.conftest import read_events, wait_for
from tests.launcher.supervisor.test_stop import agents

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

# A loop that stops together: who was asked says so in the step's collective, and all save and leave after it.
LOOP = """
import numpy as np, collectives
from collectives.world import report
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))
comm = collectives.init(timeout=20)
for step in range(10_000):
    if comm.all_reduce(np.array([len(asked)]), "max")[0]:
        break
    if step == 5:
        print("ready", os.getpid(), flush=True)
    time.sleep(0.005)
time.sleep(0.2 * comm.rank)  # one saves longer than the other
report(stopped=7)
print("saved", flush=True)
sys.exit(75)
"""
TERM = "ddp-launch: SIGTERM (signal 15): ending the job (once more kills it at once)\n"
AS_ASKED = "ddp-launch: stopped as asked at step 7, state saved: start the same command to go on\n"


def rank_pids(job: Any) -> list[int]:
    """The ranks: children of agents."""
    above = set(agents(job))
    return sorted(pid for pid in job.pids() if stat_of(pid).parent in above)


def test_a_rank_that_was_asked_stops_all(start_launch: Any, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    job = start_launch(LOOP, options=("--max-restarts", "3", "--events", str(path)))
    os.kill(rank_pids(job)[1], signal.SIGTERM)
    assert job.wait(15, code=STOPPED, err=AS_ASKED).stdout.count("saved") == 2
    *others, stopped, ended = read_events(path)
    assert not {"failure", "restart"} & {event["event"] for event in others}
    assert (stopped["event"], stopped["step"], stopped["late"]) == ("stopped", 7, [])
    assert (ended["code"], f"ddp-launch: {ended['message']}\n") == (STOPPED, AS_ASKED)


CTRL_C = "ddp-launch: Ctrl-C: ending the job (once more kills it at once)\n"


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [pytest.param(signal.SIGINT, 130, CTRL_C, marks=pytest.mark.long), (signal.SIGTERM, STOPPED, TERM)],
)
def test_the_launcher_is_asked(start_launch: Any, number: int, code: int, line: str) -> None:
    job = start_launch(LOOP)
    job.process.send_signal(number)
    job.wait(15, code=code, err=line + AS_ASKED)


def test_a_crash_among_those_that_stop_is_a_failure(start_launch: Any) -> None:
    job = start_launch(LOOP.replace("report(stopped=7)", "if comm.rank == 1: raise ValueError('disk')\n"))
    os.kill(rank_pids(job)[0], signal.SIGTERM)
    done = job.wait(15, code=1)
    assert done.last.endswith("raised ValueError: disk")
    assert "exit" not in done.stderr.replace("sys.exit", "")  # who had stopped is not among the failures


@pytest.mark.parametrize(
    ("other", "code", "says"),
    [
        # It is asked in turn after --grace, and stops then.
        ("signal.signal(15, lambda *a: sys.exit(75))", STOPPED, "stopped as asked, state saved"),
        ("signal.signal(15, signal.SIG_IGN)", 1, "rank 1 went on for 1.0 s after the others had stopped as asked"),
    ],
)
def test_who_has_not_agreed_has_a_limit(ddp_launch: Any, tmp_path: Path, other: str, code: int, says: str) -> None:
    start = time.monotonic()
    there = str(tmp_path / "there")
    agrees = f"if rank == 0:\n    while not os.path.exists({there!r}): time.sleep(0.01)\n    sys.exit(75)\n"
    body = f"{agrees}{other}\nopen({there!r}, 'w')\ntime.sleep(60)"
    done = ddp_launch(body, options=("--grace", "0.5"), code=code)
    assert done.stderr.startswith(f"ddp-launch: {says}")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - start < 8


ASKED = """
from collectives.time_limit import peer_failed
signal.signal(signal.SIGTERM, lambda *_: print("peer failed" if peer_failed() else "asked", flush=True) or os._exit(0))
print("ready", flush=True)
for path in sys.argv[1:]:  # rank 1 fails once rank 0 has its handler
    if rank == 0:
        open(path, "w")
    else:
        while not os.path.exists(path): time.sleep(0.01)
        sys.exit(3)
time.sleep(60)
"""


def test_ranks_know_why_they_are_asked(ddp_launch: Any, start_launch: Any, tmp_path: Path) -> None:
    done = ddp_launch(ASKED, str(tmp_path / "there"), code=3)
    assert done.lines == ["0: peer failed", "0: ready", "1: ready"]
    job = start_launch(ASKED, 1)
    job.process.send_signal(signal.SIGTERM)
    job.wait(15, out="asked\n")


def test_a_step_that_takes_longer_than_the_grace_is_lost_and_said_to_be(start_launch: Any) -> None:
    long_step = "signal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"
    job = start_launch(long_step, 1, ("--grace", "0.5"))
    job.process.send_signal(signal.SIGTERM)
    lost = "did not end within 0.5 s: killed, and what was not saved is lost (more time: --grace)"
    job.wait(15, code=143, err=f"{TERM}ddp-launch: rank 0 {lost}\n")


def test_the_ranks_that_a_time_limit_kills_are_named_though_others_have_saved(ddp_launch: Any) -> None:
    body = "signal.signal(15, lambda *_: os._exit(75) if rank == 0 else None)\ntime.sleep(60)"
    done = ddp_launch(body, options=("--timeout", "4", "--grace", "0.5"), code=124)
    assert "ddp-launch: rank 1 did not end within 0.5 s: killed" in done.stderr


def test_an_exception_on_the_way_to_a_stop_is_shown(start_launch: Any) -> None:
    fails = "def save(*a):\n    raise OSError('no room')\nsignal.signal(15, save)\nprint('ready', flush=True)"
    job = start_launch(fails + "\ntime.sleep(60)", 1)
    job.process.send_signal(signal.SIGTERM)
    done = job.wait(15, code=143)
    assert done.stderr.startswith(TERM + "Traceback")
    assert done.last.endswith("raised OSError: no room")


def test_the_recipe_of_the_docs_requeues(start_job: Any, script: Any, tmp_path: Path) -> None:
    docs = (ROOT / "docs/launcher.md").read_text()
    recipe = next(block for block in docs.split("```")[1::2] if "launcher=$!" in block)
    line = "ddp-launch train.py --checkpoint runs/digits"
    assert line in recipe
    batch = recipe.replace(line, f"{sys.executable} -m launcher -n 1 {script(LOOP)}")
    executable(tmp_path / "scontrol", '#!/bin/sh\necho "$@"\n')
    environ = {"SLURM_JOB_ID": "4711", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = start_job(["sh", "-c", batch], env=environ)
    wait_for(job.process.stdout, "ready", 1)
    # Means nothing to the launcher, which passes it on.
    job.process.send_signal(signal.SIGUSR1)
    job.wait(15, code=0, out="saved\nrequeue 4711\n", err=AS_ASKED)
