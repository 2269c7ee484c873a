"""A process that works for a rank and is none: it knows its place, and makes no calls."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import ArgumentError, BackendError, Communicator, WorldError, backends, run_threads
from collectives.backends.single import DetachedTransport
from collectives.start import child_environment, inherited_rank_info, requested_backend
from collectives.transport import RankInfo
from collectives.world import World
from tests.conftest import ROOT, Run

WHERE = RankInfo(rank=3, size=8, local_rank=1, local_size=2, node=1)
HERE = Communicator(DetachedTransport(WHERE), timeout=5.0)
X = np.ones(4)

CALLS: list[Callable[[Communicator], Any]] = [
    lambda comm: comm.all_reduce(X),
    lambda comm: comm.all_reduce(X, async_op=True).wait(),
    lambda comm: comm.scatter(X, 3),
    lambda comm: comm.send(X, 0),
    lambda comm: comm.recv(0),
    lambda comm: comm.barrier(),
    lambda comm: comm.broadcast_object(1, 3),
    lambda comm: comm.empty(4),
    lambda comm: comm.duplicate(),
]


def test_it_makes_no_calls() -> None:
    for call in CALLS:
        comm = Communicator(DetachedTransport(WHERE), timeout=5.0)
        with pytest.raises(WorldError, match="works for rank 3 of 8 and is no rank"):
            call(comm)


def test_it_knows_its_place() -> None:
    assert inherited_rank_info(child_environment(HERE, None)) == WHERE
    assert (HERE.rank, HERE.size, HERE.local_rank, HERE.local_size, HERE.node) == WHERE
    assert child_environment(None, None) == {}
    assert inherited_rank_info({}) is None
    promised = World("slurm", 3, 8, 1, None)  # before the rank has joined the others
    assert inherited_rank_info(child_environment(None, promised)) == (3, 8, 1, 1, 0)


def test_init_gives_it_that(run_job: Run) -> None:
    code = "import collectives; comm = collectives.init(); print(comm.rank, comm.size, comm.backend)"
    done = run_job([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT), **child_environment(HERE, None)})
    assert done.stdout.split() == ["3", "8", "single"], done.stderr


def test_a_ranks_own_pid_makes_it_hold_for_what_that_rank_starts() -> None:
    engine = {"PMI_RANK": "3", "PMI_SIZE": "8"}
    for pid, environ, expected in (
        (os.getppid(), engine, WHERE),
        (os.getppid(), {}, None),  # without the engine's variables it is a world of its own
        (os.getpid(), engine, None),  # the rank itself
    ):
        assert inherited_rank_info({**child_environment(HERE, None, pid), **environ}) == expected


FORKING = """
import os, sys, time
import numpy as np
import collectives

comm = collectives.init(timeout=20)
comm.all_reduce(np.ones(1))
if comm.rank == 0:
    time.sleep(0.5)
work = comm.all_reduce(np.ones(1), async_op=True)
if comm.rank == 1 and os.fork() == 0:
    calls = [lambda: comm.all_reduce(np.ones(1)), lambda: comm.all_reduce(np.ones(1), async_op=True), comm.duplicate,
             lambda: comm.send(np.ones(1), 0), lambda: collectives.init().barrier(), work.wait]
    for call in calls:
        try:
            call()
        except collectives.WorldError as error:
            print(error)
    assert work.done() and (comm.rank, comm.size) == (1, 2)
    comm.close()
    sys.exit(3)  # with all exit handlers
if comm.rank == 1:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
assert work.wait() == 2
for _ in range(3):
    assert comm.all_reduce(np.ones(1)) == 2
"""


@pytest.mark.mpi
def test_a_forked_child_is_no_rank(run_script: Run) -> None:
    done = run_script(FORKING)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all("works for rank 1 of 2 and is no rank" in line for line in lines[:5])
    assert "all_reduce #1 (script.py:10) float64 (1,) goes on in process" in lines[5].replace(" sum", "")


def test_a_forked_child_of_a_world_of_one_goes_on(run_job: Run) -> None:
    code = (
        "import collectives, os, time, numpy as np\n"
        "comm, start = collectives.init(), time.monotonic()\n"
        "assert comm.all_reduce(np.ones(1), async_op=True).wait() == 1\n"
        "receives = [comm.recv(0, async_op=True, tag=tag) for tag in (7, 8)]\n"
        "comm.send(np.ones(1), 0, tag=8)\n"
        "assert receives[1].wait() == 1\n"
        "if os.fork() == 0:\n"
        "    assert comm.all_reduce(np.ones(1), async_op=True).wait(timeout=20) == 1\n"
        "    receive = comm.recv(0, async_op=True)\n"
        "    comm.send(np.ones(1), 0)\n"
        "    while not receive.done():\n"  # by the helper thread
        "        assert time.monotonic() < start + 20\n"
        "    assert receive.wait() == 1\n"
        "    raise SystemExit(5)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    run_job([sys.executable, "-c", code], out="5\n")


STARTING = """
import math, multiprocessing, subprocess, sys
import numpy as np
import collectives

comm = collectives.init("mpi", timeout=math.inf)  # a time limit may be infinite

def place(_):
    return collectives.init().rank, comm.size

if __name__ == "__main__":
    if comm.rank == 1:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(place, range(2)) == [(1, 2)] * 2
        code = "import collectives; collectives.init().barrier()"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1])
    assert comm.all_reduce(np.ones(1)) == 2
"""


@pytest.mark.mpi
def test_what_a_rank_starts_is_no_rank(run_script: Run) -> None:
    done = run_script(STARTING)
    assert done.returncode == 0, done.stderr
    assert "WorldError: this process works for rank 1 of 2 and is no rank" in done.stdout


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"DDP_BACKEND": "nccl"}, "nccl"),
        ("auto", {"DDP_BACKEND": "auto"}, "auto"),
        ("mpi", {"DDP_BACKEND": "nccl"}, "mpi"),  # the script knows what it wants
    ],
)
def test_the_launchers_backend_fills_what_the_script_leaves_open(
    backend: str, environ: dict[str, str], expected: str
) -> None:
    assert requested_backend(backend, environ) == expected
    with pytest.raises(BackendError, match=r"variable DDP_BACKEND should be one of auto, .*, is 'gloo'"):
        requested_backend("auto", {"DDP_BACKEND": "gloo"})


def test_a_backend_that_lacks_a_module_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        requested_backend("half", {})


def test_a_time_limit_may_be_infinite_and_must_be_above_zero() -> None:
    def check(comm: Communicator) -> float:
        assert comm.split(0, timeout=math.inf).timeout == comm.timeout
        assert comm.all_reduce(np.ones(1)) == comm.size
        return comm.timeout

    assert run_threads(check, 2, timeout=math.inf) == run_threads(check, 2, timeout=1e12)
    for timeout in (0, -1.0, math.nan, "60", None):
        for start in (functools.partial(run_threads, check, 2), collectives.init):
            with pytest.raises(ArgumentError, match="timeout should be seconds above 0, is"):
                start(timeout=timeout)
