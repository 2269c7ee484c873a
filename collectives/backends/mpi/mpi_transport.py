"""Collectives by nonblocking MPI calls. Each is tested until it is complete, so a time limit can end every wait.

An MPI before 4.0 counts in C's int. For such an MPI, operations on more items are split: reductions and broadcasts into
pieces one after the other, everything else into sends and receives between the ranks.

Source of the operations: MPI 4.1, chapters 3 and 6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays import even_lengths
from collectives.backends.mpi.mpi_world import MPIWorld
from collectives.errors import TooManyCommunicators
from collectives.reduction import Array, ReduceOp
from collectives.time_limit import run_in_thread
from collectives.transport import (
    EAGER_LIMIT,
    EAGER_TAG,
    RENDEZVOUS_TAG,
    Epilogue,
    ExitNotice,
    Signature,
    Steps,
    Test,
    Transport,
    all_of,
    chunks,
    completed,
    notices_of,
    offsets,
    parts_of,
    then,
)

#: The largest count of an MPI before 4.0.
INT = 2**31 - 1

# A `reduce` of at least this many bytes runs as a reduce_scatter and a gather of the parts. MPICH's own reduce makes
# only a short step per test.
_SCATTER_FROM = 8 << 20

# The tag of the parts that collectives exchange by sends and receives. It is above the tags of eager messages and of
# the arrays that follow them. MPI guarantees only tags below this one, but MPICH and Open MPI allow far larger ones.
_PIECES = 2 * RENDEZVOUS_TAG

_THREAD = "collectives-split"

# Eager messages that MPI was still receiving when their communicator was closed, with the buffers that MPI writes.
_unfinished: list[Any] = []


def world_transport(membership: MPIWorld) -> MPITransport:
    """The transport of all ranks."""
    MPI = membership.MPI
    max_count = sys.maxsize if MPI.Get_version() >= (4, 0) else INT
    return MPITransport(MPI, membership.comm, membership, range(membership.size), "world", max_count)


class MPITransport(Transport):
    """The transport over one MPI communicator, which nothing else uses.

    members: for each rank, its rank in the world; max_count: the largest count and displacement that this MPI takes
    """

    name = "mpi"

    def __init__(
        self, MPI: Any, comm: Any, membership: MPIWorld, members: Sequence[int], key: str, max_count: int
    ) -> None:
        self._MPI = MPI
        self._comm = comm
        self._membership = membership
        self._members = members
        self.key = key
        self._max_count = max_count
        self._longest = max(max_count, EAGER_LIMIT)  # Eager messages must not be split.
        # Several collectives at once: while one waits for other ranks, the next one's data are under way
        # (benchmarks/torch_backend.py --rate 1gbit). Only one at once with the small `max_count` that tests set: it
        # splits collectives, and ranks would start the pieces of two collectives in different orders.
        self.in_flight = 4 if max_count >= INT else 1
        self.rank_info = membership.rank_info(members, members.index(membership.rank))
        self._status = MPI.Status()
        self._arriving: tuple[int, Array, Any] | None = None
        # For how many more calls the ranks compare signatures; None: for all, as on one node, where this costs little.
        self._checks = None if self.local_size == self.size else membership.checks

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        self._signatures = None
        if self._checks == 0:
            return completed
        if self._checks is not None:
            self._checks -= 1
        return super().exchange_signatures(signature)

    def pid(self, rank: int) -> int | None:
        return self._membership.pid(self._members[rank])

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Test:
        mpi_op = self._membership.op(op, out.dtype)
        in_place = self._MPI.IN_PLACE
        # In place on every rank: Open MPI crashes or hangs if only some ranks reduce in place. If x is not out, MPI
        # itself would begin with this copy.
        if x is not out:
            np.copyto(out, x)
        test = self._pieces(len(out), lambda a, b: self._comm.Iallreduce(in_place, out[a:b], mpi_op))
        return then(test, epilogue, out)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        if x.nbytes >= _SCATTER_FROM:
            return then(_one_by_one(self._reduce_by_scattering(x, out, op, root)), epilogue, out)
        mpi_op = self._membership.op(op, x.dtype)
        test = self._pieces(
            len(x), lambda a, b: self._comm.Ireduce(x[a:b], None if out is None else out[a:b], mpi_op, root)
        )
        return then(test, epilogue, out)

    def _reduce_by_scattering(self, x: Array, out: Array | None, op: ReduceOp, root: int) -> Iterator[Test]:
        counts = even_lengths(len(x), self.size)
        part = np.empty(counts[self.rank], x.dtype)
        yield self.reduce_scatter(x, part, counts, op)
        joined = None if out is None else out.view(np.uint8)
        yield self.gather(part.view(np.uint8), joined, [n * x.itemsize for n in counts], root)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
    ) -> Test:
        mpi_op = self._membership.op(op, x.dtype)
        if len(x) <= self._max_count:
            return then(self._comm.Ireduce_scatter(x, out, list(counts), mpi_op).Test, epilogue, out)
        return then(_one_by_one(self._reduce_to_each_rank(x, out, counts, mpi_op)), epilogue, out)

    def _reduce_to_each_rank(self, x: Array, out: Array, counts: Sequence[int], mpi_op: Any) -> Iterator[Test]:
        for rank, (start, count) in enumerate(zip(offsets(counts), counts, strict=True)):
            for a, b in chunks(count, self._max_count):
                part = out[a:b] if rank == self.rank else None
                yield self._comm.Ireduce(x[start + a : start + b], part, mpi_op, rank).Test

    def broadcast(self, x: Array, root: int) -> Test:
        return self._pieces(len(x), lambda a, b: self._comm.Ibcast([x[a:b], self._MPI.BYTE], root))

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        if sum(counts) <= self._max_count:
            return self._comm.Igatherv([x, self._MPI.BYTE], self._parts(out, counts), root).Test
        return self._exchange([(root, x)], [] if out is None else enumerate(parts_of(out, counts)))

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        if sum(counts) <= self._max_count:
            return self._comm.Iscatterv(self._parts(x, counts), [out, self._MPI.BYTE], root).Test
        return self._exchange([] if x is None else enumerate(parts_of(x, counts)), [(root, out)])

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        if sum(counts) <= self._max_count:
            return self._comm.Iallgatherv([x, self._MPI.BYTE], self._parts(out, counts)).Test
        return self._exchange([(rank, x) for rank in range(self.size)], enumerate(parts_of(out, counts)))

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        sends = table[self.rank]
        receives = [row[self.rank] for row in table]
        # Sends and receives are used for all sizes: MPICH's own all-to-all makes one step per test, and there are
        # pauses between tests.
        return self._exchange(enumerate(parts_of(x, sends)), enumerate(parts_of(out, receives)))

    def send(self, x: Array, dst: int, tag: int) -> Test:
        return self._message(self._comm.Isend, x, dst, tag)

    def recv(self, out: Array, src: int, tag: int) -> Test:
        return self._message(self._comm.Irecv, out, src, tag)

    def _message(self, start: Callable[..., Any], array: Array, peer: int, tag: int) -> Test:
        if len(array) <= self._longest:
            return start([array, self._MPI.BYTE], peer, tag).Test
        pieces = [array[a:b] for a, b in chunks(len(array), self._longest)]
        return all_of([start([piece, self._MPI.BYTE], peer, tag).Test for piece in pieces])

    def arrived(self) -> tuple[int, Array] | None:
        if self._arriving is None:
            MPI = self._MPI
            status = self._status
            message = self._comm.Improbe(MPI.ANY_SOURCE, EAGER_TAG, status)
            if message is None:
                return None
            buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._arriving = status.Get_source(), buffer, message.Irecv([buffer, MPI.BYTE])
        source, buffer, request = self._arriving
        if not request.Test():
            return None
        self._arriving = None
        return source, buffer

    def barrier(self) -> Test:
        return self._comm.Ibarrier().Test

    def group(self, members: Sequence[int], key: str, number: int) -> Steps[MPITransport]:
        # MPI_Comm_create_group blocks until all members call it. They are about to, so it takes microseconds. But it
        # runs in a thread of its own, so that the time limit still holds if a member is stopped in the meantime.
        all_members = self._comm.Get_group()
        chosen = all_members.Incl(list(members))
        tag = number % (self._MPI.COMM_WORLD.Get_attr(self._MPI.TAG_UB) + 1)
        created = run_in_thread(lambda: self._comm.Create_group(chosen, tag), _THREAD)
        yield created.done
        all_members.Free()
        chosen.Free()
        error = created.exception()
        if error is not None:
            raise self._no_room(error)
        world_ranks = [self._members[rank] for rank in members]
        return MPITransport(self._MPI, created.result(), self._membership, world_ranks, key, self._max_count)

    def _no_room(self, error: BaseException) -> TooManyCommunicators:
        reason = str(error).strip().rpartition("\n")[2]
        return TooManyCommunicators(
            f"rank {self.rank}: MPI cannot make another communicator ({reason}). It has room for some 2,000, and a "
            "duplicate or split takes one or two: close those that are not needed any more (comm.close())"
        )

    def close(self) -> None:
        if self._arriving is not None:
            _unfinished.append(self._arriving)
        if self.key != "world":
            # MPI_Comm_free is collective by the standard, but local in MPICH and Open MPI. It is needed because
            # MPICH has room for only about 2,000 communicators.
            self._comm.Free()

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return notices_of(self._members, self._membership.exit_notices())

    def _pieces(self, length: int, start: Callable[[int, int], Any]) -> Test:
        """Starts an operation on `length` items, which is split if MPI cannot count so many. Returns: its test"""
        if length <= self._max_count:
            return start(0, length).Test
        return _one_by_one(start(a, b).Test for a, b in chunks(length, self._max_count))

    def _parts(self, joined: Array | None, counts: Sequence[int]) -> Any:
        return None if joined is None else [joined, (list(counts), offsets(counts)), self._MPI.BYTE]

    def _exchange(self, sends: Iterable[tuple[int, Array]], receives: Iterable[tuple[int, Array]]) -> Test:
        """Sends parts to ranks and receives parts from ranks, both as (rank, part). Empty parts are not sent."""
        sent = dict(sends)
        received = dict(receives)
        if self.rank in sent:
            np.copyto(received.pop(self.rank), sent.pop(self.rank))
        tests = [self.recv(part, rank, _PIECES) for rank, part in received.items() if len(part)]
        tests += [self.send(part, rank, _PIECES) for rank, part in sent.items() if len(part)]
        return all_of(tests)


def _one_by_one(tests: Iterator[Test]) -> Test:
    """Starts the first operation now, and each later one when the previous one is complete. Returns: the test of all

    Running one at a time limits the memory that MPI takes.
    """
    current = next(tests)

    def test() -> bool:
        nonlocal current
        while current():
            following = next(tests, None)
            if following is None:
                return True
            current = following
        return False

    return test
