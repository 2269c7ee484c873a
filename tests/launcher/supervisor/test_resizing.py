"""Another number of ranks for a running job: it goes on with them or as it was, and who asked is told which."""

from __future__ import annotations

import os
import signal
import socket
import threading
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
from tests.launcher.conftest import LAUNCH, read_events, wait_for

SCRIPT = str(Path(__file__))
AS_ASKED = "ddp-launch: stopped as asked at step 9, state saved: start the same command to go on"


def test_a_job_with_another_number_of_ranks() -> None:
    job = Job(script=SCRIPT, n=4, ranks=(0, 3), debug_rank=3)
    assert job.with_ranks(2, ()) == Job(script=SCRIPT, n=2, ranks=(0,), debug_rank=0)
    assert job.with_ranks(8, ()) == Job(script=SCRIPT, n=8, ranks=(0, 3), debug_rank=3)


def a_job() -> Resizing:
    return Resizing(Job(script=SCRIPT), StateMemory(0), {}, print)


def test_what_is_no_job_of_this_user_is_not_asked(monkeypatch: Any) -> None:
    here = os.getpid()
    no_job = f"{here} is no ddp-launch of yours that runs on this machine (ddp-top shows them)"
    assert resize(here, 2) == (False, no_job)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(address(1))  # a name that is another process's
        other.listen()
        assert resize(1, 2)[1].startswith("1 is no ddp-launch of yours")
    job = a_job()
    monkeypatch.setattr(client.os, "geteuid", lambda: os.getuid() + 1)
    assert resize(here, 2) == (False, no_job)
    job.close()


def test_a_job_that_ends_before_it_answers() -> None:
    here = os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as job:
        job.bind(address(here))
        job.listen()

        def read_request() -> None:
            with job.accept()[0] as connection:
                connection.recv(9)

        ends = threading.Thread(target=read_request)
        ends.start()
        assert resize(here, 2) == (False, f"ddp-launch {here} ended before it answered")
        ends.join()


NOT_ALL = "not all ranks of the job are in the loop of a ddp.checkpoint.Checkpointer"


