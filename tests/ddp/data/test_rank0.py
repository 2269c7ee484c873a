"""One rank before the others, however long it takes; what fails there is heard of everywhere."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import monitored_section
from collectives.communicator import Communicator
from ddp.data import rank0_first
from ddp.errors import PeerError
from tests.collectives.backends.shm.ranks import run_sharing


class Log:
    """What the ranks did, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: list[tuple[str, int]] = []

    def __call__(self, what: str, rank: int) -> None:
        with self._lock:
            self.entries.append((what, rank))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 0.2 s is told of several times."""
    monkeypatch.setattr(monitored_section, "INTERVAL", 0.05)


@pytest.mark.usefixtures("quick")
def test_rank_0_is_done_before_the_others_begin() -> None:
    log = Log()

    def body(comm: Communicator) -> None:
        for _ in range(2):
            with rank0_first():
                log("begins", comm.rank)
                time.sleep(0.2 if comm.rank == 0 else 0.0)
                log("ends", comm.rank)
            comm.barrier()

    collectives.run_threads(body, size=3)
    for turn in (log.entries[:6], log.entries[6:]):
        assert turn[:2] == [("begins", 0), ("ends", 0)]
        assert sorted(turn[2:]) == [(what, rank) for what in ("begins", "ends") for rank in (1, 2)]


def test_the_first_rank_of_every_node() -> None:
    nodes = [0, 0, 1, 1, 1]
    log = Log()

    def body(comm: Communicator) -> None:
        with rank0_first(comm, per_node=True):
            log("begins", comm.rank)
            time.sleep(0.05)
            log("ends", comm.rank)

    run_sharing(body, nodes)
    for node, leader in ((0, 0), (1, 2)):
        here = [entry for entry in log.entries if nodes[entry[1]] == node]
        assert here[:2] == [("begins", leader), ("ends", leader)]
        assert len(here) == 2 * nodes.count(node)


@pytest.mark.usefixtures("quick")
def test_what_fails_there_is_heard_of_by_all_and_the_body_is_not_run() -> None:
    ran = []

    def body(comm: Communicator) -> BaseException | None:
        caught = None
        try:
            with rank0_first():
                ran.append(comm.rank)
                time.sleep(0.2)
                raise FileNotFoundError("no such server")
        except (FileNotFoundError, PeerError) as error:
            caught = error
        assert comm.all_reduce(np.ones(1)).item() == comm.size  # the ranks can go on together
        return caught

    first, *others = collectives.run_threads(body, size=3)
    assert ran == [0]
    assert isinstance(first, FileNotFoundError)
    for error in others:
        assert isinstance(error, PeerError)
        assert "rank 0: FileNotFoundError: no such server" in str(error)


SCRIPT = """
import time
import collectives, ddp
comm = collectives.init(timeout=3)
with ddp.data.rank0_first():
    time.sleep(4.5 if comm.rank == 0 else 0)
    print(comm.rank, flush=True)
with ddp.data.rank0_first():
    if comm.rank == 0:
        time.sleep(1)
        raise OSError("the disk is full")
    print("never")
"""


@pytest.mark.mpi
def test_under_the_launcher_it_neither_times_out_nor_hangs(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    options = ["-n", "2", "--hang-timeout", "4"]
    done = run_job([sys.executable, "-m", "launcher", *options, str(tmp_path / "job.py")])
    assert sorted(re.findall(r"\w+$", done.stdout, re.M)) == ["0", "1"]  # two ranks' lines arrive in any order
    assert "nothing has moved" not in done.stderr
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].endswith("raised OSError: the disk is full"), done.stderr
