"""Jobs of the chaos test: started, struck from outside, started again, and followed to their end.

All processes of a job are found by a mark in their environment: what is left when it has ended is a failure, and is
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos_worker import Strike
from benchmarks.harness import ROOT
from benchmarks.startup import MARK, kill, processes
from collectives.world import STOPPED

LIMIT = 60.0  # s a start
GONE = 5.0  # s until nothing is left of a job that has ended
PAUSE = 0.02  # s a step, so that there is time to strike
STILL = 0.3  # s for which a rank is stopped


class Ended(NamedTuple):
    """A job that has ended, or failed to.

    wrong: what should not be, "" if nothing; output: of all starts; struck: the strike hit
    starting: seconds from the shell to the first step of the first start
    restarts: by the launcher; starts: by this test, the first included
    notes: of all ranks, by rank and in order; results: of each rank of the last start
    """

    wrong: str
    output: str
    struck: bool
    starting: float
    restarts: int
    starts: int
    notes: list[dict[str, Any]]
    results: list[dict[str, Any]]


class Victim(NamedTuple):
    """What is struck from outside in the first start of a job.

    kind: how, and whom; rank: which, if it is one
    moment: in steps; below 0: in seconds, before the first step is expected
    starting: seconds from the shell to the first step
    """

    kind: str
    rank: int
    moment: float
    starting: float


class Plan(NamedTuple):
    """A job and its strikes.

    sizes: ranks of its first start, its second, and so on: as many starts as it may have
    restarts: that the launcher may make in each; strikes: what ranks do to themselves
    victim: what is struck from outside in the first start; background: saves are asynchronous
    """

    sizes: Sequence[int]
    restarts: int
    strikes: Sequence[Strike] = ()
    victim: Victim | None = None
    background: bool = False


def write_digits(path: Path, samples: int) -> None:
    """So many of scikit-learn's digits, once: importing that takes longer than the training."""
    import numpy as np
    from sklearn import datasets

    digits = datasets.load_digits()
    some = np.random.default_rng(0).permutation(len(digits.target))[:samples]
    np.savez(path, images=(digits.images / 16.0)[some][:, None], labels=digits.target[some])


def run(folder: Path, plan: Plan) -> Ended:
    """Runs one job from nothing to its end. folder: with the digits"""
    work = folder / "job"
    work.mkdir()
    try:
        return _Job(plan, work, folder / "digits.npz").run()
    finally:
        shutil.rmtree(work)


class _Job:
    """A job in the folder `work`."""

    def __init__(self, plan: Plan, work: Path, digits: Path) -> None:
        self.plan, self.work = plan, work
        self.script = ["-m", "benchmarks.chaos_worker", str(work), str(digits), str(work / "checkpoints")]
        self.script += [f"--pause={PAUSE}", f"--strikes={json.dumps(plan.strikes)}"]
        self.script += ["--async-save"] if plan.background else []
        self.events, self.output = work / "events.jsonl", work / "output"
        self.struck = False
        self.first_step = 0.0

    def run(self) -> Ended:
        # After these the same command is started again: stopped on request; killed, and ddp-launch too, or without
        # restarts.
        again = {0, STOPPED, -signal.SIGKILL if self.plan.restarts else 128 + signal.SIGKILL}
        began, number, code, wrong = time.monotonic(), 0, None, ""
        for number, ranks in enumerate(self.plan.sizes):
            code, wrong = self._start(number, ranks)
            if not wrong and code not in again:
                wrong = f"start {number} ended with code {code}"
            if wrong or code == 0:
                break
        else:
            wrong = f"{number + 1} starts were not enough"
        restarts, starts = _lines(self.events).count("restart"), number + 1
        notes, results = [], []
        if not wrong:
            notes = [
                json.loads(line) for path in sorted(self.work.glob("rank-*")) for line in path.read_text().splitlines()
            ]
            paths = [self.work / f"result-{rank}.json" for rank in range(self.plan.sizes[number])]
            results = [json.loads(path.read_text()) for path in paths]
        struck = self.struck or restarts > 0 or starts > 1
        starting = max(0.0, self.first_step - began)
        return Ended(wrong, self.output.read_text(), struck, starting, restarts, starts, notes, results)

    def _start(self, number: int, ranks: int) -> tuple[int | None, str]:
        """Runs one start to its end: the launcher's exit code, and what is wrong with that, "" if nothing."""
        launch = [sys.executable, "-m", "launcher", "-n", str(ranks), f"--max-restarts={self.plan.restarts}"]
        mark = uuid.uuid4().hex
        with self.output.open("a") as output:
            print(f"--- start {number}, on {ranks} ranks", file=output, flush=True)
            job = subprocess.Popen(
                [*launch, "--events", str(self.events), *self.script, f"--run={number}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Idle BLAS threads would spin on the cores that other ranks need.
                env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
            )
        try:
            if number == 0:
                self._strike(job, mark)
            code = job.wait(LIMIT)
            ended = time.monotonic()
            while (left := processes(mark)) and time.monotonic() < ended + GONE:
                time.sleep(0.01)
            return code, f"it left {len(left)} processes" if left else ""
        except subprocess.TimeoutExpired:
            return None, f"it still ran after {LIMIT:g} s"
        finally:
            kill(mark)
            job.wait()

    def _strike(self, job: subprocess.Popen[Any], mark: str) -> None:
        """Strikes the victim at its moment. Without one, notes when the first step is made."""
        victim = self.plan.victim
        if victim is None:
            _wait(job, lambda: self._steps() > 0)
            self.first_step = time.monotonic()
            return
        wait = max(0.0, victim.starting + victim.moment)
        if victim.moment >= 0:
            _wait(job, lambda: self._steps() >= int(victim.moment))
            wait = victim.moment % 1 * PAUSE
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(wait)
            return  # it has ended before
        if victim.kind == "launcher":
            job.kill()
        elif victim.kind == "all":
            kill(mark)
        else:
            path = self.work / f"pid-{victim.rank}"
            _wait(job, lambda: _pid(path, mark) is not None)
            if (pid := _pid(path, mark)) is None:
                return
            with contextlib.suppress(ProcessLookupError):
                if victim.kind == "stop":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(STILL)
                os.kill(pid, signal.SIGTERM if victim.kind == "asked" else signal.SIGKILL)
        self.struck = True

    def _steps(self) -> int:
        """How many rank 0 has made."""
        path = self.work / "rank-0.jsonl"
        return path.read_text().count('"step"') if path.exists() else 0


def _lines(events: Path) -> list[str]:
    """The launcher's events so far."""
    return [json.loads(line)["event"] for line in events.read_text().splitlines()] if events.exists() else []


def _wait(job: subprocess.Popen[Any], ready: Callable[[], bool]) -> None:
    """Waits until it is ready, or the job has ended. Raises: TimeoutExpired."""
    deadline = time.monotonic() + LIMIT
    while job.poll() is None and not ready():
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("waiting", LIMIT)
        time.sleep(0.005)


def _pid(path: Path, mark: str) -> int | None:
    """The rank that has written its pid there, if it runs."""
    try:
        pid = int(path.read_text())
    except (FileNotFoundError, ValueError):  # not there yet
        return None
    return pid if pid in processes(mark) else None
