"""Jobs of the chaos test: started, struck from outside, started again, and followed to their end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos_worker import Strike
from benchmarks.jobs import Notes, kill, left, marked_job, results_of, wait_until
from collectives.world import STOPPED

LIMIT = 60.0  # s a start
PAUSE = 0.02  # s a step, so that there is time to strike
STILL = 0.3  # s for which a rank is stopped


class Case(NamedTuple):
    """A job, and what strikes it.

    sizes: ranks of its first start, its second, and so on: as many starts as it may have
    restarts: that the launcher may make in each; background: saves are asynchronous
    strikes: what ranks do to themselves, at exact moments
    memory: how often the state is held in memory, as `chaos_worker --memory-every` takes it
    rank, moment: who is struck from outside, and how many seconds after the first start; None: none
    """

    kind: str
    sizes: tuple[int, ...]
    restarts: int = 0
    background: bool = False
    strikes: tuple[Strike, ...] = ()
    memory: str = "auto"
    rank: int = 0
    moment: float | None = None


class Ended(NamedTuple):
    """A job that has ended, or failed to.

    wrong: what should not be, "" if nothing; output: of all starts; struck: the strike hit
    seconds: that it took; restarts: by the launcher; starts: by this test, the first included
    notes: of all ranks, by rank and in order; results: of each rank of the last start
    """

    wrong: str
    output: str
    struck: bool
    seconds: float
    restarts: int
    starts: int
    notes: list[dict[str, Any]]
    results: list[dict[str, Any]]


def write_digits(path: Path, samples: int) -> None:
    """So many of scikit-learn's digits, once: importing that takes longer than the training."""
    import numpy as np
    from sklearn import datasets

    digits = datasets.load_digits()
    some = np.random.default_rng(0).permutation(len(digits.target))[:samples]
    np.savez(path, images=(digits.images / 16.0)[some][:, None], labels=digits.target[some])


def run(folder: Path, case: Case) -> Ended:
    """Runs one job from nothing to its end. folder: with the digits"""
    work = folder / "job"
    work.mkdir()
    try:
        return _run(case, work, folder / "digits.npz")
    finally:
        shutil.rmtree(work)


def _run(case: Case, work: Path, digits: Path) -> Ended:
    # After these the same command is started again: stopped on request; killed, with ddp-launch or without restarts.
    again = {0, STOPPED, -signal.SIGKILL if case.restarts else 128 + signal.SIGKILL}
    script = ["-m", "benchmarks.chaos_worker", str(work), str(digits), str(work / "checkpoints"), f"--pause={PAUSE}"]
    script += [f"--memory-every={case.memory}", f"--strikes={json.dumps(case.strikes)}"]
    script += [*["--async-save"] * case.background]
    began = time.monotonic()
    number = 0
    struck = False
    wrong = ""
    for number, ranks in enumerate(case.sizes):
        launch = [sys.executable, "-m", "launcher", "-n", str(ranks), f"--max-restarts={case.restarts}"]
        command = [*launch, "--events", str(work / "events.jsonl"), *script, f"--run={number}"]
        code, hit, wrong = _start(command, case if number == 0 else None, work)
        struck |= hit
        if not wrong and code not in again:
            wrong = f"start {number} ended with code {code}"
        if wrong or code == 0:
            break
    else:
        wrong = f"{number + 1} starts were not enough"
    events = [json.loads(line)["event"] for line in (work / "events.jsonl").read_text().splitlines()]
    notes = Notes(work).all()
    results = results_of(work) if not wrong else []
    restarts = events.count("restart")
    starts = number + 1
    struck = struck or restarts > 0 or starts > 1
    seconds = time.monotonic() - began
    output = (work / "output").read_text()
    return Ended(wrong, output, struck, seconds, restarts, starts, notes, results[: case.sizes[number]])


def _start(command: list[str], case: Case | None, work: Path) -> tuple[int | None, bool, str]:
    """Runs one start to its end: the launcher's exit code, whether it was struck from outside, and what is wrong.

    case: what strikes this start from outside
    """
    struck = False
    # Idle BLAS threads would spin on the cores that other ranks need.
    with (work / "output").open("a") as output, marked_job(command, output, OMP_NUM_THREADS="1") as (job, mark):
        print(f"--- {' '.join(command)}", file=output, flush=True)
        try:
            if case is not None and case.moment is not None:
                struck = _strike(case, job, mark, work)
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None, struck, f"it still ran after {LIMIT:g} s"
        survivors = left(mark)
        return code, struck, f"it left {survivors} processes" if survivors else ""


def _strike(case: Case, job: subprocess.Popen[Any], mark: str, work: Path) -> bool:
    """Strikes the victim at its moment; False if the job had ended before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(case.moment)
        return False
    if case.kind == "launcher":
        job.kill()
    elif case.kind == "all":
        kill(mark)
    else:
        path = work / f"pid-{case.rank}"
        wait_until(lambda: path.exists() and path.read_text() != "", LIMIT, job)
        with contextlib.suppress(ProcessLookupError):
            pid = int(path.read_text())
            if case.kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STILL)
            os.kill(pid, signal.SIGTERM if case.kind == "asked" else signal.SIGKILL)
    return True
