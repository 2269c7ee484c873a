"""`python -m benchmarks.chaos_train --elastic`: one job whose ranks are killed, and become more and fewer.

The CNN of the chaos test learns with four micro-batches a step. One rank does it undisturbed. Then a job with
`--max-restarts` does, and at random steps a rank of it is killed, or it is resized to another number of ranks from 1 to
4. Each step must have had the same samples, and the final weights must be those of the undisturbed rank, bit by bit.

A recovery's time is, after a kill, from the kill to the end of the next step on all ranks, and after a resize from the
end of the last step before to the end of the first after it. After kills in a row ddp-launch makes a pause before it
starts ranks again (1, 2, 4, ... s), which is shown beside it, and is part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.chaos_jobs import GONE, PAUSE
from benchmarks.chaos_worker import BATCH
from benchmarks.startup import marked_job, processes
from launcher.resize import resize
from launcher.supervisor.supervisor import restart_delay

SAMPLES = 144  # whole steps alone: nine an epoch
MOST = 4  # ranks, and micro-batches
BETWEEN = 15  # steps from one event to the next, and up to as many more
POLL, PATIENCE = 0.02, 300.0  # s; on a machine that is busy with other things a step may take long
Note = dict[str, Any]


class Event(NamedTuple):
    """What happens once a step has ended. ranks: that the job has then; rank: who is killed, None: it is resized"""

    step: int
    ranks: int
    rank: int | None = None

    @property
    def kind(self) -> str:
        """Its row of the table."""
        return "resize" if self.rank is None else "kill"


def plan(count: int, chance: random.Random) -> list[Event]:
    """So many events, for a job that starts with two ranks.

    >>> plan(2, random.Random(1))
    [Event(step=17, ranks=1, rank=None), Event(step=36, ranks=1, rank=0)]
    """
    step, ranks, events = 0, 2, []
    for _ in range(count):
        step += BETWEEN + chance.randrange(BETWEEN)
        rank = None
        if chance.random() < 0.5:
            rank = chance.randrange(ranks)
        else:
            ranks = chance.choice([n for n in range(1, MOST + 1) if n != ranks])
        events.append(Event(step, ranks, rank))
    return events


def command(work: Path, digits: Path, ranks: int, restarts: int, epochs: int) -> list[str]:
    """ddp-launch and its script."""
    launch = [sys.executable, "-m", "launcher", "-n", str(ranks), f"--max-restarts={restarts}"]
    script = ["-m", "benchmarks.chaos_worker", str(work), str(digits), str(work / "checkpoints"), f"--pause={PAUSE}"]
    return [*launch, *script, f"--micro-batches={MOST}", f"--epochs={epochs}", "--every=100", "--memory-every=1"]


def notes_of(work: Path) -> list[Note]:
    """What ranks have noted in whole lines."""
    texts = [path.read_text() for path in sorted(work.glob("rank-*"))]
    return [json.loads(line) for text in texts for line in text.splitlines(True) if line.endswith("\n")]


def starts_of(notes: Sequence[Note]) -> dict[int, dict[int, float]]:
    """By start of the job, when each step of it had ended on all ranks."""
    times: dict[int, dict[int, list[float]]] = {}
    sizes = {note["start"]: note["size"] for note in notes}
    for note in notes:
        if "step" in note:
            times.setdefault(note["start"], {}).setdefault(note["step"], []).append(note["time"])
    return {
        start: {step: max(times) for step, times in steps.items() if len(times) == sizes[start]}
        for start, steps in sorted(times.items())
    }


@contextlib.contextmanager
def job_of(work: Path, line: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running job, which must end well. Raises: SystemExit with its output otherwise"""
    work.mkdir()
    with (work / "output").open("w+") as output, marked_job(line, output, OMP_NUM_THREADS="1") as (job, mark):
        try:
            yield job
            code = job.wait(PATIENCE)
        except (subprocess.TimeoutExpired, AssertionError) as error:
            output.seek(0)
            raise SystemExit(f"{error}\n{output.read()}") from None
        ended = time.monotonic()
        while (left := processes(mark)) and time.monotonic() < ended + GONE:
            time.sleep(0.01)
        if code or left:
            output.seek(0)
            raise SystemExit(f"exit code {code}, {len(left)} processes are left\n{output.read()}")


