"""Another number of ranks for a running job: it goes on with them or as it was, and who asked is told which."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher import resize as client
from launcher.job import Job
from launcher.network import Host
from launcher.resize import address, resize
from launcher.supervisor import resizing
from launcher.supervisor.environment import StateMemory
from launcher.supervisor.resizing import Resizing
from tests.launcher.conftest import LAUNCH, wait_for

SCRIPT = str(Path(__file__))


def test_a_job_with_another_number_of_ranks() -> None:
    job = Job(script=SCRIPT, n=4, ranks=(0, 3), debug_rank=3)
    assert job.with_ranks(2, ()) == Job(script=SCRIPT, n=2, ranks=(0,), debug_rank=0)
    assert job.with_ranks(8, ()) == Job(script=SCRIPT, n=8, ranks=(0, 3), debug_rank=3)


def a_job() -> Resizing:
    return Resizing(Job(script=SCRIPT), StateMemory(0), {}, print)


def test_what_is_no_job_of_this_user_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resize(os.getpid(), 2) == (
        False,
        f"{os.getpid()} is no ddp-launch of yours that runs on this machine (ddp-top shows them)",
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(address(1))  # a name that is another process's
        other.listen()
        assert resize(1, 2)[1].startswith("1 is no ddp-launch of yours")
    job = a_job()
    monkeypatch.setattr(client.os, "geteuid", lambda: os.getuid() + 1)
    assert resize(os.getpid(), 2)[1].startswith(f"{os.getpid()} is no ddp-launch of yours")
    job.close()


@pytest.mark.parametrize(
    ("user", "words", "heard"), [(0, b"3", True), (0, b"many", False), (0, b"", False), (1, b"3", False)]
)
def test_who_is_another_user_or_says_nothing_is_not_heard(
    user: int, words: bytes, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job()
    again = a_job()  # this process has two jobs: the first has the name
    assert again.listener is None
    again.close()
    monkeypatch.setattr(resizing.os, "geteuid", lambda: os.getuid() + user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(address(os.getpid()))
        asks.sendall(words) if words else asks.shutdown(socket.SHUT_WR)
        job.handle_request(Job(script=SCRIPT), Mock(max_ranks=None))
        job.close()
        answer = b""
        with suppress(ConnectionResetError):  # nothing was read
            answer = asks.recv(1 << 16)
        assert bool(answer) == heard


@pytest.mark.parametrize(
    ("n", "most", "why"),
    [
        (4, None, "the job has 4 ranks already"),
        (3, None, "not all ranks of the job are in the loop of a ddp.checkpoint.Checkpointer, "),
        (5, 4, "micro_batches=4 is the most ranks that the job can have, not 5"),
        (1, 8, "--min-ranks 2 is the fewest ranks that the job can have, not 1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_the_job_goes_on(n: int, most: int | None, why: str) -> None:
    resizes = a_job()
    job = Job(script=SCRIPT, hosts=(Host("a", 4),), min_ranks=2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(address(os.getpid()))
        asks.sendall(str(n).encode())
        resizes.handle_request(job, Mock(max_ranks=most))
        done, text = json.loads(asks.recv(1 << 16))
    assert (done, text.startswith(why), resizes.target) == (False, True, None), text
    resizes.close()


# A loop that asks after each step whether the job is to have another number of ranks.
LOOP = """
from collectives.time_limit import resize_requested
from collectives.world import report
attempt = int(os.environ["DDP_ATTEMPT"])

def stop(number, frame):
    report(stopped=9)
    sys.exit(75)

def loop(most=3, leave=lambda: sys.exit(75)):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    report(resizable=most)
    print(f"ready {size}", flush=True)
    while not resize_requested():
        time.sleep(0.005)
    report(resizing=7)
    leave()
