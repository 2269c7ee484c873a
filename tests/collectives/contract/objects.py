"""What every backend owes of Python objects."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from collectives import ArgumentError, Communicator
from tests.collectives.contract.run import on_every_rank


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("inside")


class ObjectsContract:
    """broadcast_object, gather_object, all_gather_object, scatter_object."""

    @pytest.mark.parametrize("async_op", [False, True])
    @on_every_rank
    def test_objects_of_all_kinds_and_sizes(self, comm: Communicator, async_op: bool) -> None:
        def call(name: str, *args: Any) -> Any:
            result = getattr(comm, name)(*args, async_op=async_op)
            return result.wait() if async_op else result

        kinds = [None, {"loss": 1.5}, "x" * 30_000, np.arange(3)]
        everyones = [(rank, kinds[rank % 4]) for rank in range(comm.size)]
        mine = everyones[comm.rank]
        for root in (0, comm.size - 1):
            on_root = comm.rank == root
            got = call("broadcast_object", mine if on_root else "ignored", root)
            assert str(got) == str(everyones[root])
            assert got is mine or not on_root
            assert str(call("gather_object", mine, root)) == str(everyones if on_root else None)
            assert str(call("scatter_object", everyones if on_root else None, root)) == str(mine)
        assert str(call("all_gather_object", mine)) == str(everyones)

    @on_every_rank
    def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(self, comm: Communicator) -> None:
        bad = comm.size - 1
        mine = (lambda: 0) if comm.rank == bad else "good"
        refused = pytest.raises(ArgumentError, match=f"not that of rank {bad}: .*lambda")
        with refused:
            comm.broadcast_object(mine, bad)
        with refused:
            comm.all_gather_object(mine)
        with refused if comm.rank in (0, bad) else contextlib.nullcontext():
            comm.gather_object(mine, 0)
        with refused:
            comm.scatter_object([0] * (comm.size - 1) + [mine] if comm.rank == bad else None, bad)
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))

    @on_every_rank
    def test_an_object_that_cannot_be_unpickled_leaves_the_communicator_usable(self, comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="the object of rank 0 cannot be unpickled here: Zero"):
            comm.all_gather_object(Unreadable() if comm.rank == 0 else 1)
        assert comm.broadcast_object("next") == "next"