def wait_until(ready: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    """Raises: AssertionError if it takes too long, or the job ends before."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert job.poll() is None, "the job ended before it reached the step that was waited for"
        assert time.monotonic() < deadline, f"no step that was waited for within {PATIENCE:g} s"
        time.sleep(POLL)


def cause(event: Event, job: subprocess.Popen[bytes], work: Path) -> dict[str, Any]:
    """Waits for the event's step, causes it, and waits for the next step; its row of the results."""

    def reached() -> bool:
        return any(event.step in steps for steps in starts_of(notes_of(work)).values())

    wait_until(reached, job)
    before, began = max(starts_of(notes_of(work))), time.time()
    if event.rank is not None:
        os.kill(int((work / f"pid-{event.rank}").read_text()), signal.SIGKILL)
    else:
        done, text = resize(job.pid, event.ranks)
        assert done, text

    def later() -> list[float]:
        starts = starts_of(notes_of(work))
        return [ended for start, steps in starts.items() if start > before for ended in steps.values()]

    wait_until(lambda: bool(later()), job)
    if event.rank is None:
        began = max(starts_of(notes_of(work))[before].values())
    return {"kind": event.kind, **event._asdict(), "recovery": min(later()) - began}


def samples_of(notes: Sequence[Note]) -> dict[int, list[int]]:
    """By step, the samples that its last start had."""
    last = {note["step"]: note["start"] for note in sorted(notes, key=lambda note: note["start"]) if "step" in note}
    samples: dict[int, list[int]] = {}
    for note in notes:
        if "step" in note and note["start"] == last[note["step"]]:
            samples.setdefault(note["step"], []).extend(note["ids"])
    return {step: sorted(ids) for step, ids in samples.items()}


def run(folder: Path, digits: Path, events: Sequence[Event]) -> tuple[list[dict[str, Any]], str, dict[str, str]]:
    """The results of all events, what is wrong, "" if nothing, and the digests of both runs.

    Raises: SystemExit if a run does not come to its end.
    """
    steps = events[-1].step + BETWEEN if events else BETWEEN
    epochs = -(-steps * BATCH // SAMPLES)
    alone, work = folder / "alone", folder / "elastic"
    with job_of(alone, command(alone, digits, 1, 0, epochs)) as job:
        job.wait(PATIENCE)
    kills = sum(event.rank is not None for event in events)
    with job_of(work, command(work, digits, 2, kills, epochs)) as job:
        rows = [cause(event, job, work) for event in events]
    in_a_row = 0
    for row in rows:
        in_a_row = in_a_row + 1 if row["kind"] == "kill" else 0
        row["pause"] = restart_delay(in_a_row) if in_a_row else 0.0
    digests = {folder.name: json.loads((folder / "result-0.json").read_text())["sha256"] for folder in (alone, work)}
    wrong = "" if samples_of(notes_of(alone)) == samples_of(notes_of(work)) else "steps had other samples"
    return rows, wrong or ("" if len({*digests.values()}) == 1 else f"other weights: {digests}"), digests


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each event, and then one for each kind."""
    lines = [harness.row("event", ("after step", "ranks then", "recovery (s)", "pause in it"), 10, 14)]
    for row in rows:
        cells = (row["step"], row["ranks"], f"{row['recovery']:.2f}", f"{row['pause']:g}")
        lines.append(harness.row(row["kind"], cells, 10, 14))
    for kind in ("kill", "resize"):
        if seconds := [row["recovery"] - row["pause"] for row in rows if row["kind"] == kind]:
            median = f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)"
            lines.append(f"{len(seconds)} times {kind}, without pauses: {median}")
    return "\n".join(lines)
