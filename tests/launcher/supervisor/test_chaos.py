"""Anything may be killed, ended, interrupted or stopped at any moment: the job ends, says who it was, leaves nothing.

A strike is a random signal to a random process of a small job at a random moment, while ranks start, meet or compute.
What must come of it stands in `complaint`.
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

from launcher.linux import stat_of
from tests.launcher.conftest import LAUNCH

SEED = 1824
LAST = 1.5  # s; strikes fall between the start and this
LIMIT = 45.0  # s; from the strike to the end of the job; MPI_Finalize alone may take 30 without its engine
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

VICTIMS = ("rank", "agent", "launcher", "reaper", "engine")
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


def strikes(count: int) -> list[Strike]:
    """The same ones every time."""
    chance = random.Random(SEED)
    results = []
    for _ in range(count):
        n = chance.choice((2, 3))
        victim, number = chance.choice(VICTIMS), chance.choice(SIGNALS)
        results.append(Strike(victim, number, chance.uniform(0, LAST), n, chance.randrange(n)))
    return results


def find(strike: Strike, launcher: int, result: dict[int, str]) -> int | None:
    """The pid of the victim; None if it is not there (yet)."""
    if strike.victim == "launcher":
        return launcher
    if "-m launcher" not in result.get(launcher, "").partition("mount")[0]:
        return None  # it is not yet what it will be
    parents = {pid: stat_of(pid).parent for pid in result}
    reaper = next((pid for pid in result if parents[pid] == launcher), None)
    if strike.victim == "reaper" or reaper is None:
        return reaper
    if strike.victim == "engine":  # until it has become that, it is a fork of the reaper
        return next((pid for pid in result if parents[pid] == reaper and ENGINE.search(stat_of(pid).name)), None)
    forks = {pid for pid in result if AGENT.search(result[pid])}
    number = re.compile(rb"(^|\0)(PMI_RANK|OMPI_COMM_WORLD_RANK)=%d(\0|$)" % strike.rank)
    with contextlib.suppress(OSError, StopIteration):
        of_agents = (pid for pid in forks if parents[pid] not in forks)
        agent = next(pid for pid in of_agents if number.search(Path(f"/proc/{pid}/environ").read_bytes()))
        return agent if strike.victim == "agent" else next(pid for pid in result if parents[pid] == agent)
    return None


def ranks_named(line: str) -> set[int]:
    """`rank 1` names one, `ranks 0, 2-4` four."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", " ".join(re.findall(r"\branks? ([\d, -]+)", line)))
    return {rank for first, last in spans for rank in range(int(first), int(last or first) + 1)}


def complaint(strike: Strike, pid: int | None, code: int, err: str) -> str:
    """What is wrong with how a job ended after a strike at a process; "" if nothing is."""
    last = (err.strip().splitlines() or [""])[-1]
    ours = last.startswith("ddp-launch: ")
    if pid is None:
        return "the victim never came"
    if strike.number == signal.SIGSTOP and strike.victim not in ("rank", "agent"):
        # It goes on, or others do its work. Ranks that come together or part need the engine for that: they hang.
        # Without the reaper, there is no engine: they do not start.
        blamed = {"engine": "", "reaper": "the launcher's reaper (pid "}.get(strike.victim, "\n")
        return "" if code == 0 or (ours and blamed in last) else f"exit code {code}, and nobody was harmed"
    if strike.number in (signal.SIGTERM, signal.SIGINT) and strike.victim == "engine":  # it may pass it on to the ranks
        return "" if code == 0 or ours else "the last line is not ours"
    if code == 0:
        return "exit code 0"
    if strike.victim == "launcher":
        return ""  # it may have been a Python that was not yet ours, and says what it can
    names = {"reaper": "reaper", "engine": ENGINE.pattern}.get(strike.victim)
    named = strike.rank in ranks_named(last) if names is None else re.search(names, last)
    return "" if ours and named else f"{strike.victim} is not named"


@pytest.fixture
def strike_at(start_job: Any, tmp_path: Path) -> Iterator[Callable[[Strike], str]]:
    """Starts a job, strikes, waits for its end; what is wrong with that, "" if nothing."""
    shm = tempfile.mkdtemp(dir="/dev/shm")
    # Others may start and kill MPI jobs on this machine meanwhile: this one has a /dev/shm of its own.
    alone = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', shm]
    isolated = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    (tmp_path / "job.py").write_text(SCRIPT)
    (scratch := tmp_path / "tmp").mkdir()
    options = ["--hang-timeout", "6", "--start-limit", "10", "--grace", "1"]  # to start takes 4 s on a busy machine

    def run(strike: Strike) -> str:
        command = [*LAUNCH, "-n", str(strike.n), *options, str(tmp_path / "job.py")]
        environ = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        # Into files: pipes that nobody reads could fill.
        with open(tmp_path / "out", "w+") as out, open(tmp_path / "err", "w+") as err:
            job = start_job([*alone, *command] if isolated else command, env=environ, stdout=out, stderr=err)
            pid = hit(job, strike)
            if pid and strike.victim == "launcher" and strike.number == signal.SIGSTOP:
                time.sleep(1.0)
                os.kill(pid, signal.SIGCONT)
            try:
                code = job.process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
            time_is_up = time.monotonic() + GONE
            while (left := job.commands()) and time.monotonic() < time_is_up and code is not None:
                time.sleep(0.02)
            job.kill()
            job.process.wait()
            err.seek(0)
            said = err.read()
        files = sorted(path.name for path in [*Path(shm).iterdir(), *scratch.iterdir()])
        subprocess.run(["rm", "-rf", *Path(shm).iterdir(), *scratch.iterdir()], check=True)
        if code is None:
            wrong = f"still there after {LIMIT} s"
        else:
            wrong = f"left {left} {files}" if left or files else complaint(strike, pid, code, said)
        return f"{strike}: {wrong}\n--- exit code {code}, err\n{said}" if wrong else ""

    yield run
    os.rmdir(shm)


def hit(job: Any, strike: Strike) -> int | None:
    """Waits for the moment and for the victim, and sends the signal; the victim's pid."""
    time.sleep(strike.moment)
    while job.process.poll() is None:
        victim = find(strike, job.process.pid, job.commands())
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, strike.number)
                return victim
        time.sleep(0.01)
    return None


@pytest.mark.long  # test_stop.py kills each of them once
@pytest.mark.mpi
@pytest.mark.timeout(3600)
def test_whatever_is_struck_whenever(strike_at: Any) -> None:
    wrong = [result for strike in strikes(200) if (result := strike_at(strike))]
    assert not wrong, "\n\n".join(wrong)
