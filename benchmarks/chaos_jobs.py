"""The jobs of the drill: started, struck from outside, started again, and followed to their end.

Everything that a job consists of is found again by a mark in its environment: what is left when it has ended is a
failure, and is killed.
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
from types import TracebackType
from typing import IO, Any, NamedTuple

from benchmarks.chaos_worker import Strike
from benchmarks.startup import MARK, kill, processes
from collectives.world import STOPPED

WORKER = Path(__file__).resolve().parent / "chaos_worker.py"
ROOT = WORKER.parent.parent
LIMIT = 60.0  # s a start
GONE = 5.0  # s until nothing is left of a job that has ended
PAUSE = 0.02  # s a step, so that there is time to be struck in
STILL = 0.3  # s for which a rank is stopped
ROOM = 2 << 20  # bytes of the disk that becomes full: a few checkpoints
_ALONE = "DDP_DRILL_ALONE"


class Ended(NamedTuple):
    """A job that has come to its end, or failed to.

    wrong: what should not be, "" if nothing; said: by all of its starts
    struck: what was to befall it has
    starting: seconds from the shell to the first step of the first start
    restarts: by the launcher; starts: by the drill, the first included
    notes: of all ranks, by rank and in order; results: of each rank of the last start
    """

    wrong: str
    said: str
    struck: bool
    starting: float
    restarts: int
    starts: int
    notes: list[dict[str, Any]]
    results: list[dict[str, Any]]


class Victim(NamedTuple):
    """What the drill strikes in the first start of a job.

    kind: how, and whom; rank: which, if it is one
    moment: in steps, so many of which are made; below 0: in seconds, before the first step is expected
    starting: seconds from the shell to the first step
    """

    kind: str
    rank: int
    moment: float
    starting: float


def alone() -> None:
    """Goes on in a mount namespace of its own, where that may be had: what is mounted there ends with it."""
    there = ["unshare", "--mount"]
    if _ALONE in os.environ or shutil.which(there[0]) is None:
        return
    if subprocess.run([*there, "true"], capture_output=True).returncode == 0:
        os.environ[_ALONE] = "1"
        os.execvp(there[0], [*there, sys.executable, *sys.argv])


class Disk:
    """A small disk of its own, if one may be mounted: `real` says so. A context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.real = False

    def __enter__(self) -> Disk:
        self.folder.mkdir()
        if _ALONE in os.environ:  # else it might stay
            mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(self.folder)]
            self.real = subprocess.run(mount, capture_output=True).returncode == 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.real:
            subprocess.run(["umount", str(self.folder)], check=True)

    def fill(self) -> None:
        """Not a byte is left."""
        with contextlib.suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """There is room again."""
        (self.folder / "ballast").unlink(missing_ok=True)


def write_digits(path: Path, samples: int) -> None:
    """So many of scikit-learn's digits, once: importing that takes longer than the training."""
    import numpy as np
    from sklearn import datasets

    digits = datasets.load_digits()
    some = np.random.default_rng(0).permutation(len(digits.target))[:samples]
    np.savez(path, images=(digits.images / 16.0)[some][:, None], labels=digits.target[some])


class Plan(NamedTuple):
    """What a job is, and what befalls it.

    sizes: ranks of its first start, its second, and so on: as many starts as it may have
    restarts: that the launcher may make in each; strikes: what ranks do to themselves
    victim: what the drill strikes in the first start; beside: saves go on in the background
    """

    sizes: Sequence[int]
    restarts: int
    strikes: Sequence[Strike] = ()
    victim: Victim | None = None
    beside: bool = False


def run(folder: Path, plan: Plan, disk: Disk | None = None) -> Ended:
    """One job from nothing to its end. folder: with the digits; disk: for the checkpoints, if it is a real one"""
    real = disk is not None and disk.real
    if plan.victim is not None and plan.victim.kind == "full" and not real:
        at = Strike(0, plan.victim.rank, "full", max(0, int(plan.victim.moment)))
        plan = plan._replace(strikes=[at], victim=None)
    work = folder / "job"
    work.mkdir()
    try:
        checkpoints = disk.folder / "checkpoints" if disk is not None and disk.real else work / "checkpoints"
        with (work / "said").open("w+") as said:
            return _Job(plan, work, [folder / "digits.npz", checkpoints], said, disk).run()
    finally:
        shutil.rmtree(work)
        if disk is not None:
            disk.empty()
            shutil.rmtree(disk.folder / "checkpoints", ignore_errors=True)