"""
READY = "report(resizable=0)\nprint('ready', flush=True)"
NOT_ALL = "not all ranks of the job are in the loop of a ddp.checkpoint.Checkpointer"


@pytest.fixture
def ask(start_launch: Any) -> Any:
    """Starts a script of these lines on one rank; the job, and the answer to a request for so many ranks."""

    def start(body: str, n: int, options: tuple[str, ...] = ()) -> tuple[Any, tuple[bool, str]]:
        job = start_launch(LOOP + body, n=1, options=options)
        return job, resize(job.process.pid, n)

    return start


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_a_job_goes_on_with_more_ranks_and_with_fewer(ask: Any, tmp_path: Path) -> None:
    job, (done, text) = ask("loop()", 2, options=("--events", str(tmp_path / "events")))
    assert (done, text.partition("; ")[0]) == (True, "resized from 1 to 2 ranks after step 7"), text
    wait_for(job.process.stdout, "ready 2", 2)
    assert resize(job.process.pid, 2) == (False, "the job has 2 ranks already")
    assert resize(job.process.pid, 4) == (False, "micro_batches=3 is the most ranks that the job can have, not 4")
    asks = subprocess.run(
        [*LAUNCH, "--resize", "1", "--job", str(job.process.pid)], capture_output=True, text=True, timeout=30
    )
    assert asks.stdout.startswith("ddp-launch: resized from 2 to 1 rank after step 7; training stood still for ")
    assert (asks.returncode, asks.stderr) == (0, "")
    job.process.send_signal(signal.SIGTERM)
    done = job.wait(15)
    assert done.returncode == 75, done.stderr
    assert [line for line in done.stderr.splitlines() if "resized" not in line][1:] == [
        "ddp-launch: stopped as asked at step 9, state saved: start the same command to go on"
    ]
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["n"] for event in events if event["event"] == "restart"] == [2, 1]
    assert [event["event"] for event in events if event["event"] in ("failure", "stopped")] == ["stopped"]


@pytest.mark.parametrize(("held", "clause"), [("", ", with no state in memory"), ("report(held=1)", "")])
def test_a_restart_without_a_state_in_memory_says_so(held: str, clause: str, ddp_launch: Any) -> None:
    leave = f"report(resizable=0); {held}\nif attempt == 0: os.kill(os.getpid(), 9)"
    done = ddp_launch(LOOP + leave, n=1, options=("--max-restarts", "1"))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, f"ddp-launch: restart 1 of 1{clause}")


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batches", [3, 0])
def test_ranks_of_micro_batches_keep_the_number_of_blas_threads(
    micro_batches: int, start_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("on one core the number is 1 in any case")
    monkeypatch.delenv("OMP_NUM_THREADS")
    body = f"print('threads', os.environ['OMP_NUM_THREADS'], flush=True)\nloop({micro_batches})"
    job = start_launch(LOOP + body, n=2)
    assert resize(job.process.pid, 1)[0]
    job.process.send_signal(signal.SIGTERM)
    threads = [int(line.split()[-1]) for line in job.wait(15).stdout.splitlines() if "threads" in line]
    assert threads[-1] == (max(1, cores // 2) if micro_batches else cores)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("print('ready', flush=True)\ntime.sleep(0.3)", NOT_ALL),  # no loop at all
        (
            f"{READY}\nwhile not resize_requested(): pass",
            "the job could not be resized: it ended before",
        ),
    ],
    ids=["no loop", "a job that ends"],
)
def test_a_job_that_cannot_leave_goes_on_untouched(body: str, answer: str, ask: Any) -> None:
    job, (done, text) = ask(body, 2)
    ended = job.wait(15)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not done
    assert text.startswith(answer)


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_ranks_that_do_not_start_leave_the_job_as_it_was(ask: Any) -> None:
    job, (done, text) = ask("if size == 2 and rank == 1: raise ValueError('two')\nloop()", 2)
    assert not done
    assert text.startswith("the job did not start with 2 ranks, and goes on with 1 rank: rank 1 (pid")
    assert text.endswith("raised ValueError: two")
    wait_for(job.process.stdout, "ready 1", 1)
    assert resize(job.process.pid, 3)[0]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(15).returncode == 75


@pytest.mark.timeout(60)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_killed_on_its_way_is_a_failure_as_at_any_time(restarts: int, ask: Any) -> None:
    body = "loop(leave=lambda: attempt or os.kill(os.getpid(), 9))"
    job, (done, text) = ask(body, 2, options=("--max-restarts", str(restarts)))
    assert not done
    assert text.startswith("the job could not be resized: rank 0 (pid")
    if restarts:
        wait_for(job.process.stdout, "ready 1", 1)
        job.process.send_signal(signal.SIGTERM)
    ended = job.wait(15)
    assert ended.returncode == (75 if restarts else 137), ended.stderr


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("signals", "code", "last"),
    [
        ((signal.SIGTERM,), 75, "stopped as asked at step 9, state saved: start the same command to go on"),
        ((signal.SIGINT,), 130, "stopped as asked at step 9, state saved: start the same command to go on"),
        ((signal.SIGINT, signal.SIGINT), 130, None),
    ],
)
def test_a_signal_in_the_middle_waits_until_ranks_have_the_state(
    signals: tuple[int, ...], code: int, last: str | None, start_launch: Any, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    waits = f"if attempt: print('starts', flush=True)\nwhile attempt and not os.path.exists({str(there)!r}): pass\n"
    job = start_launch(LOOP + waits + "loop()", n=1)
    asks = subprocess.Popen(
        [*LAUNCH, "--resize", "2", "--job", str(job.process.pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(job.process.stdout, "starts", 2)
    first, *second = signals
    job.process.send_signal(first)
    wait_for(job.process.stderr, "loses what is not on disk", 1)
    for number in second:
        time.sleep(0.2)  # else it counts as the same Ctrl-C
        job.process.send_signal(number)
    if not second:
        there.touch()
    ended = job.wait(15)
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (code, [f"ddp-launch: {last}"] if last else [])
    answer = asks.communicate(timeout=15)[0]
    assert (asks.returncode, b"could not be resized: it ended" in answer) == (len(second), bool(second))


@pytest.mark.parametrize("line", ["--resize 2", "--job 7", "--resize 2 --job 7 train.py", "--resize 2 --job 7 -n 2"])
def test_both_options_belong_together_and_alone(line: str) -> None:
    asks = subprocess.run([sys.executable, "-m", "launcher", *line.split()], capture_output=True, text=True, timeout=30)
    assert asks.returncode == 2
    assert asks.stderr.endswith("without a script or other options: ddp-launch --resize N --job PID\n")
