"""`python -m benchmarks.chaos_train --elastic`: jobs that lose ranks, agents and hosts, and become more and fewer.

The CNN of the chaos test learns with four micro-batches a step. One rank does it undisturbed. Then jobs with
`--max-restarts` do, and at random steps something happens to them. Each step must have had the same samples, and the
final weights must be those of the undisturbed rank, bit by bit.

kill      a rank is killed
agent     the agent of a rank is killed
resize    the job goes on with another number of ranks from 1 to 4
host      the cable of one of two hosts of one rank each is pulled (`tests/cluster/hosts.sh`), and the job goes on with
          the other. Ranks share the optimizer's state (ZeroOptimizer), of which the lost rank's part is held there, too
return    the cable is put back, and the job takes the host again. One in twenty events is the loss of a host, in a job
          of its own, and one its return, where this machine can have such hosts
torchrun  a rank of PyTorch's job is killed: the same model and step, state by torch.save after each step, restarted by
          torchrun. In a job of its own, too, with a new store for each start: by default the ranks of a restart may
          find in the store where a killed rank listened, and fail (github.com/pytorch/pytorch/issues/135712). If a job
          does not come back, another one is struck

A recovery's time is from the event to the end of the next step on all ranks, and for a resize or return from the end of
the last step before to the end of the first after it. After failures in a row ddp-launch makes a pause before it starts
ranks again (1, 2, 4, ... s), and a host counts as lost after some seconds without a heartbeat: this is part of the
time, and is shown beside it. Nothing is saved on disk before a job's end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness, two_hosts
from benchmarks.chaos_jobs import PAUSE
from benchmarks.chaos_worker import BATCH
from benchmarks.jobs import Note, Notes, job_of, repeated, results_of, starts_of, that_count, wait_until
from launcher.linux import stat_of
from launcher.resize import resize
from launcher.supervisor.supervisor import restart_delay

SAMPLES = 144  # whole steps alone: nine an epoch
MOST = 4  # ranks, and micro-batches
BETWEEN = 15  # steps from one event to the next, and up to as many more
POLL = 0.02  # s
PATIENCE = 300.0  # s; on a machine that is busy with other things a step may take long
NEVER = 1 << 30  # steps, from one save to the next
STEP = 0.5  # s that a step of an undisturbed rank may take
HOSTS_EVERY = 20  # events, one of which is the loss of a host
SLOW = 0.25  # s that each step takes longer in a job on two hosts
RETURNING = 100  # steps that such a job has for the return of a host
HEARTBEAT = 5.0  # s without one, after which a host is lost
CUT_OFF = 60.0  # s until processes on a host that was lost have ended
TRIES = 4  # of torchrun
KINDS = ("kill", "agent", "resize", "host", "return", "torchrun")


class Event(NamedTuple):
    """What happens once a step has ended. ranks: that the job has then; rank: who is struck, None: it is resized"""

    kind: str
    step: int
    ranks: int
    rank: int | None = None

    def __str__(self) -> str:
        what = f"to {self.ranks} ranks" if self.rank is None else f"of rank {self.rank} of {self.ranks}"
        return f"after step {self.step}: {self.kind} {what}"


class Recovery(NamedTuple):
    """What came of an event. seconds: to the end of the next step; pause: of ddp-launch's, in it"""

    event: Event
    seconds: float
    pause: float = 0.0


def plan(count: int, chance: random.Random) -> list[Event]:
    """So many events, for a job that starts with two ranks.

    >>> plan(2, random.Random(1))
    [Event(kind='resize', step=17, ranks=1, rank=None), Event(kind='agent', step=36, ranks=1, rank=0)]
    """
    step = 0
    ranks = 2
    events = []
    for _ in range(count):
        step += BETWEEN + chance.randrange(BETWEEN)
        number = chance.random()
        if number < 0.5:
            rank = chance.randrange(ranks)
            events.append(Event("agent" if number < 0.2 else "kill", step, ranks, rank))
        else:
            ranks = chance.choice([n for n in range(1, MOST + 1) if n != ranks])
            events.append(Event("resize", step, ranks))
    return events


def pauses(events: Sequence[Event]) -> list[float]:
    """The pause that ddp-launch makes at each event: a resize ends a row of failures."""
    seconds = []
    in_a_row = 0
    for event in events:
        in_a_row = 0 if event.rank is None else in_a_row + 1
        seconds.append(restart_delay(in_a_row) if in_a_row else 0.0)
    return seconds


def host_events(chance: random.Random) -> list[Event]:
    """The loss of a host, and its return."""
    loss = BETWEEN + chance.randrange(BETWEEN)
    return [Event("host", loss, 2, 1), Event("return", loss + BETWEEN + chance.randrange(BETWEEN), 2)]


