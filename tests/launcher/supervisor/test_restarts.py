"""A job that failed starts again: as often as it may, not after the user has ended it, and nothing is left over."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.engines.mpiexec import MPICH, mpi_family
from launcher.job import Job
from launcher.network import Host
from launcher.resize import resize
from launcher.supervisor.supervisor import describe_hosts, lost_hosts, restart_delay, without_hosts
from tests.conftest import SLURM, executable
from tests.launcher.conftest import LAUNCH, wait_for

A, B, C = Host("a", 2), Host("b", 2), Host("c", 1)
SCRIPT = str(Path(__file__))


def test_pauses_grow_and_end_somewhere() -> None:
    assert [restart_delay(number) for number in (*range(1, 10), 1026)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(
    ("n", "gone", "lost"),
    [
        (5, (2,), []),
        (5, (2, 3), [B]),
        (5, (0, 2, 3, 4), [B, C]),
        (5, (0, 1, 2, 3, 4), []),
        (3, (2,), [B]),  # of B one slot is used, of C none
    ],
)
def test_a_host_is_lost_when_nothing_is_heard_from_any_of_its_ranks(
    n: int, gone: tuple[int, ...], lost: list[Host]
) -> None:
    assert lost_hosts([A, B, C], n, gone) == lost


def test_where_a_restart_takes_place_is_said() -> None:
    left = Job(script=SCRIPT, hosts=(A, B))
    assert describe_hosts([], left) == ""
    assert describe_hosts([C], left) == ", without c: 4 ranks"
    assert describe_hosts([A, C], None) == ", on all hosts: without a, c too few ranks are left"


def test_a_job_goes_on_with_the_hosts_that_are_left() -> None:
    job = Job(script=SCRIPT, hosts=(A, B, C), min_ranks=3, ranks=(0, 4), debug_rank=4)
    left = without_hosts(job, [B])
    assert left is not None
    assert (left.hosts, left.size, left.ranks, left.debug_rank) == ((A, C), 3, (0,), 0)
    assert without_hosts(job, []) is job
    assert without_hosts(job, [A, C]) is None


FAILS = """
attempt = int(os.environ["DDP_ATTEMPT"])
print(f"attempt {attempt}", flush=True)
"""


@pytest.mark.mpi
def test_a_job_that_fails_starts_again_and_the_last_failure_counts(ddp_launch: Any) -> None:
    body = FAILS + "if rank == 1:\n    time.sleep(0.5)\n    sys.exit(3 + attempt)\ntime.sleep(9)"
    done = ddp_launch(body, options=("--max-restarts", "1"), code=4)
    said = [line.partition(") ")[2] or line for line in done.stderr.splitlines() if line.startswith("ddp-launch")]
    assert said == ["exited with code 3", "ddp-launch: restart 1 of 1", "exited with code 4"]
    assert done.lines == ["0: attempt 0", "0: attempt 1", "1: attempt 0", "1: attempt 1"]


def test_standard_input_that_has_ended_has_ended_for_the_next_attempt_too(ddp_launch: Any) -> None:
    body = FAILS + "print(sys.stdin.read() or 'nothing')\nsys.exit(attempt == 0)"
    ddp_launch(body, n=1, options=("--max-restarts", "1"), out="attempt 0\nnothing\nattempt 1\nnothing\n")


def test_ctrl_c_ends_a_job_while_it_waits_for_its_restart(start_launch: Any) -> None:
    job = start_launch("print('ready', flush=True)\nsys.exit(1)", n=1, options=("--max-restarts", "9"))
    wait_for(job.process.stderr, "restart 2 of 9 in 1 s", 1)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10, code=130).last == "ddp-launch: Ctrl-C: the job does not start again"


def test_a_time_limit_ends_a_job_while_it_waits_for_its_restart(ddp_launch: Any) -> None:
    start = time.monotonic()
    # Restarts after 0, 1, 2, 4, 8 s, of which one would come too late.
    done = ddp_launch("sys.exit(1)", n=1, options=("--max-restarts", "9", "--timeout", "3"), code=124)
    assert 2.9 < time.monotonic() - start < 15
    assert done.last == "ddp-launch: the job took longer than 3 s"


SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
[ ! -e "$0.down" ] || { echo "ssh: connect to host $1 port 22: No route to host" >&2; sleep 0.02; exit 255; }
shift
exec sh -c "$*"
"""


@pytest.fixture
def elsewhere(start_job: Any, script: Any, mpiexec: Any, tmp_path: Path) -> Any:
    """Starts a script of these lines, one rank on this machine and one on a host beyond an ssh, which is this one too.

    From then on there is no way to that host if `DOWN`, a file's name in the script, is made.
    """
    if mpi_family(mpiexec[0]) != MPICH:
        pytest.skip("Open MPI will not have two hosts that are one")
    ssh = executable(tmp_path / "ssh", SSH)

    def start(body: str, *options: str, **more: Any) -> Any:
        where = ["--hosts", "localhost:1,elsewhere:1", "--max-restarts", "3", *options]
        path = script(f"DOWN = '{ssh}.down'\n{FAILS}" + body)
        return start_job([*LAUNCH, *where, path], env={"HYDRA_LAUNCHER_EXEC": ssh}, **more)

    return start


