"""Anything may be killed, ended, interrupted or stopped at any moment: the job ends, says who it was, leaves nothing.

A strike is a random signal to a random process of a small job at a random moment, while ranks start, meet or compute.
What must come of it stands in `expected`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.engines.mpiexec import mpi_family
from tests.launcher.conftest import LAUNCH

SEED = 13705  # its first seven strike every kind of process, with every signal, and one of them is a hang
LAST = 1.5  # s; strikes fall between the start and this
LIMIT = 45.0  # s; from the strike to the end of the job; MPI_Finalize alone may take 30 without its engine
HANG = 3.0  # s
GONE = 5.0  # s; until nothing is left

SCRIPT = """
import sys, time
import numpy as np
import collectives
comm = collectives.init(timeout=8.0)
end = time.monotonic() + 2.5
go_on = np.ones(1)
while go_on[0]:
    comm.all_reduce(np.ones(1000))
    go_on[0] = time.monotonic() < end
    comm.broadcast(go_on, 0)
    time.sleep(0.005)
"""

VICTIMS = ("rank", "rank", "agent", "agent", "launcher", "reaper", "engine", "mpiexec", "proxy")
ENGINES = VICTIMS[-3:]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGSEGV)


ENGINE = re.compile(r"mpiexec|prterun|ddp_pmi_server")
AGENT = re.compile(r"^\S*python\S* \S*/launcher/agent/main.py ")


class Strike(NamedTuple):
    """victim: which process; number: the signal; moment: s after the start; n: ranks; rank: whose agent, or who"""

    victim: str
    number: signal.Signals
    moment: float
    n: int
    rank: int


def strikes(count: int, seed: int = SEED) -> list[Strike]:
    """The same ones every time."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        n = chance.choice((2, 3))
        found.append(
            Strike(chance.choice(VICTIMS), chance.choice(SIGNALS), chance.uniform(0, LAST), n, chance.randrange(n))
        )
    return found


class Found(NamedTuple):
    """A process of the job under test."""

    pid: int
    parent: int
    name: str
    command: str
    environ: bytes


def look(pids: list[int]) -> dict[int, Found]:
    """What the processes of a job are."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            entry = Path(f"/proc/{pid}")
            head, _, rest = (entry / "stat").read_text().rpartition(")")
            name, parent = head.partition("(")[2], int(rest.split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[pid] = Found(pid, parent, name, command, (entry / "environ").read_bytes())
    return found


def find(strike: Strike, launcher: int, found: dict[int, Found]) -> int | None:
    """The pid of the victim; None if it is not there (yet)."""

    def is_agent(pid: int) -> bool:
        return pid in found and AGENT.search(found[pid].command) is not None

    if strike.victim == "launcher":
        return launcher
    if launcher not in found or "-m launcher" not in found[launcher].command.partition("mount")[0]:
        return None  # it is not yet what it will be
    reaper = next((one.pid for one in found.values() if one.parent == launcher), None)
    if strike.victim == "reaper" or reaper is None:
        return reaper
    # Until it has become the engine, it is a fork of the reaper.
    engine = next((one.pid for one in found.values() if one.parent == reaper and ENGINE.search(one.name)), None)
    if strike.victim in ("engine", "mpiexec"):
        return engine
    if strike.victim == "proxy":
        proxy = next((one.pid for one in found.values() if "hydra_pmi_proxy" in one.command.split(" ")[0]), None)
        return proxy or (engine if engine and "prterun" in found[engine].name else None)  # which has none
    number = re.compile(rb"(^|\0)(PMI_RANK|OMPI_COMM_WORLD_RANK)=%d(\0|$)" % strike.rank)
    agent = next(
        (
            one.pid
            for one in found.values()
            if is_agent(one.pid) and not is_agent(one.parent) and number.search(one.environ)
        ),
        None,
    )
    if strike.victim == "agent" or agent is None:
        return agent
    return next((one.pid for one in found.values() if one.parent == agent), None)


class Result(NamedTuple):
    """code: exit code of the launcher; out, err: what it said; pid: the victim's, None if it never came"""

    code: int
    out: str
    err: str
    pid: int | None


