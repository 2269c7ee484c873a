"""What a timeout says: of whom, and where that is known from."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives._shared import segment
from collectives._shared.board import Board, board_bytes
from collectives._single import SingleTransport
from collectives.account import Account, give_account
from collectives.flight.reader import Window
from collectives.flight.recorder import STARTED, Recorder
from collectives.lateness import explain


class Waiting(SingleTransport):
    """One of `size` ranks, waiting for `missing` as far as that is known."""

    def __init__(self, missing: Sequence[int], known: Mapping[int, Account], size: int = 4) -> None:
        super().__init__()
        self.size = size
        self._missing, self._known = missing, known
        self.asked: Sequence[int] = []

    def late(self) -> Sequence[int]:
        return self._missing

    def accounts(self, ranks: Sequence[int]) -> Mapping[int, Account]:
        self.asked = ranks
        return {rank: self._known[rank] for rank in ranks if rank in self._known}


ORDER = "Every rank must make the same calls in the same order"
BEHIND = Account(7, "pid 1", "stands")
THERE = Account(8, "pid 2", "waits")
SILENT = Account(None, "", "does not answer")


@pytest.mark.parametrize(
    ("missing", "known", "peers", "says"),
    [
        ([1], {1: BEHIND}, None, f"Rank 1 has not arrived:\n  rank 1 (pid 1): stands\n  {ORDER}."),
        ([1], {}, None, f"Rank 1 has not arrived. {ORDER}"),
        ([1, 2, 3], {}, None, f"Ranks 1-3 have not arrived. {ORDER}"),
        ([1], {1: SILENT}, None, f"Rank 1 has not arrived:\n  rank 1: does not answer\n  {ORDER}."),
        # Come to the call, but not through with it.
        (
            [1],
            {1: THERE},
            None,
            f"Rank 1 has come to it, but not done what it waits for:\n  rank 1 (pid 2): waits\n  {ORDER}.",
        ),
        # A transport that cannot tell: their number of calls does.
        (
            [],
            {1: THERE, 2: BEHIND, 3: SILENT},
            None,
            f"Ranks 2-3 have not arrived:\n  rank 2 (pid 1): stands\n  rank 3: does not answer\n  {ORDER}.",
        ),
        (
            [],
            {1: THERE},
            None,
            "Every rank has come to it, but what they send does not arrive:\n  rank 1 (pid 2): waits\n  " + ORDER + ".",
        ),
        ([], {}, None, f"{ORDER}; one has not arrived, or hangs elsewhere"),
        # Of a send or a receive, only the other end matters.
        (
            [2],
            {1: THERE, 2: BEHIND},
            [1],
            f"Rank 1 has not made the call that it answers:\n  rank 1 (pid 2): waits\n  {ORDER}.",
        ),
        # Of a receive from any source, every other rank.
        ([2], {}, [0, 1, 3], f"Ranks 0-1, 3 have not made the call that it answers. {ORDER}"),
    ],
)
def test_who_is_late(missing: list[int], known: dict[int, Account], peers: list[int] | None, says: str) -> None:
    assert explain(Waiting(missing, known), SimpleNamespace(number=7, peers=peers)) == says


def test_only_those_that_may_be_late_are_asked() -> None:
    for missing, peers, asked in (([2], None, [2]), ([], None, [1, 2, 3]), ([2], [3], [3])):
        transport = Waiting(missing, {})
        explain(transport, SimpleNamespace(number=7, peers=peers))
        assert transport.asked == asked


def test_of_many_late_ranks_eight_are_shown() -> None:
    text = explain(Waiting([], dict.fromkeys(range(1, 100), BEHIND), 100), SimpleNamespace(number=7, peers=None))
    lines = text.splitlines()
    assert lines[0] == "Ranks 1-99 have not arrived:"
    assert [line.split()[1] for line in lines[1:9]] == [str(rank) for rank in range(1, 9)]
    assert lines[9:] == ["  and 91 more", f"  {ORDER}."]


def test_calls_of_another_communicator_and_letters_do_not_count() -> None:
    recorder = Recorder(1, 2)
    world, other = recorder.communicator("world"), recorder.communicator("world.0")

    def calls() -> int | None:
        return give_account(Window(recorder.peek).read(), "world", time.monotonic_ns()).begun

    def begin(name: str, communicator: int, number: int, state: int = STARTED) -> int:
        signature = recorder.intern(name, None, None, "", "train.py", 1)
        return recorder.begin(communicator, number, signature, state)

    assert calls() == 0
    begin("barrier", world, 0)
    assert calls() == 1
    begin("barrier", other, 5)
    begin("send", world, 9)
    begin("recv", world, 9)
    assert calls() == 1
    index = begin("barrier", world, 1, state=1)  # queued behind another
    assert calls() == 1
    recorder.start(index)
    assert calls() == 2


def test_who_is_behind_in_a_phase_is_missing_though_its_header_is_there() -> None:
    shared = segment.create(board_bytes(3))
    boards = [Board(shared, rank, 3) for rank in range(3)]
    shared.release()
    for board in boards[:2]:
        board.publish([1, 0, 0, 0])
    assert boards[0].missing() == [2]
    boards[2].publish([1, 0, 0, 0])
    assert boards[0].missing() == []
    for board in (boards[0], boards[2]):
        board.advance()
    assert boards[0].missing() == [1]
    assert boards[1].missing() == []


def test_simulated_ranks_are_named() -> None:
    def check(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(0.6)
            return ""
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            comm.all_reduce(np.ones(2))
        return str(caught.value)

    told = collectives.run_threads(check, size=3, timeout=0.3)
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce #0 (test_lateness.py:" in told[rank]
        assert f"was not complete after 0.3 s. Rank 1 has not arrived. {ORDER}" in told[rank]


Run = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import os, signal, sys, time
import numpy as np
import collectives, collectives._mpi

def apart(init=collectives._mpi.MPIWorld.__init__):
    "Each rank takes the others for being on other nodes."
    def alone(self, *arguments):
        init(self, *arguments)
        for rank in range(self.size):
            self._hosts[rank] = np.frombuffer(f"node{rank}".encode().ljust(256, bytes(1)), np.uint8)
    collectives._mpi.MPIWorld.__init__ = alone

def join(limit):
    comm = collectives.init(timeout=30)  # starting may take long on a loaded machine
    comm.timeout = limit
    return comm

def timed_out(call):
    try:
        call()
    except collectives.CollectiveTimeout as error:
        print(error, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # at once, and without a word of the launcher's
"""


