"""What every backend owes of communicators themselves: order of calls, duplicates, splits, ends."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import ArgumentError, CollectivesError, Communicator, Work
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

    def test_done_callbacks_are_called_once_each_in_their_order(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            called: list[object] = []
            all_called = threading.Event()

            def note(work: Work[object]) -> None:
                called.append((1, work.wait()[0]))  # type: ignore[index]  # an array
                called.append(2)

            work = comm.all_reduce(np.ones(1000), async_op=True)
            work.add_done_callback(note)
            work.add_done_callback(lambda work: 1 / 0)  # is logged
            work.add_done_callback(lambda work: sys.exit(3))  # so is this
            work.add_done_callback(lambda work: all_called.set())
            assert all_called.wait(20)
            assert called == [(1, comm.size), 2]
            work.add_done_callback(lambda work: called.append(3))  # at once, as it is complete
            assert called == [(1, comm.size), 2, 3]
            with pytest.raises(ArgumentError, match="a done callback should be a function of one argument, is 7"):
                work.add_done_callback(7)  # type: ignore[arg-type]  # what is refused

        run(check)

    def test_a_done_callback_may_start_calls_and_not_wait_for_them(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            started: queue.SimpleQueue[object] = queue.SimpleQueue()
            counts: queue.SimpleQueue[int] = queue.SimpleQueue()

            def start_next(work: Work[object]) -> None:
                begun = comm.queue.started
                following = comm.all_reduce(np.ones(1), async_op=True)
                for wait in (following.wait, comm.barrier):
                    try:
                        wait()
                    except CollectivesError as error:
                        started.put(error)
                counts.put(comm.queue.started - begun)
                started.put(following)

            go = threading.Event()
            gate = comm.all_reduce(np.ones(1), scale=lambda: float(go.wait(20)), async_op=True)
            gate.add_done_callback(start_next)  # before it is complete, so that the helper thread runs it
            go.set()
            for _ in range(2):
                error = started.get(timeout=20)
                assert "is waited for in a done callback" in str(error)
            following = started.get(timeout=20)
            assert isinstance(following, Work)
            assert counts.get(timeout=20) == 1  # what was refused is none: the others would wait for it
            assert following.wait() == comm.size
            assert comm.all_reduce(np.ones(1)) == comm.size

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
            for _ in range(count(5, 2100 if comm.size < 3 else 20)):  # an MPI has about 2,000
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
                assert part.all_gather_object(comm.rank) == order == list(part.ranks)
                assert (part.timeout, part.backend, part.registry) == (comm.timeout, comm.backend, comm.registry)
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
                assert inner.all_gather_object(comm.rank) == [comm.rank] == list(inner.ranks)
                inner.close()
            assert comm.all_reduce(np.ones(1)) == comm.size
            assert comm.split(None) is None

        run(check)

    def test_a_split_may_have_a_time_limit_of_its_own(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            part = comm.split(0, timeout=7)
            assert part is not None
            assert (part.timeout, part.duplicate().timeout) == (7, 7)
            assert part.all_reduce(np.ones(1)) == comm.size
            for wrong in (0, -1.0, float("nan"), "7"):
                with pytest.raises(ArgumentError, match="timeout should be seconds above 0, is"):
                    comm.split(0, timeout=wrong)  # type: ignore[arg-type]  # what is refused
            for colors in (("red", None), (0, 2**63)):
                with pytest.raises(ArgumentError, match="should be a whole number of 64 bits or None"):
                    comm.split(*colors)  # type: ignore[arg-type]  # what is refused
            comm.barrier()

        run(check)

    def test_a_group_is_made_by_its_members_alone(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            started = comm.queue.started
            members = list(range(comm.size))[::-1][: max(1, comm.size - 1)]  # all but rank 0, the last first
            if comm.rank in members:
                for _ in range(2):
                    group = comm.create_group(members, timeout=13)
                    assert (group.rank, group.size, group.timeout) == (members.index(comm.rank), len(members), 13)
                    assert group.all_gather_object(comm.rank) == members == list(group.ranks)
                    assert group.create_group([group.rank]).ranks == (comm.rank,)
                    assert_array_equal(group.all_reduce(np.ones(40_000)), np.full(40_000, len(members)))
                    assert len(set(group.all_gather_object(group.key))) == 1
                    group.close()
            assert comm.queue.started == started  # no collective of this communicator
            # Each rank is in two groups, and makes them in another order than its neighbours.
            pairs = [sorted({rank, (rank + 1) % comm.size}) for rank in (comm.rank, (comm.rank - 1) % comm.size)]
            works = {tuple(pair): comm.create_group(pair).all_gather_object(comm.rank) for pair in sorted(pairs)}
            assert works == {pair: list(pair) for pair in works}
            assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)

    def test_ranks_that_no_group_can_have(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for wrong in ([], [comm.rank, comm.rank], [other for other in range(comm.size) if other != comm.rank]):
                with pytest.raises(ArgumentError, match="ranks should name each member once, the calling rank among"):
                    comm.create_group(wrong)
            with pytest.raises(ArgumentError, match="ranks should hold ranks from 0 to"):
                comm.create_group([comm.rank, comm.size])
            with pytest.raises(ArgumentError, match="timeout should be seconds above 0"):
                comm.create_group([comm.rank], timeout=0)

        run(check)

    def test_what_comm_empty_cannot_make(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            for shape in (-1, 2.5, (2, -1), None):
                with pytest.raises(ArgumentError, match="shape should be lengths of at least 0"):
                    comm.empty(shape)  # type: ignore[arg-type]
            for dtype in ("nonsense", "U3", object):
                with pytest.raises(collectives.DtypeError):
                    comm.empty(2, dtype)

        run(check)

    def test_threads_with_communicators_of_their_own_at_once(self, run: Run) -> None:
        def check(comm: Communicator) -> None:
            def work(mine: Communicator, number: int) -> None:
                for step in range(20):
                    for length in (10, 20_000):
                        call = mine.all_reduce(np.full(length, number + step), async_op=step % 2 == 1)
                        total = call.wait() if step % 2 else call
                        assert (total == mine.size * (number + step)).all()
                    mine.barrier()

            twins = [comm.duplicate() for _ in range(3)]
            with ThreadPoolExecutor(len(twins)) as pool:
                futures = [pool.submit(work, twin, number) for number, twin in enumerate(twins)]
                for _ in range(20):
                    assert comm.all_reduce(np.ones(3))[0] == comm.size
                for future in futures:
                    future.result(30)

        run(check)

    def test_communicators_are_closed_in_any_order_on_any_rank(
        self, run: Run, count: Callable[[int, int], int]
    ) -> None:
        def check(comm: Communicator) -> None:
            rng = np.random.default_rng(comm.rank)  # another order on each rank
            for _ in range(count(3, 10)):
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
                    assert_array_equal(work.wait(timeout=20), np.full(100, each.size))
                    with pytest.raises(collectives.CommunicatorClosed):
                        each.send(np.ones(1), each.rank)
            assert comm.all_reduce(np.ones(1)) == comm.size

        run(check)