def epochs_for(events: Sequence[Event]) -> int:
    """Passes over the digits that last some steps longer than these events."""
    more = RETURNING if events[-1].kind == "return" else BETWEEN
    return -(-(events[-1].step + more) * BATCH // SAMPLES)


def command(
    work: Path, digits: Path, launch: Sequence[str], epochs: int, pause: float = PAUSE, *more: str
) -> list[str]:
    """ddp-launch and its script. pause: s that each step takes longer; more: options of the script"""
    script = ["-m", "benchmarks.chaos_worker", str(work), str(digits), str(work / "checkpoints"), f"--pause={pause}"]
    options = [f"--micro-batches={MOST}", f"--epochs={epochs}", f"--every={NEVER}", "--memory-every=1", *more]
    return [sys.executable, "-m", "launcher", *launch, *script, *options]


def strike(event: Event, job: subprocess.Popen[bytes], work: Path) -> None:
    """Causes an event on this machine. Raises: SystemExit if the job cannot be resized"""
    if event.rank is None:
        done, text = resize(job.pid, event.ranks)
        if not done:
            raise SystemExit(f"{event}: {text}")
    else:
        rank = int((work / f"pid-{event.rank}").read_text())
        os.kill(stat_of(rank).parent if event.kind == "agent" else rank, signal.SIGKILL)


def follow(event: Event, job: subprocess.Popen[bytes], notes: Notes, cause: Callable[[], None]) -> float:
    """Waits for the event's step, causes the event, and waits for the next step. Returns: the recovery's seconds

    Raises: subprocess.TimeoutExpired if a step takes too long, or the job ends before.
    """

    def reached() -> bool:
        done = (note for note in notes.all() if note.get("step") == event.step)
        return any(starts_of(list(done)).values())

    wait_until(reached, PATIENCE, job, POLL)
    before = max(note["start"] for note in notes.all())
    began = time.time()
    cause()

    def later() -> list[float]:
        starts = starts_of([note for note in notes.all() if note["start"] > before])
        return [ended for steps in starts.values() for ended in steps.values()]

    wait_until(lambda: bool(later()), PATIENCE, job, POLL)
    if event.rank is None:
        began = max(starts_of(notes.all())[before].values())
    return min(later()) - began


def undisturbed(folder: Path, digits: Path, epochs: int) -> tuple[dict[int, list[int]], str]:
    """The samples of each step, and the digest of the weights, of one rank that is left alone.

    Raises: SystemExit if even that goes wrong
    """
    work = folder / "alone"
    steps = epochs * SAMPLES // BATCH
    with job_of(work, command(work, digits, ["-n", "1"], epochs, pause=0.0), PATIENCE + STEP * steps):
        pass
    return evaluate(work)


def evaluate(work: Path) -> tuple[dict[int, list[int]], str]:
    """The same of a job that has ended. Raises: SystemExit if its ranks have different weights"""
    digests = {result["sha256"] for result in results_of(work)}
    if len(digests) != 1:
        raise SystemExit(f"the ranks' weights differ: {sorted(digests)}")
    return samples_of(Notes(work).all()), digests.pop()


def samples_of(notes: Sequence[Note]) -> dict[int, list[int]]:
    """By step, the samples that its last start had."""
    return {step: sorted(sample for note in own for sample in note["ids"]) for step, own in that_count(notes).items()}


def on_this_machine(work: Path, digits: Path, events: Sequence[Event], said: Callable[[Recovery], None]) -> None:
    """One job in which all events happen. said: is given what came of each

    Raises: SystemExit if it does not come to its end
    """
    failures = sum(event.rank is not None for event in events)
    launch = ["-n", "2", f"--max-restarts={failures}"]
    with job_of(work, command(work, digits, launch, epochs_for(events)), PATIENCE) as job:
        notes = Notes(work)
        for event, pause in zip(events, pauses(events), strict=True):
            said(Recovery(event, follow(event, job, notes, lambda event=event: strike(event, job, work)), pause))


def on_two_hosts(
    work: Path, digits: Path, events: Sequence[Event], names: Sequence[str], ssh: str, said: Callable[[Recovery], None]
) -> None:
    """A job on two hosts, one of which is lost and comes back. ssh: the command between them; said: as above

    Raises: SystemExit if it does not come to its end
    """
    launch = ["--hosts=10.0.0.1:1,10.0.0.2:1", "--max-restarts=1", "--min-ranks=1", f"--heartbeat-timeout={HEARTBEAT}"]
    line = [str(two_hosts.SCRIPT), names[0], *command(work, digits, launch, epochs_for(events), SLOW, "--zero")]
    # The hosts share one kernel, and UCX must not find its ways from process to process.
    environ = {"HYDRA_LAUNCHER_EXEC": ssh, "PRTE_MCA_plm_ssh_agent": ssh, "UCX_TLS": "tcp,self"}
    with job_of(work, line, PATIENCE, CUT_OFF, **environ) as job:
        notes = Notes(work)
        try:
            for event, state, pause in zip(events, ("down", "up"), (HEARTBEAT, 0.0), strict=True):
                seconds = follow(event, job, notes, lambda state=state: two_hosts.set_cable(names[1], state))
                said(Recovery(event, seconds, pause))
        finally:
            two_hosts.set_cable(names[1], "up")


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[list[str]]:
    """The names of two hosts that reach each other by `folder`/ssh; none, and says why, where this is not possible."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        names: list[str] = []
        try:
            if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
                raise SystemExit("there is no sshd")
            names = stack.enter_context(two_hosts.hosts("", str(folder)))
        except SystemExit as lacking:
            print(f"no host is lost on this machine: {lacking}", flush=True)
        yield names


def by_torchrun(work: Path, digits: Path, event: Event) -> Recovery:
    """PyTorch's job, one of whose ranks is killed. Raises: SystemExit if it does not come to its end"""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    script = ["-m", "benchmarks.chaos_torch", str(work), str(digits), f"--pause={PAUSE}"]
    line = [torchrun, "--standalone", f"--nproc-per-node={event.ranks}", "--max-restarts=1", *script]
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with job_of(work, [*line, f"--steps={event.step + BETWEEN}"], PATIENCE, **environ) as job:
        return Recovery(event, follow(event, job, Notes(work), lambda: strike(event, job, work)))


def run(folder: Path, digits: Path, count: int, chance: random.Random) -> tuple[list[Recovery], str, dict[str, int]]:
    """What came of `count` events, what is wrong, "" if nothing, and how many steps each kind of job made again.

    Raises: SystemExit if a job does not come to its end.
    """
    recoveries: list[Recovery] = []

    def said(recovery: Recovery) -> None:
        recoveries.append(recovery)
        print(
            f"{len(recoveries)} {recovery.event}: {recovery.seconds:.2f} s, {recovery.pause:g} of them pause",
            flush=True,
        )

    wrong = ""
    again = {"one machine": 0, "two hosts": 0}
    of_hosts = [host_events(chance) for _ in range(count // HOSTS_EVERY)]
    with hosts(folder / "hosts") as names:
        of_hosts = of_hosts if names else []
        jobs = [("one machine", plan(count - 2 * len(of_hosts), chance)), *(("two hosts", own) for own in of_hosts)]
        for number, (place, events) in enumerate(jobs):
            part = folder / f"job-{number}"
            part.mkdir()
            expected = undisturbed(part, digits, epochs_for(events))
            work = part / "elastic"
            if place == "one machine":
                on_this_machine(work, digits, events, said)
            else:
                on_two_hosts(work, digits, events, names, str(folder / "hosts" / "ssh"), said)
            samples, digest = evaluate(work)
            if samples != expected[0]:
                wrong = f"{place}: steps had other samples"
            elif digest != expected[1]:
                wrong = f"{place}: other weights: {digest}, expected {expected[1]}"
            again[place] += repeated(Notes(work).all())
    return recoveries, wrong, again


def torchruns(folder: Path, digits: Path, count: int, chance: random.Random) -> tuple[list[Recovery], int]:
    """What came of so many kills of PyTorch's ranks, and how many jobs did not come back; of none without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return [], 0
    recoveries: list[Recovery] = []
    failed = 0
    for number in range(TRIES * count):
        event = Event("torchrun", BETWEEN + number, 2, chance.randrange(2))
        try:
            recoveries.append(by_torchrun(folder / f"torchrun-{number}", digits, event))
        except SystemExit as failure:
            print(f"torchrun: {str(failure).splitlines()[0]}", flush=True)
            failed += 1
        if len(recoveries) == count:
            break
    return recoveries, failed


def one_of_two(recoveries: Sequence[Recovery]) -> float | None:
    """The median of the seconds after the kill of one of two ranks, without pauses; None: there was none."""
    seconds = [
        recovery.seconds - recovery.pause
        for recovery in recoveries
        if (recovery.event.kind, recovery.event.ranks) == ("kill", 2)
    ]
    return statistics.median(seconds) if seconds else None


def seconds_of(recoveries: Sequence[Recovery]) -> dict[str, list[float]]:
    """By kind, the seconds of each recovery without its pause."""
    kinds = {kind: [recovery for recovery in recoveries if recovery.event.kind == kind] for kind in KINDS}
    return {kind: [recovery.seconds - recovery.pause for recovery in own] for kind, own in kinds.items() if own}


def table(recoveries: Sequence[Recovery]) -> str:
    """A line for each kind."""
    lines = [harness.row("recovery, s", ("times", "median", "longest", "with its pause"), 12, 16)]
    for kind, seconds in seconds_of(recoveries).items():
        whole = max(recovery.seconds for recovery in recoveries if recovery.event.kind == kind)
        figures = [f"{figure:.2f}" for figure in (statistics.median(seconds), max(seconds), whole)]
        lines.append(harness.row(kind, (len(seconds), *figures), 12, 16))
    return "\n".join(lines)