@pytest.fixture
def told(run_job: Run, tmp_path: Path) -> Callable[..., str]:
    """Runs a script of these lines on n ranks; what it prints."""

    def run(body: str, n: int = 2) -> str:
        path = tmp_path / "job.py"
        path.write_text(HEAD + textwrap.dedent(body))
        done = run_job([sys.executable, "-m", "launcher", "-n", str(n), str(path)], timeout=40)
        assert done.returncode == 137, done.stderr
        return re.sub(r"(?m)^\d: ", "", done.stdout)

    return run


@pytest.mark.mpi
def test_a_rank_on_another_node_is_asked(told: Callable[..., str]) -> None:
    said = told(
        """
        apart()
        comm = join(1)
        assert comm.node == comm.rank
        comm.barrier()
        if comm.rank == 1:
            def hangs():
                time.sleep(60)
            hangs()
        timed_out(comm.barrier)
        """
    )
    assert "barrier #1 (job.py:" in said
    assert "was not complete after 1 s. Rank 1 has not arrived:\n" in said
    line = said.splitlines()[1]
    assert " on node1): last call barrier #0 (job.py:" in line
    assert "its Python stood at job.py:" in line
    assert " in hangs (" in line


@pytest.mark.mpi
def test_a_rank_on_another_node_that_is_stopped_does_not_answer(told: Callable[..., str]) -> None:
    said = told(
        """
        apart()
        comm = join(1)
        comm.barrier()
        while comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        timed_out(comm.barrier)
        """
    )
    assert "  rank 1 (on node1): does not answer: it is stopped, or its Python holds the GIL\n" in said


@pytest.mark.mpi
def test_a_rank_of_a_part_of_the_world_is_named_by_both_numbers(told: Callable[..., str]) -> None:
    said = told(
        """
        comm = join(30)
        part = comm.split(0 if comm.rank > 0 else None)
        if comm.rank == 0:
            time.sleep(60)
        part.timeout = 1
        if comm.rank == 2:
            time.sleep(60)
        timed_out(part.barrier)
        """,
        n=3,
    )
    assert "rank 0: barrier #0 (job.py:" in said
    assert "Rank 1 has not arrived:\n  rank 1 (rank 2 of the world, pid " in said


@pytest.mark.mpi
def test_a_rank_that_never_lets_go_of_the_gil_has_an_old_sample(told: Callable[..., str]) -> None:
    said = told(
        """
        import ctypes
        comm = join(4)
        if comm.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        timed_out(comm.barrier)
        """
    )
    assert re.search(
        r"its Python stood at job.py:.* \(\d\.\d s before\), with no sample since: the GIL is held\n", said
    ), said


@pytest.mark.mpi
def test_an_asynchronous_call_and_a_receive_tell_too(told: Callable[..., str]) -> None:
    for call in ("comm.all_reduce(np.ones(2), async_op=True).wait()", "comm.recv(1)"):
        said = told(
            f"""
            comm = join(1)
            if comm.rank == 1:
                time.sleep(60)
            timed_out(lambda: {call})
            """
        )
        assert "\n  rank 1 (pid " in said
        assert "): no call yet; its Python stood at job.py:" in said


@pytest.mark.mpi
def test_the_record_of_the_one_that_waited_says_failed(told: Callable[..., str]) -> None:
    said = told(
        """
        from collectives.flight.recorder import of_this_process
        from collectives.flight.reader import Window
        comm = join(1)
        if comm.rank == 1:
            time.sleep(60)
        try:
            comm.barrier()
        except collectives.CollectiveTimeout:
            record = Window(of_this_process().peek).read()
            print(record.rank, record.size, record.calls[-1].name, record.calls[-1].state)
            timed_out(comm.barrier)
        """
    )
    assert "0 2 barrier failed" in said