def complaint(strike: Strike, result: Result) -> str:
    """What is wrong with how a job ended after a strike; "" if nothing is."""
    last = (result.err.strip().splitlines() or [""])[-1]
    if result.pid is None:
        return "the victim never came"
    if strike.number == signal.SIGSTOP and strike.victim not in ("rank", "agent"):
        # It goes on, or others do its work. Ranks that come together or part need the engine for that: they hang.
        needed = strike.victim in ENGINES and last.startswith("ddp-launch: ")
        return "" if result.code == 0 or needed else f"exit code {result.code}, and nobody was harmed"
    gentle = strike.number in (signal.SIGTERM, signal.SIGINT)
    if gentle and strike.victim in ENGINES:  # it passes it on to the ranks, or does not mind
        return "" if result.code == 0 or last.startswith("ddp-launch: ") else "the last line is not ours"
    if result.code == 0:
        return "exit code 0"
    if strike.victim == "launcher":
        return ""  # it may have been a Python that was not yet ours, and says what it can
    if not last.startswith("ddp-launch: "):
        return "the last line is not ours"
    if strike.victim in ("rank", "agent"):
        names = re.search(rf"\branks?( \d+,)* {strike.rank}\b", last)
        return "" if names else f"rank {strike.rank} is not named"
    names = "reaper" if strike.victim == "reaper" else "ddp_pmi_server|hydra_pmi_proxy|mpiexec|prterun"
    return "" if re.search(names, last) else f"{strike.victim} is not named"


@pytest.fixture
def strike_at(start_job: Any, mpiexec: list[str], tmp_path: Path) -> Iterator[Callable[[Strike], str]]:
    """Starts a job, strikes, waits for its end; what is wrong with that, "" if nothing."""
    shm = tempfile.mkdtemp(dir="/dev/shm")
    # Others may start and kill MPI jobs on this machine meanwhile: this one has a /dev/shm of its own.
    alone = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', shm]
    isolated = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    (tmp_path / "job.py").write_text(SCRIPT)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    options = ["--hang-timeout", str(HANG), "--start-limit", "10", "--grace", "1"]

    def run(strike: Strike) -> str:
        engine = mpi_family(mpiexec[0]) if strike.victim in ("mpiexec", "proxy") else "auto"
        command = [*LAUNCH, "-n", str(strike.n), "--engine", engine, *options, str(tmp_path / "job.py")]
        environ = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        # Into files: pipes that nobody reads could fill.
        with open(tmp_path / "out", "w+") as out, open(tmp_path / "err", "w+") as err:
            job = start_job([*alone, *command] if isolated else command, env=environ, stdout=out, stderr=err)
            pid = hit(job, strike)
            if strike == ("launcher", signal.SIGSTOP, *strike[2:]):
                time.sleep(1.0)
                os.kill(pid, signal.SIGCONT)
            try:
                code = job.process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
            time_is_up = time.monotonic() + GONE
            while (left := look(job.pids())) and time.monotonic() < time_is_up and code is not None:
                time.sleep(0.02)
            job.kill()
            job.process.wait()
            out.seek(0), err.seek(0)
            result = Result(0 if code is None else code, out.read(), err.read(), pid)
        files = sorted(path.name for path in [*(Path(shm).iterdir() if isolated else ()), *scratch.iterdir()])
        for path in [*Path(shm).iterdir(), *scratch.iterdir()]:
            subprocess.run(["rm", "-rf", path], check=True)
        if code is None:
            wrong = f"still there after {LIMIT} s"
        elif left:
            wrong = f"left {[(one.pid, one.command[-60:]) for one in left.values()]}"
        else:
            wrong = f"left {files}" if files else complaint(strike, result)
        return f"{strike}: {wrong}\n{result}\n--- err\n{result.err}" if wrong else ""

    yield run
    os.rmdir(shm)


def hit(job: Any, strike: Strike) -> int | None:
    """Waits for the moment and for the victim, and sends the signal; the victim's pid."""
    time.sleep(strike.moment)
    while job.process.poll() is None:
        victim = find(strike, job.process.pid, look(job.pids()))
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, strike.number)
                return victim
        time.sleep(0.01)
    return None


@pytest.mark.mpi
@pytest.mark.timeout(3600)
def test_whatever_is_struck_whenever(strike_at: Callable[[Strike], str], count: Callable[[int, int], int]) -> None:
    wrong = [found for strike in strikes(count(7, 200)) if (found := strike_at(strike))]
    assert not wrong, "\n\n".join(wrong)
