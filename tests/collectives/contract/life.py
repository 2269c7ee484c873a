"""What every backend owes of communicators themselves: order of calls, duplicates, splits, ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from collectives import ArgumentError, CollectivesError, Communicator, CommunicatorClosed, Work
from tests.collectives.contract.run import assert_usable, on_every_rank


class LifeContract:
    """duplicate, split, close, barrier, asynchronous calls."""

    @on_every_rank
    def test_asynchronous_calls_complete_in_order_and_mix_with_synchronous_ones(self, comm: Communicator) -> None:
        works = [comm.all_reduce(np.full(1000, i), async_op=True) for i in range(20)]
        assert_usable(comm)
        assert all(work.done() for work in works)  # a synchronous call comes after what was queued
        for i, work in enumerate(works):
            assert (work.wait() == i * comm.size).all()
            assert work.wait() is work.wait()
        gathered = comm.all_gather(np.array([comm.rank]), async_op=True)
        assert comm.barrier(async_op=True).wait(timeout=20) is None
        assert gathered.wait().tolist() == list(range(comm.size))

    @on_every_rank
    def test_done_callbacks_are_called_once_each_in_their_order(self, comm: Communicator) -> None:
        called: list[object] = []
        all_called = threading.Event()
        work = comm.all_reduce(np.ones(1000), async_op=True)
        work.add_done_callback(lambda work: called.append(work.wait()[0]))
        work.add_done_callback(lambda work: called.append("second"))
        work.add_done_callback(lambda work: 1 / 0)  # is logged
        work.add_done_callback(lambda work: sys.exit(3))  # so is this
        work.add_done_callback(lambda work: all_called.set())
        assert all_called.wait(20)
        assert called == [comm.size, "second"]
        work.add_done_callback(lambda work: called.append("at once"))  # as it is complete
        assert called == [comm.size, "second", "at once"]
        with pytest.raises(ArgumentError, match="a done callback should be a function of one argument, is 7"):
            work.add_done_callback(7)  # type: ignore[arg-type]  # what is refused

    @on_every_rank
    def test_a_done_callback_may_start_calls_and_not_wait_for_them(self, comm: Communicator) -> None:
        outcome: Future[tuple[Work[object], int]] = Future()

        def start_next(_: Work[object]) -> None:
            begun = comm.queue.started
            following = comm.all_reduce(np.ones(1), async_op=True)
            for wait in (following.wait, comm.barrier):
                with pytest.raises(CollectivesError, match="is waited for in a done callback"):
                    wait()
            outcome.set_result((following, comm.queue.started - begun))

        go = threading.Event()
        gate = comm.all_reduce(np.ones(1), scale=lambda: float(go.wait(20)), async_op=True)
        gate.add_done_callback(start_next)  # before it is complete, so that the helper thread runs it
        go.set()
        following, started = outcome.result(20)
        assert started == 1  # what was refused is none: the others would wait for it
        assert following.wait() == comm.size
        assert_usable(comm)

    @on_every_rank
    def test_a_duplicate_is_a_world_of_its_own(self, comm: Communicator) -> None:
        twin = comm.duplicate()
        assert (twin.rank, twin.size) == (comm.rank, comm.size)
        assert twin.key.startswith(comm.key + ".")
        # The two are used in different order on different ranks.
        pair = (comm, twin) if comm.rank % 2 == 0 else (twin, comm)
        for each, work in [(each, each.all_reduce(np.array([len(each.key)]), async_op=True)) for each in pair]:
            assert work.wait() == len(each.key) * comm.size
        twin.close()
        with pytest.raises(CommunicatorClosed):
            twin.barrier()
        comm.barrier()

    @on_every_rank
    def test_closed_duplicates_are_given_back(self, comm: Communicator, count: Callable[[int, int], int]) -> None:
        for _ in range(count(2, 2100 if comm.size < 3 else 20)):  # an MPI has about 2,000
            comm.duplicate().close()
        twin = comm.duplicate()
        work = twin.all_reduce(np.ones(1), async_op=True)
        twin.close()  # what is under way is finished
        assert work.wait() == comm.size

    @on_every_rank
    def test_split_puts_ranks_of_one_color_together_in_the_order_of_their_keys(self, comm: Communicator) -> None:
        color = comm.rank % 2
        mates = [rank for rank in range(comm.size) if rank % 2 == color]
        for key, order in ((None, mates), (-comm.rank, mates[::-1]), (7, mates)):
            part = comm.split(color, key)
            assert part is not None
            assert (part.size, part.rank) == (len(order), order.index(comm.rank))
            assert part.all_gather_object(comm.rank) == order == list(part.ranks)
            assert (part.timeout, part.backend, part.registry) == (comm.timeout, comm.backend, comm.registry)
            if comm.local_size == comm.size:
                assert (part.local_rank, part.local_size, part.node) == (part.rank, part.size, 0)
            seats = part.all_gather_object((part.node, part.local_rank, part.local_size))
            taken = {(node, place) for node, place, _ in seats}
            assert taken == {(node, place) for node, _, n in seats for place in range(n)}
            # Parts have keys of their own, and all members of one the same.
            everyones = comm.all_gather_object((color, part.key))
            assert len(set(everyones)) == len(dict(everyones)) == len(set(dict(everyones).values()))
            assert part.key not in (comm.key, comm.duplicate().key)

    @on_every_rank
    def test_split_of_a_split_and_ranks_in_none(self, comm: Communicator) -> None:
        part = comm.split(None if comm.rank == 0 else 2**62)
        if comm.rank == 0:
            assert part is None
        else:
            assert part is not None
            assert part.all_reduce(np.ones(1)) == comm.size - 1
            inner = part.duplicate().split(part.rank)
            assert inner is not None
            assert inner.all_gather_object(comm.rank) == [comm.rank] == list(inner.ranks)
            inner.close()
        assert_usable(comm)
        assert comm.split(None) is None

    @on_every_rank
    def test_a_split_may_have_a_time_limit_of_its_own(self, comm: Communicator) -> None:
        part = comm.split(0, timeout=7)
        assert part is not None
        assert (part.timeout, part.duplicate().timeout) == (7, 7)
        assert part.all_reduce(np.ones(1)) == comm.size
        hasty = comm.split(0, timeout=0.1)
        assert hasty is not None
        time.sleep(0.5 if comm.rank == 0 else 0.0)
        hasty.barrier(timeout=20)

    @on_every_rank
    def test_a_group_is_made_by_its_members_alone(self, comm: Communicator) -> None:
        started = comm.queue.started
        members = list(range(comm.size))[::-1][: max(1, comm.size - 1)]  # all but rank 0, the last first
        if comm.rank in members:
            for _ in range(2):
                group = comm.create_group(members, timeout=13)
                assert (group.rank, group.size, group.timeout) == (members.index(comm.rank), len(members), 13)
                assert group.all_gather_object(comm.rank) == members == list(group.ranks)
                assert group.create_group([group.rank]).ranks == (comm.rank,)
                assert (group.all_reduce(np.ones(40_000)) == len(members)).all()
                assert set(group.all_gather_object(group.key)) == {group.key}
                group.close()
        assert comm.queue.started == started  # no collective of this communicator
        # Each rank is in two groups, and makes them in another order than its neighbours.
        pairs = [sorted({rank, (rank + 1) % comm.size}) for rank in (comm.rank, (comm.rank - 1) % comm.size)]
        works = {tuple(pair): comm.create_group(pair).all_gather_object(comm.rank) for pair in sorted(pairs)}
        assert works == {pair: list(pair) for pair in works}
        assert_usable(comm)

    @on_every_rank
    def test_threads_with_communicators_of_their_own_at_once(
        self, comm: Communicator, count: Callable[[int, int], int]
    ) -> None:
        def work(twin: Communicator) -> None:
            for step in range(count(5, 20)):
                for length in (10, 20_000):
                    call = twin.all_reduce(np.full(length, step), async_op=True)
                    assert (call.wait() == comm.size * step).all()
                    assert (twin.all_reduce(np.full(length, step)) == comm.size * step).all()

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work, twin) for twin in [comm.duplicate() for _ in range(3)]]
            for _ in range(count(5, 20)):
                assert comm.all_reduce(np.ones(3))[0] == comm.size
            for future in futures:
                future.result(30)

    @on_every_rank
    def test_communicators_are_closed_in_any_order_on_any_rank(
        self, comm: Communicator, count: Callable[[int, int], int]
    ) -> None:
        rng = np.random.default_rng(comm.rank)  # another order on each rank
        for _ in range(count(1, 10)):
            part = comm.split(comm.rank % 2)
            assert part is not None
            all_of_them = [comm.duplicate(), part, part.duplicate(), comm.duplicate()]
            works = [each.all_reduce(np.ones(100), async_op=True) for each in all_of_them]
            # A message under way, too: closing lets it arrive.
            works += [each.recv((each.rank - 1) % each.size, async_op=True) for each in all_of_them]
            for each in all_of_them:
                each.send(np.full(100, each.size), (each.rank + 1) % each.size)
            for i in rng.permutation(len(all_of_them)):
                all_of_them[i].close()
                all_of_them[i].close()
            for each, work in zip(all_of_them * 2, works, strict=True):
                assert (work.wait(timeout=20) == each.size).all()
                with pytest.raises(CommunicatorClosed):
                    each.send(np.ones(1), each.rank)
        assert_usable(comm)