class _Job:
    """A job on its way. paths: what the worker is told, after `work`"""

    def __init__(self, plan: Plan, work: Path, paths: Sequence[Path], said: IO[str], disk: Disk | None) -> None:
        self.plan, self.work, self.paths, self.said, self.disk = plan, work, paths, said, disk
        self.events = work / "events.jsonl"
        self.struck = False
        self.stepped_at: float | None = None  # first

    def run(self) -> Ended:
        """Starts it as often as it takes, and may be."""
        # After these the same command goes on: stopped as asked; killed, and ddp-launch too, or nobody was to restart.
        going_on = {STOPPED, -signal.SIGKILL if self.plan.restarts else 128 + signal.SIGKILL}
        began, number, wrong = time.monotonic(), 0, ""
        for number, ranks in enumerate(self.plan.sizes):
            code, wrong = self._start(number, ranks)
            if wrong or code == 0:
                break
            wrong = "" if code in going_on else f"start {number} ended with code {code}"
            if wrong:
                break
        else:
            wrong = f"{number + 1} starts were not enough"
        starting = 0.0 if self.stepped_at is None else self.stepped_at - began
        again, starts = self._happened().count("restart"), number + 1
        notes, results = ([], []) if wrong else _read(self.work, self.plan.sizes[number])
        self.said.seek(0)
        struck = self.struck or again > 0 or starts > 1
        return Ended(wrong, self.said.read(), struck, starting, again, starts, notes, results)

    def _start(self, number: int, ranks: int) -> tuple[int | None, str]:
        """One start, to its end: the launcher's exit code, and what is wrong with that, "" if nothing."""
        launch = [sys.executable, "-m", "launcher", "-n", str(ranks), f"--max-restarts={self.plan.restarts}"]
        told = [f"--run={number}", f"--pause={PAUSE}", f"--strikes={json.dumps(self.plan.strikes)}"]
        told += ["--async-save"] if self.plan.beside else []
        script = [str(WORKER), str(self.work), *map(str, self.paths), *told]
        self.said.write(f"--- start {number}, on {ranks} ranks\n")
        self.said.flush()
        mark = uuid.uuid4().hex
        job = subprocess.Popen(
            [*launch, "--events", str(self.events), *script],
            stdin=subprocess.DEVNULL,
            stdout=self.said,
            stderr=self.said,
            # Idle BLAS threads would spin on the cores that other ranks need.
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        try:
            if number == 0:
                self._meanwhile(job, mark)
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

    def _meanwhile(self, job: subprocess.Popen[Any], mark: str) -> None:
        """Notes when the first step is made, and strikes the victim at its moment."""
        victim = self.plan.victim
        if victim is None:
            _wait(job, lambda: self._steps() > 0)
            self.stepped_at = time.monotonic()
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
        elif victim.kind == "full":
            self._fill_the_disk(job)
            return  # a restart tells whether that was in time
        elif not self._strike_rank(job, mark, victim):
            return
        self.struck = True

    def _fill_the_disk(self, job: subprocess.Popen[Any]) -> None:
        """Until the job has failed by it."""
        assert self.disk is not None
        self.disk.fill()
        try:
            _wait(job, lambda: "restart" in self._happened())
        finally:
            self.disk.empty()

    def _strike_rank(self, job: subprocess.Popen[Any], mark: str, victim: Victim) -> bool:
        """False if it was not there any more."""
        path = self.work / f"pid-{victim.rank}"
        _wait(job, lambda: _pid(path, mark) is not None)
        pid = _pid(path, mark)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if victim.kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STILL)
            os.kill(pid, signal.SIGTERM if victim.kind == "asked" else signal.SIGKILL)
        return True

    def _steps(self) -> int:
        """How many rank 0 has made."""
        path = self.work / "rank-0.jsonl"
        return path.read_text().count('"step"') if path.exists() else 0

    def _happened(self) -> list[str]:
        """The launcher's events so far."""
        if not self.events.exists():
            return []
        return [json.loads(line)["event"] for line in self.events.read_text().splitlines()]


def _read(work: Path, ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    notes = [json.loads(line) for path in sorted(work.glob("rank-*.jsonl")) for line in path.read_text().splitlines()]
    return notes, [json.loads((work / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def _wait(job: subprocess.Popen[Any], ready: Callable[[], bool]) -> None:
    """Until it is so, or the job has ended. Raises: TimeoutExpired."""
    deadline = time.monotonic() + LIMIT
    while job.poll() is None and not ready():
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("waiting", LIMIT)
        time.sleep(0.005)


def _pid(path: Path, mark: str) -> int | None:
    """The rank that has left its pid there, if it runs."""
    try:
        pid = int(path.read_text())
    except (FileNotFoundError, ValueError):  # not there yet
        return None
    return pid if pid in processes(mark) else None
