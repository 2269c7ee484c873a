"""Point to point when the other rank is late, gone, or elsewhere; what a message looks like; who is in a split."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import CollectiveTimeout, Communicator, PeerLeft, run_threads
from collectives.engine import array_header as header
from collectives.transport import EAGER_LIMIT
from tests.conftest import Run

SIZES = [3, 40_000]  # one travels in its message, one behind it


@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_that_left_without_sending_is_named_at_once(async_op: bool) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            assert comm.recv(1) == 7  # what was sent before it left still arrives
            start = time.monotonic()
            named = r"rank 1 has left .* rank 0 waits in recv #1 .* from 1 tag 0"
            with pytest.raises(PeerLeft, match=named):
                comm.recv(1, async_op=True).wait() if async_op else comm.recv(1)
            assert time.monotonic() - start < 10  # not the time limit
            with pytest.raises(PeerLeft):  # broken, as after a collective
                comm.send(np.ones(1), 0)
        else:
            comm.send(np.int64(7), 0)

    run_threads(check, size=2)


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_a_rank_that_has_left_arrives(size: int) -> None:
    gone: list[int] = []

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            if size == SIZES[0]:
                while not gone:
                    time.sleep(0.001)
                time.sleep(0.2)  # it has said goodbye by now
            else:
                time.sleep(0.3)  # it waits for us with its goodbye
            assert_array_equal(comm.recv(1, tag=5), np.ones(size))
        else:
            comm.send(np.ones(size), 0, tag=5, async_op=True)
            gone.append(1)

    run_threads(check, size=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda comm: comm.send(np.ones(40_000), 1, tag=3),
            r"rank 1 has left .* rank 0 waits in send #0 .* to 1 tag 3 float64 \(40000,\)",
        ),
        (lambda comm: comm.create_group([0, 2]), "rank 2 has left .* waits in create_group .* ranks 0, 2"),
    ],
    ids=["send", "create_group"],
)
def test_a_rank_that_left_without_its_part_is_named(call: Callable[[Communicator], object], words: str) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(PeerLeft, match=words):
                call(comm)

    run_threads(check, size=3)


def test_a_receive_from_any_source_ends_when_every_other_rank_has_left() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            assert sorted(comm.recv(None)[1] for _ in range(2)) == [1, 2]
            named = r"ranks 1-2 have left .* while rank 0 waits in recv #2 .* from any rank tag 0"
            with pytest.raises(PeerLeft, match=named):
                comm.recv(None)
        else:
            time.sleep(0.2 * comm.rank)  # one has left long before the other sends
            comm.send(np.ones(1), 0)

    run_threads(check, size=3)


def test_a_rank_of_a_split_that_left_is_named_by_its_number_there() -> None:
    def check(comm: Communicator) -> None:
        part = comm.split(0 if comm.rank else 1)
        assert part is not None
        if comm.rank == 1:
            with pytest.raises(PeerLeft, match="rank 1 has left"):
                part.barrier()

    run_threads(check, size=3)


def test_what_nobody_sends_ends_with_the_time_limit() -> None:
    over = threading.Event()

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.timeout = 0.2
            with pytest.raises(CollectiveTimeout, match="Rank 1 has not made the call that it answers"):
                comm.recv(1)
            over.set()
        else:
            over.wait(20)

    run_threads(check, size=2)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1,) * 32, (EAGER_LIMIT // 8 - 8,), (EAGER_LIMIT // 8 - 7,)])
def test_a_message_says_what_follows(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 2.5)
    encoded, rendezvous_tag = header.encode_eager(array, 2**31 - 1, 99)
    message = header.decode_eager(3, encoded)
    assert message[:5] == (3, 2**31 - 1, rendezvous_tag, array.dtype, shape)
    assert rendezvous_tag == (99 if array.nbytes > EAGER_LIMIT - 64 else 0)
    if not rendezvous_tag:
        assert_array_equal(message.body.view(np.float64).reshape(shape), array)


GROUP = """
import sys, time
import collectives

comm = collectives.init("mpi", timeout=60)
comm.timeout = 1.0
if comm.rank != 1:
    try:
        comm.create_group([0, 1])
    except collectives.CollectiveTimeout as error:
        print(error)
time.sleep(2)
"""


@pytest.mark.mpi
def test_a_group_that_not_all_members_make_names_the_missing_and_lets_ranks_leave(
    run_script: Run,
) -> None:
    done = run_script(GROUP)
    assert done.returncode == 0, done.stderr
    assert "Rank 1 has not made the call that it answers" in done.stdout
