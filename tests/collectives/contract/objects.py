"""What every backend owes of Python objects."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from tests.collectives.contract.run import Run


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("inside")


class ObjectsContract:
    """broadcast_object, gather_object, all_gather_object, scatter_object."""

    @pytest.mark.parametrize("async_op", [False, True])
    def test_objects_of_all_kinds_and_sizes(self, run: Run, async_op: bool) -> None:
        def of(rank: int) -> Any:
            return [None, {"loss": 1.5, "rank": rank}, "x" * (10_000 * rank), np.arange(rank)][rank % 4]

        def same(a: Any, b: Any) -> bool:
            return pickle.dumps(a) == pickle.dumps(b)

        def check(comm: Communicator) -> None:
            def get(result: Any) -> Any:
                return result.wait() if async_op else result

            everyones = [of(rank) for rank in range(comm.size)]
            for root in (0, comm.size - 1):
                mine = of(comm.rank)
                got = get(comm.broadcast_object(mine if comm.rank == root else "ignored", root, async_op=async_op))
                assert same(got, everyones[root])
                assert comm.rank != root or got is mine
                gathered = get(comm.gather_object(mine, root, async_op=async_op))
                assert gathered is None if comm.rank != root else same(gathered, everyones)
                given = everyones if comm.rank == root else None
                assert same(get(comm.scatter_object(given, root, async_op=async_op)), mine)
            assert same(get(comm.all_gather_object(of(comm.rank), async_op=async_op)), everyones)

        run(check)

    def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            bad = comm.size - 1
            mine = (lambda: 0) if comm.rank == bad else "good"
            refused = pytest.raises(collectives.ArgumentError, match=f"not that of rank {bad}: .*lambda")
            with refused:
                comm.broadcast_object(mine, bad)
            with refused:
                comm.all_gather_object(mine)
            with refused if comm.rank in (0, bad) else contextlib.nullcontext():
                comm.gather_object(mine, 0)
            with refused:
                comm.scatter_object([0] * (comm.size - 1) + [mine] if comm.rank == bad else None, bad)
            assert comm.all_gather_object(comm.rank) == list(range(comm.size))

        run(check)

    def test_an_object_that_cannot_be_unpickled_leaves_the_communicator_usable(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            with pytest.raises(collectives.ArgumentError, match="the object of rank 0 cannot be unpickled here: Zero"):
                comm.all_gather_object(Unreadable() if comm.rank == 0 else 1)
            assert comm.broadcast_object("next") == "next"

        run(check)

    def test_roots_and_lists_that_do_not_fit(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for call in (comm.broadcast_object, comm.gather_object, comm.scatter_object):
                with pytest.raises(collectives.ArgumentError, match="root should be a rank"):
                    call([0], comm.size)
            for wrong in ([0] * (comm.size + 1), None, 7):
                with pytest.raises(collectives.ArgumentError, match=f"objects should be a list of {comm.size}"):
                    comm.scatter_object(wrong, comm.rank)  # type: ignore[arg-type]  # what is refused

        run(check)
