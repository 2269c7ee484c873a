"""The end of a job, asked for or not: one line, bounded, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.engines.mpiexec import MPICH, mpi_family
from launcher.linux import stat_of
from tests.conftest import wait_until
from tests.launcher.conftest import LAUNCH

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

READY = """
print("ready", flush=True)
"""
# Neither the rank nor its child hears SIGTERM or SIGINT; the child has a session of its own.
STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"], start_new_session=True)
"""
SLEEP = "time.sleep(60)\n"
ENDING = "ddp-launch: {}: ending the job (once more kills it at once)\n"


def end(job: Any, within: float, **expected: Any) -> Any:
    """The job's end; all must be over `within` seconds from now."""
    start = time.monotonic()
    done = job.wait(15, leave=max(0.0, within), **expected)
    assert time.monotonic() - start < within
    return done


@pytest.mark.parametrize(
    ("number", "name", "code", "n"),
    [(signal.SIGINT, "Ctrl-C", 130, 2), (signal.SIGTERM, "SIGTERM (signal 15)", 143, 1)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_the_job_with_one_line(start_launch: Any, number: int, name: str, code: int, n: int) -> None:
    body = "import atexit; atexit.register(print, 'at exit'); atexit.register(time.sleep, 0.2)" + READY + SLEEP
    job = start_launch(body, n, ("--max-restarts", "1"))  # which the user's end of a job is no reason for
    for _ in range(2):  # as from `timeout`, which signals the launcher and then its group
        job.process.send_signal(number)
    done = end(job, 4, code=code, err=ENDING.format(name))
    # Python turns SIGINT into an orderly exit, SIGTERM just ends it.
    assert done.stdout.count("at exit") == (2 if number == signal.SIGINT else 0)


def test_the_second_signal_kills_at_once(start_launch: Any) -> None:
    job = start_launch(STUBBORN + READY + SLEEP, 1, ("--grace", "30"))
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    end(job, 2, code=130, err=ENDING.format("Ctrl-C"))


def find(job: Any, *names: str) -> int:
    """The pid of the process of this job whose command name is among `names`."""
    return next(int(pid) for pid in job.pids() if Path(f"/proc/{pid}/comm").read_text().strip() in names)


def agents(job: Any) -> list[int]:
    """The agents: each has a fork of its own command as its child."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in job.pids()}
    forks = {pid for pid, words in commands.items() if len(words) > 1 and words[1].endswith(b"/agent/main.py")}
    return sorted(parent for parent in (stat_of(pid).parent for pid in forks) if parent in forks)


ENGINE_KILLED = "{name} (pid {pid}) was killed by SIGKILL (signal 9) while ranks were running"


@pytest.mark.parametrize(
    ("victim", "engine", "code", "says"),
    [
        ("launcher", "auto", -9, ""),
        ("engine", "auto", 137, ENGINE_KILLED),
        pytest.param("engine", "mpiexec", 137, ENGINE_KILLED, marks=pytest.mark.long),
        ("proxy", "mpiexec", 1, "hydra_pmi_proxy (pid {pid}), which had started the ranks, died"),
        ("agent", "auto", 1, "the agent of rank 1 (pid {pid}) died, and its rank with it"),
        ("reaper", "auto", 1, "the launcher's reaper (pid {pid}), which had started the ranks, died"),
    ],
)
def test_kill_9(
    start_launch: Any, mpiexec: Any, tmp_path: Path, victim: str, engine: str, code: int, says: str
) -> None:
    """Whatever is killed, the job ends and names it; nothing is left, of files neither."""
    family = mpi_family(mpiexec[0])
    if victim == "proxy" and family != MPICH:
        pytest.skip("this engine has no proxy on the local node")
    options = ("--grace", "0.2", "--engine", family if engine == "mpiexec" else "auto")
    job = start_launch(STUBBORN + READY + SLEEP, options=options, env={"TMPDIR": str(tmp_path)})
    assert len(list(tmp_path.glob("ddp-launch-*"))) == 1
    name = "ddp_pmi_server" if engine == "auto" and family == MPICH else "mpiexec"
    launcher = job.process.pid
    pid = {
        "launcher": lambda: launcher,
        "engine": lambda: find(job, name, "mpiexec.hydra", "prterun"),
        "proxy": lambda: find(job, "hydra_pmi_proxy"),
        "agent": lambda: agents(job)[1],
        "reaper": lambda: int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0]),
    }[victim]()
    os.kill(pid, signal.SIGKILL)
    done = end(job, 5, code=code)
    assert says.format(name=name, pid=pid) in (done.stderr.splitlines() or [""])[-1]
    assert not list(tmp_path.glob("ddp-launch-*"))


def test_a_stopped_rank_does_not_hold_the_end_up(start_launch: Any) -> None:
    job = start_launch(READY + "os.kill(os.getpid(), signal.SIGSTOP)\n" + SLEEP, 1, ("--grace", "0.1"))
    job.process.send_signal(signal.SIGINT)
    end(job, 4, code=130)


# Both end once the job has been continued.
SPIN = """
while not os.path.exists(os.environ["CONTINUED"]):
    time.sleep(0.02)
"""
MEET = """
import numpy as np, collectives
comm = collectives.init(timeout=5)
go_on = np.ones(1)
print("ready", flush=True)
while go_on[0]:
    go_on[0] = not os.path.exists(os.environ["CONTINUED"])
    comm.broadcast(go_on, 0)
    time.sleep(0.02)
"""
# The launcher with a shorter wait, of 0.1 s, and a stop counts from 0.3 s more than that.
SOON = """
import sys
from launcher import cli
from launcher.supervisor import attempt
attempt._MAX_WAIT = 0.1
attempt._STOPPED_LIMIT = 0.3
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("body", "seconds"), [(READY + SPIN, 0), pytest.param(MEET, 7, marks=pytest.mark.long)], ids=["stops", "clocks"]
)
def test_ctrl_z_stops_all_ranks_and_every_clock(start_launch: Any, tmp_path: Path, body: str, seconds: float) -> None:
    continued = tmp_path / "continued"
    options = ("--hang-timeout", "5", "--timeout", "6.5")
    job = start_launch(body, options=options, env={"CONTINUED": str(continued)})
    job.process.send_signal(signal.SIGTSTP)
    # two ranks and the launcher
    wait_until(lambda: sum(stat_of(pid).state == "T" for pid in job.pids()) == 3, 10)
    time.sleep(seconds)  # 7 s: more than --timeout
    job.process.send_signal(signal.SIGCONT)
    continued.touch()
    end(job, 20, code=0, err="")


def test_the_time_for_which_the_launcher_is_stopped_does_not_count(start_job: Any, script: Any, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    path = script(READY + "time.sleep(0.8)\n")
    job = start_job([sys.executable, "-c", SOON, "--events", str(events), path])
    assert job.process.stdout.readline() == "ready\n"
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(0.6)
    job.process.send_signal(signal.SIGCONT)
    end(job, 8, code=0)
    assert '"event":"continued"' in events.read_text()


def test_an_agent_that_connects_after_the_end_of_the_others_is_released(run_job: Any, script: Any) -> None:
    patient = "from launcher.supervisor import attempt\nattempt._ENGINE_LIMIT = 3600.0\n"  # The default is 1.5 s.
    program = patient + "import sys\nfrom launcher import cli\nsys.exit(cli.main())\n"
    run_job([sys.executable, "-c", program, "-n", "2", script("import sys\nsys.exit(3)\n")], timeout=20, code=3)


def test_ignored_signals_stay_ignored(start_job: Any, script: Any) -> None:
    job = start_job(["nohup", *LAUNCH, script(READY + "time.sleep(0.2)\n")], stderr=subprocess.DEVNULL)
    assert job.process.stdout.readline() == "ready\n"
    job.process.send_signal(signal.SIGHUP)
    job.wait(20, code=0)
