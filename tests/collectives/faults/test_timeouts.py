"""What a timeout says: which rank is late, and what that one does."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.backends.shm import segment
from collectives.backends.shm.control_block import ControlBlock, control_bytes
from collectives.backends.single import SingleTransport
from collectives.engine.call import CallArguments, CollectiveOp, user_site
from collectives.engine.progress import describe_late

ORDER = "Every rank must make the same calls in the same order"


class Waiting(SingleTransport):
    """One of several ranks, waiting for `missing` as far as that is known. pids: of the ranks on this machine"""

    def __init__(self, missing: Sequence[int], pids: Mapping[int, int]) -> None:
        super().__init__()
        self._missing, self._pids = missing, pids

    def late(self) -> Sequence[int]:
        return self._missing

    def pid(self, rank: int) -> int | None:
        return self._pids.get(rank)


@pytest.mark.parametrize(
    ("missing", "peers", "says"),
    [
        ([1], None, f"Rank 1 has not arrived. {ORDER}"),
        ([1, 2, 3], None, f"Ranks 1-3 have not arrived. {ORDER}"),
        ([], None, f"{ORDER}; one has not arrived, or hangs elsewhere"),
        # Of a send or a receive, only the other end matters; of a receive from any source, every other rank.
        ([2], [1], f"Rank 1 has not made the call that it answers. {ORDER}"),
        ([2], [0, 1, 3], f"Ranks 0-1, 3 have not made the call that it answers. {ORDER}"),
    ],
)
def test_who_is_late(missing: list[int], peers: list[int] | None, says: str) -> None:
    assert describe_late(call_of(peers), Waiting(missing, {})) == says


def call_of(peers: list[int] | None = None) -> CollectiveOp[Any]:
    call: CollectiveOp[Any] = CollectiveOp("barrier", CallArguments(None, ""), user_site(), 1.0)
    call.peers = peers
    return call


def test_of_many_late_ranks_the_first_are_described() -> None:
    lines = describe_late(call_of(), Waiting(range(1, 100), dict.fromkeys(range(2, 100), 2**22 + 1))).splitlines()
    assert lines[0] == "Ranks 1-99 have not arrived:"
    assert lines[1:-1] == [f"  rank {rank} (pid {2**22 + 1}): there is no process {2**22 + 1}" for rank in range(2, 9)]
    assert lines[-1] == f"  {ORDER}."


def test_a_process_without_a_record_is_named_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        text = describe_late(call_of(), Waiting([1], {1: child.pid}))
        child.communicate(b"\n")
    assert f"rank 1 (pid {child.pid}): process {child.pid} (" in text
    assert "keeps no flight record" in text


def test_who_is_behind_in_a_phase_is_missing_though_its_header_is_there() -> None:
    shared = segment.create(control_bytes(3))
    boards = [ControlBlock(shared, rank, 3) for rank in range(3)]
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

    said = collectives.run_threads(check, size=3, timeout=0.3)
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce #0 (test_timeouts.py:" in said[rank]
        assert f"was not complete after 0.3 s. Rank 1 has not arrived. {ORDER}" in said[rank]


HEAD = """
import os, signal, sys, time
import numpy as np
import collectives

comm = collectives.init(timeout=30)  # starting may take long on a loaded machine

def timed_out(call):
    try:
        call()
    except collectives.CollectiveTimeout as error:
        print(error, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # at once, and without a word of the launcher's
"""


@pytest.fixture
def said(run_job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> Callable[..., str]:
    """Runs a script of these lines on n ranks; what it prints."""

    def run(body: str, n: int = 2) -> str:
        path = tmp_path / "job.py"
        path.write_text(HEAD + textwrap.dedent(body))
        done = run_job([sys.executable, "-m", "launcher", "-n", str(n), str(path)], timeout=40)
        assert done.returncode == 137, done.stderr
        return re.sub(r"(?m)^\d: ", "", done.stdout)

    return run


@pytest.mark.mpi
def test_a_rank_of_a_part_of_the_world_is_found_by_its_place_there(said: Callable[..., str]) -> None:
    text = said(
        """
        part = comm.split(0 if comm.rank > 0 else None)
        if comm.rank == 0:
            time.sleep(60)
        part.timeout = 1
        if comm.rank == 2:
            print("late:", os.getpid(), flush=True)
            time.sleep(60)
        timed_out(part.barrier)
        """,
        n=3,
    )
    late = re.search(r"late: (\d+)", text)
    assert late is not None
    assert "rank 0: barrier #0 (job.py:" in text
    assert f"Rank 1 has not arrived:\n  rank 1 (pid {late[1]}): last call split #0 (job.py:" in text


@pytest.mark.mpi
@pytest.mark.parametrize("call", ["comm.all_reduce(np.ones(2), async_op=True).wait()", "comm.recv(1)"])
def test_a_call_of_any_kind_says_where_the_late_rank_stands_and_is_recorded_as_failed(
    said: Callable[..., str], call: str
) -> None:
    text = said(
        f"""
        from collectives.flight.recorder import process_recorder
        from collectives.flight.reader import FlightReader
        from collectives.flight.report import read
        comm.timeout = 1
        if comm.rank == 1:
            time.sleep(60)
        try:
            {call}
        except collectives.CollectiveTimeout as error:
            print(error, flush=True)
            print(read(FlightReader(process_recorder().peek)).calls[-1].state, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert "\n  rank 1 (pid " in text
    assert "): no call yet; its Python stood at job.py:" in text
    assert "failed" in text