LOST = ["ddp-launch: restart 1 of 3", "ddp-launch: host elsewhere cannot be reached by ssh: No route to host"]


@pytest.mark.mpi
def test_without_min_ranks_a_job_waits_for_a_host_that_was_lost(elsewhere: Any, tmp_path: Path) -> None:
    body = "if attempt == 0 and rank == 1: open(DOWN, 'w'); sys.exit(3)\nif attempt == 0: time.sleep(9)\nprint(size)"
    job = elsewhere(body)
    # The host is back while the job waits for its next start.
    seen = wait_for(job.process.stderr, "are left\n", 1)
    (tmp_path / "ssh.down").unlink()
    assert [line[-1] for line in job.wait(20, code=0).stdout.splitlines()[-2:]] == ["2", "2"]
    again = "ddp-launch: restart 2 of 3 in 2 s, on all hosts: without elsewhere too few ranks are left"
    assert [line for line in seen.splitlines() if "restart" in line or "reached" in line] == [*LOST, again]


LOOP = """
from collectives.time_limit import resize_requested
from collectives.world import report

if attempt == 0:
    if rank == 1: open(DOWN, 'w'); sys.exit(3)
    time.sleep(9)
if size == 2 and os.path.exists(DOWN + ".fails"): sys.exit(4)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
report(resizable=0)
print("ready", size, flush=True)
while not resize_requested():
    time.sleep(0.005)
report(resizing=7)
sys.exit(75)
"""


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_a_job_goes_on_without_a_host_and_takes_it_after_a_step_when_it_is_back(elsewhere: Any, tmp_path: Path) -> None:
    job = elsewhere(LOOP, "--min-ranks", "1")
    wait_for(job.process.stdout, "ready 1", 1)
    went = wait_for(job.process.stderr, "1 rank\n", 1).splitlines()
    assert [line for line in went if "restart" in line or "cannot" in line] == [
        *LOST,
        "ddp-launch: restart 2 of 3 in 1 s, without elsewhere: 1 rank",
    ]
    (tmp_path / "ssh.down.fails").touch()
    (tmp_path / "ssh.down").unlink()
    # Its ranks fail: the job goes on as it was, and asks again.
    wait_for(job.process.stdout, "ready 1", 1, timeout=60)
    (tmp_path / "ssh.down.fails").unlink()
    wait_for(job.process.stdout, "ready 2", 2, timeout=60)
    assert resize(job.process.pid, 1)[0]  # and stays there, since it was asked for
    wait_for(job.process.stdout, "ready 1", 1)
    time.sleep(1.5)  # hosts are asked every second
    job.process.send_signal(signal.SIGTERM)
    said = [line.partition("; ")[0] for line in job.wait(20).stderr.splitlines() if "from" in line or "goes on" in line]
    taken = "elsewhere can be reached: the job is resized from 1 to 2 ranks"
    assert [line.partition(": rank")[0] for line in said] == [
        f"ddp-launch: {taken}",
        "ddp-launch: the job did not start with 2 ranks, and goes on with 1 rank",
        f"ddp-launch: {taken}",
        "ddp-launch: resized from 1 to 2 ranks after step 7",
        "ddp-launch: resized from 2 to 1 rank after step 7",
    ]


SRUN = f"""#!{sys.executable}
import os, subprocess, sys
if "--mpi=list" in sys.argv:
    sys.exit(print("MPI plugin types are...\\n\\tpmi2\\n\\tpmix"))
at = sys.argv.index("-n")
nodes = [word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist=")]
print(*nodes, file=open(__file__ + ".log", "a"))
ranks = []
for rank in range(int(sys.argv[at + 1])):
    step = {{"SLURM_STEP_NUM_TASKS": sys.argv[at + 1], "SLURM_STEP_TASKS_PER_NODE": f"1(x{{sys.argv[at + 1]}})"}}
    place = {{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}}
    ranks.append(subprocess.Popen(sys.argv[at + 2 :], env={{**os.environ, **step, **place}}))
for rank in ranks:
    rank.wait()
"""


@pytest.mark.mpi
def test_in_an_allocation_a_job_does_without_its_hosts(start_job: Any, script: Any, tmp_path: Path) -> None:
    executable(tmp_path / "srun", SRUN)
    body = f"""
while size == 2:
    if attempt == 0 and rank == 1 and os.path.exists("{tmp_path}/go"):
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.05)
print(size)
"""
    environ = {
        "PATH": f"{tmp_path}:{SLURM}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "no-such-node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    options = ["--max-restarts", "2", "--min-ranks", "1"]
    job = start_job([*LAUNCH, *options, script(FAILS + body)], env=environ)
    wait_for(job.process.stdout, "attempt 0", 2)
    (tmp_path / "go").touch()
    done = job.wait(40, code=0)
    assert "ddp-launch: restart 1 of 2, without no-such-node2: 1 rank" in done.stderr.splitlines()
    assert done.stdout.splitlines()[-1].endswith("0: 1")
    assert (tmp_path / "srun.log").read_text() == "no-such-node1,no-such-node2\nno-such-node1\n"
