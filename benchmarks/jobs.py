"""Jobs that a benchmark starts in processes of their own, strikes from outside, and follows to their end.

All processes of a job are found by a mark in their environment: what is left when it has ended is a failure, and is
killed. Ranks leave notes in the job's folder: `rank-R.jsonl` has a line a step, `pid-R` says who that rank is, and
`result-R.json` how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import harness

GONE = 5.0  # s until nothing is left of a job that has ended
POLL = 0.001  # s
MARK = "DDP_BENCHMARK_JOB"
# An installed package has its bytecode; a checkout has it from its second start on, unless Python may not write it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Note = dict[str, Any]


@contextlib.contextmanager
def marked_job(
    command: Sequence[str], output: IO[str], **environ: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job and the mark of all its processes, which end with the context at the latest."""
    mark = uuid.uuid4().hex
    environ = {**ENVIRONMENT, **environ, MARK: mark}
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=harness.ROOT
    )
    try:
        yield job, mark
    finally:
        kill(mark)
        job.wait()


def processes(mark: str) -> list[int]:
    """The living processes of one job."""
    needle = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if needle in (entry / "environ").read_bytes():  # a zombie has none
                    pids.append(int(entry.name))
    return pids


def kill(mark: str) -> None:
    """Ends whatever is left of a job that failed."""
    for _ in range(50):
        left = processes(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(0.01)


def left(mark: str, limit: float = GONE) -> int:
    """How many processes of a job that has ended are left after so many seconds."""
    deadline = time.monotonic() + limit
    while (pids := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(pids)


def wait_until(
    ready: Callable[[], bool], limit: float, job: subprocess.Popen[bytes] | None = None, poll: float = POLL
) -> None:
    """Waits, polling. Raises: subprocess.TimeoutExpired if it takes too long, or the job ends before."""
    deadline = time.monotonic() + limit
    while not ready():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            raise subprocess.TimeoutExpired("waiting", limit)
        time.sleep(poll)


@contextlib.contextmanager
def job_of(
    work: Path, command: Sequence[str], limit: float, gone: float = GONE, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A running job with a folder of its own, which must end well, and leave nothing.

    limit: s that it may take from the end of the context's block on

    Raises: SystemExit with its output otherwise
    """
    work.mkdir()
    # Idle BLAS threads would spin on the cores that other ranks need.
    environ = {"OMP_NUM_THREADS": "1", **environ}
    with (work / "output").open("w+") as output, marked_job(command, output, **environ) as (job, mark):
        problem = ""
        try:
            yield job
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            problem = "what was waited for did not come, "
            code = job.poll()  # None: it still runs
        survivors = left(mark, gone)
        if problem or code or survivors:
            output.seek(0)
            raise SystemExit(f"{problem}exit code {code}, {survivors} processes are left\n{output.read()}")


class Notes:
    """What ranks note in a job's folder, read on from where it was read to: a busy machine has better things to do."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._read: dict[Path, int] = {}
        self._all: list[Note] = []

    def all(self) -> list[Note]:
        """Those in whole lines, of each rank in order."""
        for path in sorted(self._work.glob("rank-*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0] + b"\n"
            if len(whole) > 1:
                self._read[path] = self._read.get(path, 0) + len(whole)
                self._all += map(json.loads, whole.splitlines())
        return self._all


def starts_of(notes: Sequence[Note]) -> dict[int, dict[int, float]]:
    """By start of the job, when each step of it had ended on all ranks."""
    times_by_start: dict[int, dict[int, list[float]]] = {}
    sizes = {note["start"]: note["size"] for note in notes}
    for note in notes:
        if "step" in note:
            times_by_start.setdefault(note["start"], {}).setdefault(note["step"], []).append(note["time"])
    return {
        start: {step: max(times) for step, times in steps.items() if len(times) == sizes[start]}
        for start, steps in sorted(times_by_start.items())
    }


def that_count(notes: Iterable[Note]) -> dict[int, list[Note]]:
    """By step, what all ranks noted in the last start that made it: later starts went on from before that step."""
    notes_by_step: dict[int, list[Note]] = {}
    for note in notes:
        if "step" in note:
            step = notes_by_step.setdefault(note["step"], [])
            if step and step[0]["start"] < note["start"]:
                step.clear()
            if not step or step[0]["start"] == note["start"]:
                step.append(note)
    return notes_by_step


def repeated(notes: Iterable[Note]) -> int:
    """How many steps were made that do not count."""
    steps = {(note["start"], note["step"]) for note in notes if "step" in note}
    return len(steps) - len({step for _, step in steps})


def results_of(work: Path) -> list[dict[str, Any]]:
    """How each rank of the last start ended, by rank."""
    return [json.loads(path.read_text()) for path in sorted(work.glob("result-*"))]
