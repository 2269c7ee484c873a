"""What every backend owes of communicators themselves: order of calls, duplicates, splits, ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import ArgumentError, Communicator, DtypeError
from tests.collectives.contract.run import Run


class LifeContract:
    """duplicate, split, close, barrier, asynchronous calls."""

    def test_asynchronous_calls_complete_in_order_and_mix_with_synchronous_ones(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            works = [comm.all_reduce(np.full(1000, i), async_op=True) for i in range(20)]
            now = comm.all_reduce(np.ones(3))
            assert_array_equal(now, np.full(3, comm.size))
            assert all(work.done() for work in works)  # a synchronous call comes after what was queued
            for i, work in enumerate(works):
                assert_array_equal(work.wait(), np.full(1000, i * comm.size))
                assert work.wait() is work.wait()
            gathered = comm.all_gather(np.array([comm.rank]), async_op=True)
            assert comm.barrier(async_op=True).wait(timeout=20) is None
            assert gathered.wait().tolist() == list(range(comm.size))

        run(check)

    def test_a_duplicate_is_a_world_of_its_own(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            twin = comm.duplicate()
            assert (twin.rank, twin.size, twin.key) == (
                comm.rank,
                comm.size,
                comm.key + "." + twin.key.rpartition(".")[2],
            )
            # The two are used in different order on different ranks.
            pair = (comm, twin) if comm.rank % 2 == 0 else (twin, comm)
            works = {each.key: each.all_reduce(np.array([len(each.key)]), async_op=True) for each in pair}
            assert {key: int(work.wait()[0]) for key, work in works.items()} == {
                key: len(key) * comm.size for key in works
            }
            twin.close()
            with pytest.raises(collectives.CommunicatorClosed):
                twin.barrier()
            comm.barrier()

        run(check)

    def test_closed_duplicates_are_given_back(self, run: Run, count: Callable[[int, int], int]) -> None:
        def check(comm: Communicator) -> None:
            for _ in range(count(20, 2100)):  # an MPI has about 2,000
                comm.duplicate().close()
            twin = comm.duplicate()
            work = twin.all_reduce(np.ones(1), async_op=True)
            twin.close()  # what is under way is finished
            assert work.wait() == comm.size

        run(check)

    def test_split_puts_ranks_of_one_color_together_in_the_order_of_their_keys(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            color = comm.rank % 2
            mates = [rank for rank in range(comm.size) if rank % 2 == color]
            for key, order in ((None, mates), (-comm.rank, mates[::-1]), (7, mates)):
                part = comm.split(color, key)
                assert part is not None
                assert (part.size, part.rank) == (len(order), order.index(comm.rank))
                assert part.all_gather_object(comm.rank) == order
                assert (part.timeout, part.backend, part.family) == (comm.timeout, comm.backend, comm.family)
                if comm.local_size == comm.size:
                    assert (part.local_rank, part.local_size, part.node) == (part.rank, part.size, 0)
                seats = part.all_gather_object((part.node, part.local_rank, part.local_size))
                taken = {(node, place) for node, place, _ in seats}
                assert taken == {(node, place) for node, _, n in seats for place in range(n)}
                everyones = comm.all_gather_object((color, part.key))
                assert len({key for c, key in everyones}) == len({c for c, key in everyones})
                assert len(set(everyones)) == len({c for c, key in everyones})
                assert part.key not in (comm.key, *(twin.key for twin in [comm.duplicate()]))

        run(check)

    def test_split_of_a_split_and_ranks_in_none(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            part = comm.split(None if comm.rank == 0 else 2**62)
            if comm.rank == 0:
                assert part is None
            else:
                assert part is not None
                assert part.all_reduce(np.ones(1)) == comm.size - 1
                inner = part.duplicate().split(part.rank)
                assert inner is not None
                assert inner.all_gather_object(comm.rank) == [comm.rank]
                inner.close()
            assert comm.all_reduce(np.ones(1)) == comm.size
            assert comm.split(None) is None

        run(check)

    def test_what_comm_empty_cannot_make(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for shape in (-1, 2.5, (2, -1), None):
                with pytest.raises(ArgumentError, match="shape should be lengths of at least 0"):
                    comm.empty(shape)  # type: ignore[arg-type]
            for dtype in ("nonsense", "U3", object):
                with pytest.raises(DtypeError):
                    comm.empty(2, dtype)

        run(check)

    def test_colors_and_keys_are_whole_numbers(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            with pytest.raises(collectives.ArgumentError, match="color should be a whole number of 64 bits or None"):
                comm.split("red")  # type: ignore[arg-type]  # what is refused
            with pytest.raises(collectives.ArgumentError, match="key should be a whole number"):
                comm.split(0, 2**63)

        run(check)

    def test_closed_splits_are_given_back(self, run: Run, count: Callable[[int, int], int]) -> None:
        def check(comm: Communicator) -> None:
            for _ in range(count(20, 2100)):  # an MPI has about 2,000
                part = comm.split(comm.rank % 2)
                assert part is not None
                part.close()

        run(check)

    def test_communicators_are_closed_in_any_order_on_any_rank(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            rng = np.random.default_rng(comm.rank)  # another order on each rank
            for _ in range(10):
                part = comm.split(comm.rank % 2)
                assert part is not None
                all_of_them = [comm.duplicate(), part, part.duplicate(), comm.duplicate()]
                works = [each.all_reduce(np.ones(100), async_op=True) for each in all_of_them]
                # A letter under way, too: closing lets it arrive.
                works += [each.recv((each.rank - 1) % each.size, async_op=True) for each in all_of_them]
                for each in all_of_them:
                    each.send(np.full(100, each.size), (each.rank + 1) % each.size)
                for i in rng.permutation(len(all_of_them)):
                    all_of_them[i].close()
                    all_of_them[i].close()
                for each, work in zip(all_of_them * 2, works, strict=True):
                    assert_array_equal(work.wait(timeout=20), np.full(100, each.size))
                    with pytest.raises(collectives.CommunicatorClosed):
                        each.send(np.ones(1), each.rank)
            assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)