@pytest.mark.parametrize(
    ("words", "most", "user", "why"),
    [
        # of another user, and of one who says nothing
        (b"3", None, 1, ""),
        (b"many", None, 0, ""),
        (b"", None, 0, ""),
        (b"4", None, 0, "the job has 4 ranks already"),
        (b"3", None, 0, NOT_ALL),
        (b"5", 4, 0, "micro_batches=4 is the most ranks that the job can have, not 5"),
        (b"1", 8, 0, "--min-ranks 2 is the fewest ranks that the job can have, not 1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_or_not_heard_and_the_job_goes_on(
    words: bytes, most: int | None, user: int, why: str, monkeypatch: Any
) -> None:
    resizes = a_job()
    again = a_job()  # this process has two jobs: the first has the name
    assert again.listener is None
    again.close()
    monkeypatch.setattr(resizing.os, "geteuid", lambda: os.getuid() + user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(address(os.getpid()))
        asks.sendall(words) if words else asks.shutdown(socket.SHUT_WR)
        resizes.handle_request(Job(script=SCRIPT, hosts=(Host("a", 4),), min_ranks=2), Mock(max_ranks=most))
        resizes.close()
        answer = b""
        with suppress(ConnectionResetError):  # nothing was read
            answer = asks.recv(1 << 16)
    assert answer.startswith(f'[false, "{why}'.encode() if why else b"")
    assert (bool(answer), resizes.target) == (bool(why), None)


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
    print(f"ready {size} on {os.environ['OMP_NUM_THREADS']}", flush=True)
    while not resize_requested():
        time.sleep(0.005)
    report(resizing=7)
    leave()
"""
READY = "report(resizable=0)\nprint('ready', flush=True)"


@pytest.fixture
def ask(start_launch: Any, monkeypatch: Any) -> Any:
    """Starts a script of these lines on one rank; the job, and the answer to a request for so many ranks."""
    monkeypatch.delenv("OMP_NUM_THREADS")

    def start(body: str, n: int, options: tuple[str, ...] = ()) -> Any:
        job = start_launch(LOOP + body, 1, options)
        return job, *resize(job.process.pid, n)

    return start


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_a_job_goes_on_with_more_ranks_and_with_fewer(ask: Any, launch: Any, tmp_path: Path) -> None:
    job, done, text = ask("loop()", 2, ("--events", str(tmp_path / "events")))
    assert (done, text.partition("; ")[0]) == (True, "resized from 1 to 2 ranks after step 7"), text
    # Ranks of micro-batches keep their number of BLAS threads.
    wait_for(job.process.stdout, f"ready 2 on {len(os.sched_getaffinity(0))}", 2)
    assert resize(job.process.pid, 4) == (False, "micro_batches=3 is the most ranks that the job can have, not 4")
    out = "ddp-launch: resized from 2 to 1 rank after step 7; training stood still for "
    assert launch("--resize", 1, "--job", job.process.pid, err="").stdout.startswith(out)
    job.process.send_signal(signal.SIGTERM)
    done = job.wait(15, code=75)
    assert [line for line in done.stderr.splitlines() if "resized" not in line][1:] == [AS_ASKED]
    events = read_events(tmp_path / "events")
    assert [event["n"] for event in events if event["event"] == "restart"] == [2, 1]
    assert [event["event"] for event in events if event["event"] in ("failure", "stopped")] == ["stopped"]


def test_a_restart_without_a_state_in_memory_says_so(ddp_launch: Any) -> None:
    leave = "report(resizable=0); attempt and report(held=1)\nif attempt < 2: os.kill(os.getpid(), 9)"
    done = ddp_launch(LOOP + leave, n=1, options=("--max-restarts", "2"))
    restarts = [line for line in done.stderr.splitlines() if "restart" in line]
    assert restarts == ["ddp-launch: restart 1 of 2, with no state in memory", "ddp-launch: restart 2 of 2 in 1 s"]


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_ranks_without_micro_batches_share_the_cores_anew(ask: Any) -> None:
    job, *_ = ask("loop(0)", 2)
    wait_for(job.process.stdout, f"ready 2 on {max(1, len(os.sched_getaffinity(0)) // 2)}", 2)
    job.process.send_signal(signal.SIGTERM)
    job.wait(15, code=75)


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
    job, done, text = ask(body, 2)
    job.wait(15, code=0, err="")
    assert not done
    assert text.startswith(answer)


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_ranks_that_do_not_start_leave_the_job_as_it_was(ask: Any) -> None:
    job, done, text = ask("if size == 2 and rank == 1: raise ValueError('two')\nloop()", 2)
    assert not done
    assert text.startswith("the job did not start with 2 ranks, and goes on with 1 rank: rank 1 (pid")
    assert text.endswith("raised ValueError: two")
    wait_for(job.process.stdout, "ready 1", 1)
    assert resize(job.process.pid, 3)[0]
    job.process.send_signal(signal.SIGTERM)
    job.wait(15, code=75)


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_on_its_way_is_a_failure_as_at_any_time(ask: Any) -> None:
    job, *first = ask("loop(leave=lambda: os.kill(os.getpid(), 9))", 2, ("--max-restarts", "1"))
    wait_for(job.process.stdout, "ready 1", 1)
    for done, text in (first, resize(job.process.pid, 2)):
        assert not done
        assert text.startswith("the job could not be resized: rank 0 (pid")
    job.wait(15, code=137)


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("signals", "code", "last"),
    [
        ((signal.SIGTERM,), 75, [AS_ASKED]),
        pytest.param((signal.SIGINT,), 130, [AS_ASKED], marks=pytest.mark.long),
        ((signal.SIGINT, signal.SIGINT), 130, []),
    ],
    ids=["SIGTERM", "Ctrl-C", "Ctrl-C twice"],
)
def test_a_signal_in_the_middle_waits_until_ranks_have_the_state(
    signals: tuple[int, ...], code: int, last: list[str], start_launch: Any, start_job: Any, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    waits = f"if attempt: print('starts', flush=True)\nwhile attempt and not os.path.exists({str(there)!r}): pass\n"
    job = start_launch(LOOP + waits + "loop()", 1)
    asks = start_job([*LAUNCH, "--resize", "2", "--job", job.process.pid])
    wait_for(job.process.stdout, "starts", 2)
    first, *second = signals
    job.process.send_signal(first)
    wait_for(job.process.stderr, "loses what is not on disk", 1)
    for number in second:
        time.sleep(0.2)  # else it counts as the same Ctrl-C
        job.process.send_signal(number)
    if not second:
        there.touch()
    assert job.wait(15, code=code).stderr.splitlines()[-1:] == last
    answer = asks.wait(15, code=len(second))
    assert ("could not be resized: it ended" in answer.stdout + answer.stderr) == bool(second)
