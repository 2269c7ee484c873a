"""A process that works for a rank and is none: it knows its place, and makes no calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives._apart import ApartTransport, Place, passed_on, place
from collectives.world import World
from tests.conftest import ROOT

WHERE = Place(rank=3, size=8, local_rank=1, local_size=2, node=1)
X = np.ones(4)

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "all_reduce, later": lambda comm: comm.all_reduce(X, async_op=True).wait(),
    "reduce": lambda comm: comm.reduce(X, "sum", 0),
    "broadcast": lambda comm: comm.broadcast(X.copy(), 0),
    "gather": lambda comm: comm.gather(X, 0),
    "scatter": lambda comm: comm.scatter(X, 3),
    "all_gather": lambda comm: comm.all_gather(X),
    "all_to_all": lambda comm: comm.all_to_all(np.ones(8)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(8), "sum"),
    "send": lambda comm: comm.send(X, 0),
    "recv": lambda comm: comm.recv(0),
    "barrier": lambda comm: comm.barrier(),
    "broadcast_object": lambda comm: comm.broadcast_object(1, 3),
    "gather_object": lambda comm: comm.gather_object(1, 0),
    "all_gather_object": lambda comm: comm.all_gather_object(1),
    "scatter_object": lambda comm: comm.scatter_object(None, 0),
    "empty": lambda comm: comm.empty(4),
    "duplicate": lambda comm: comm.duplicate(),
    "split": lambda comm: comm.split(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_makes_no_calls(name: str) -> None:
    comm = Communicator(ApartTransport(WHERE), timeout=5.0)
    with pytest.raises(collectives.WorldError, match="works for rank 3 of 8 and is no rank"):
        CALLS[name](comm)


def test_it_knows_its_place() -> None:
    comm = Communicator(ApartTransport(WHERE), timeout=5.0)
    assert place(passed_on(comm, None)) == WHERE
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node) == WHERE
    assert passed_on(None, None) == {}
    assert place({}) is None


def test_before_it_has_joined_the_others_it_knows_what_was_promised() -> None:
    promised = World("slurm", 3, 8, 1, None)
    assert place(passed_on(None, promised)) == (3, 8, 1, 1, 0)


def test_init_gives_it_that() -> None:
    code = "import collectives; comm = collectives.init(); print(comm.rank, comm.size, comm.backend)"
    environ = passed_on(Communicator(ApartTransport(WHERE), timeout=5.0), None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["3", "8", "single"], done.stderr
