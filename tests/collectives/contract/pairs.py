"""What every backend owes of send and recv. Ranks stand in a ring, so that a world of one sends to itself."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import ArgumentError, Communicator
from tests.collectives.contract.run import assert_usable, on_every_rank

SIZES = [3, 40_000]  # one travels in its eager message, one after it


def neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


class PairsContract:
    """send, recv."""

    @pytest.mark.parametrize("size", SIZES)
    @on_every_rank
    def test_messages_of_one_tag_arrive_in_order_and_tags_do_not_mix(self, comm: Communicator, size: int) -> None:
        before, after = neighbours(comm)
        sends = [comm.send(np.full(size + i % 2, i), after, tag=i % 3, async_op=True) for i in range(9)]
        comm.barrier()  # collectives take no notice of what is under way
        order = [2, 5, 1, 4, 0, 8, 3, 7, 6]
        receives = {i: comm.recv(before, tag=i % 3, async_op=True) for i in order[:5]}
        for i in order[5:]:
            assert_array_equal(comm.recv(before, tag=i % 3), np.full(size + i % 2, i))
        for i, work in receives.items():
            assert_array_equal(work.wait(), np.full(size + i % 2, i))
        for work in sends:
            work.wait()

    @pytest.mark.parametrize("size", SIZES)
    @on_every_rank
    def test_a_receive_from_any_source_says_who_sent(self, comm: Communicator, size: int) -> None:
        # Rank 0 hears from every rank, itself among them, in whatever order; a receive that names its source, and
        # one of another tag, take nothing from the others.
        works = [comm.send(np.full(size, i), 0, tag=i, async_op=True) for i in range(2)]
        if comm.rank == 0:
            last = comm.size - 1
            assert_array_equal(comm.recv(last), np.zeros(size))
            out = np.empty(size, int)
            received = [comm.recv(None, tag=1, out=out)]
            assert received[0][0] is out
            received += [work.wait() for work in [comm.recv(None, tag=1, async_op=True) for _ in range(last)]]
            for got, _ in received:
                assert_array_equal(got, np.ones(size))
            assert sorted(src for _, src in received) == list(range(comm.size))
            assert sorted(comm.recv(None)[1] for _ in range(last)) == list(range(last))
        for work in works:
            work.wait()
        comm.barrier()  # what comes later would be received above

    @pytest.mark.parametrize("size", SIZES)
    @on_every_rank
    def test_tags_are_any_number_of_31_bits(self, comm: Communicator, size: int) -> None:
        before, after = neighbours(comm)
        tags = [0, 2**14, 2**20 + 1, np.int64(2**31 - 1)]
        works = [comm.send(np.full(size, float(tag)), after, tag=tag, async_op=True) for tag in tags]
        for tag in reversed(tags):
            assert comm.recv(before, tag=tag)[-1] == tag
        for work in works:
            work.wait()

    @pytest.mark.parametrize("size", SIZES)
    @on_every_rank
    def test_done_callbacks_of_sends_and_receives(self, comm: Communicator, size: int) -> None:
        before, after = neighbours(comm)
        arrived = threading.Event()
        receive = comm.recv(before, async_op=True)
        receive.add_done_callback(lambda work: arrived.set())
        send = comm.send(np.full(size, comm.rank), after, async_op=True)
        assert arrived.wait(20)  # without a thread in wait()
        assert_array_equal(receive.wait(), np.full(size, before))
        send.wait()
        called = []
        send.add_done_callback(called.append)
        assert called == [send]

    @pytest.mark.parametrize("size", SIZES)
    @on_every_rank
    def test_a_receive_that_nobody_waits_for_ends_once_it_is_asked_for(self, comm: Communicator, size: int) -> None:
        before, after = neighbours(comm)
        out = np.zeros(size)
        receive = comm.recv(before, out=out, async_op=True)
        send = comm.send(np.full(size, 5.0), after, async_op=True)
        limit = time.monotonic() + 20
        while not (receive.done() and send.done()):
            assert time.monotonic() < limit
            time.sleep(1e-3)
        assert_array_equal(out, np.full(size, 5.0))

    @on_every_rank
    def test_what_is_sent_to_oneself_is_copied(self, comm: Communicator) -> None:
        for size in SIZES:
            x = np.zeros(size)
            comm.send(x, comm.rank)
            x[:] = 1
            assert_array_equal(comm.recv(comm.rank), np.zeros(size))

    @on_every_rank
    def test_point_to_point_calls_do_not_count_as_collectives(self, comm: Communicator) -> None:
        started = comm.queue.started
        if comm.rank == 0:
            comm.send(np.ones(3), comm.size - 1)
        if comm.rank == comm.size - 1:
            comm.recv(0)
        assert comm.queue.started == started
        assert_usable(comm)

    @on_every_rank
    def test_an_out_that_does_not_fit_loses_the_message_alone(self, comm: Communicator) -> None:
        before, after = neighbours(comm)
        for size in SIZES:
            works = [comm.send(np.full(size, i), after, async_op=True) for i in range(2)]
            with pytest.raises(ArgumentError, match=rf"out should be int64 \({size},\), is float64"):
                comm.recv(before, out=np.empty(1))
            assert_array_equal(comm.recv(before), np.ones(size))
            for work in works:
                work.wait()
