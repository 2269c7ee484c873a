"""Collectives over MPI: nonblocking calls only, each tested until complete, so that every wait can end (decision 10).

An MPI before 4.0 counts in C's int. What is longer goes in pieces there: reductions and broadcasts one piece after the
other, everything else by sends and receives between the ranks. Source of the operations: MPI 4.1, chapters 3 and 6.
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
    ExitNotice,
    Finish,
    Signature,
    Steps,
    Test,
    Transport,
    all_of,
    among,
    chunks,
    completed,
    offsets,
    parts_of,
    then,
)

#: MPI before 4.0 counts in C's int.
INT = 2**31 - 1

# Bytes from which every rank reduces a part and the root gathers these: MPICH's own way goes on by a short step a test.
_TOGETHER = 8 << 20

# Beyond the tags of `send` and `recv`, and beyond those that every MPI must have; the ones that need it have 2^31.
_PIECES = 2 * RENDEZVOUS_TAG

_THREAD = "collectives-split"

# Eager messages that MPI was still writing when their communicator was closed.
_unfinished: list[Any] = []


def world_transport(membership: MPIWorld) -> MPITransport:
    """The transport of all ranks."""
    MPI = membership.MPI
    limit = sys.maxsize if MPI.Get_version() >= (4, 0) else INT
    return MPITransport(MPI, membership.comm, membership, range(membership.size), "world", limit)


class MPITransport(Transport):
    """One MPI communicator of our own.

    members: the ranks of the world that are in it; limit: the largest count and displacement that this MPI takes
    """

    name = "mpi"

    def __init__(self, MPI: Any, comm: Any, membership: MPIWorld, members: Sequence[int], key: str, limit: int) -> None:
        self._MPI = MPI
        self._comm = comm
        self._membership = membership
        self._members = members
        self.key = key
        self._limit = limit
        self._longest = max(limit, EAGER_LIMIT)  # eager messages go in one piece
        self.placement = membership.placement(members, members.index(membership.rank))
        self._status = MPI.Status()
        self._arriving: tuple[int, Array, Any] | None = None
        # How many calls are still checked; None: all of them, which costs little where no wire is between the ranks.
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

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        ours, in_place = self._membership.op(op, out.dtype), self._MPI.IN_PLACE
        # In place on every rank: Open MPI crashes or hangs where only some say so. An MPI that is given two buffers
        # begins by the same copy.
        if x is not out:
            np.copyto(out, x)
        test = self._pieces(len(out), lambda a, b: self._comm.Iallreduce(in_place, out[a:b], ours))
        return then(test, finish, out)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        if x.nbytes >= _TOGETHER:
            return then(_in_turn(self._reduce_together(x, out, op, root)), finish, out)
        ours = self._membership.op(op, x.dtype)
        test = self._pieces(
            len(x), lambda a, b: self._comm.Ireduce(x[a:b], None if out is None else out[a:b], ours, root)
        )
        return then(test, finish, out)

    def _reduce_together(self, x: Array, out: Array | None, op: ReduceOp, root: int) -> Iterator[Test]:
        counts = even_lengths(len(x), self.size)
        part = np.empty(counts[self.rank], x.dtype)
        yield self.reduce_scatter(x, part, counts, op)
        whole = None if out is None else out.view(np.uint8)
        yield self.gather(part.view(np.uint8), whole, [n * x.itemsize for n in counts], root)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        ours = self._membership.op(op, x.dtype)
        if len(x) <= self._limit:
            return then(self._comm.Ireduce_scatter(x, out, list(counts), ours).Test, finish, out)
        test = _in_turn(
            self._comm.Ireduce(x[start + a : start + b], out[a:b] if rank == self.rank else None, ours, rank).Test
            for rank, (start, count) in enumerate(zip(offsets(counts), counts, strict=True))
            for a, b in chunks(count, self._limit)
        )
        return then(test, finish, out)

    def broadcast(self, x: Array, root: int) -> Test:
        return self._pieces(len(x), lambda a, b: self._comm.Ibcast([x[a:b], self._MPI.BYTE], root))

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        if sum(counts) <= self._limit:
            return self._comm.Igatherv([x, self._MPI.BYTE], self._parts(out, counts), root).Test
        return self._exchange([(root, x)], [] if out is None else enumerate(parts_of(out, counts)))

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        if sum(counts) <= self._limit:
            return self._comm.Iscatterv(self._parts(x, counts), [out, self._MPI.BYTE], root).Test
        return self._exchange([] if x is None else enumerate(parts_of(x, counts)), [(root, out)])

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        if sum(counts) <= self._limit:
            return self._comm.Iallgatherv([x, self._MPI.BYTE], self._parts(out, counts)).Test
        return self._exchange([(rank, x) for rank in range(self.size)], enumerate(parts_of(out, counts)))

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        sends, receives = table[self.rank], [row[self.rank] for row in table]
        # In pairs whatever the length: MPICH's own way takes one step a test, and waits here test with pauses between.
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
            MPI, status = self._MPI, self._status
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
        # MPI has no nonblocking way. All members are here, so it takes microseconds; but one that is stopped in these
        # must not take the others' time limit away, so a thread of its own waits for it.
        everyone = self._comm.Get_group()
        chosen = everyone.Incl(list(members))
        tag = number % (self._MPI.COMM_WORLD.Get_attr(self._MPI.TAG_UB) + 1)
        made = run_in_thread(lambda: self._comm.Create_group(chosen, tag), _THREAD)
        yield made.done
        everyone.Free()
        chosen.Free()
        error = made.exception()
        if error is not None:
            raise self._no_room(error)
        of_world = [self._members[rank] for rank in members]
        return MPITransport(self._MPI, made.result(), self._membership, of_world, key, self._limit)

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
            # Collective by the standard, local in MPICH and Open MPI; an MPI has about 2,000 of these in all.
            self._comm.Free()

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return among(self._members, self._membership.exit_notices())

    def _pieces(self, length: int, start: Callable[[int, int], Any]) -> Test:
        """The test of an operation on `length` items, in pieces where MPI counts no further, one after the other."""
        if length <= self._limit:
            return start(0, length).Test
        return _in_turn(start(a, b).Test for a, b in chunks(length, self._limit))

    def _parts(self, whole: Array | None, counts: Sequence[int]) -> Any:
        return None if whole is None else [whole, (list(counts), offsets(counts)), self._MPI.BYTE]

    def _exchange(self, sends: Iterable[tuple[int, Array]], receives: Iterable[tuple[int, Array]]) -> Test:
        """Each rank with what goes to it, and with what comes from it; empty parts are not sent."""
        sent, received = dict(sends), dict(receives)
        if self.rank in sent:
            np.copyto(received.pop(self.rank), sent.pop(self.rank))
        tests = [self.recv(part, rank, _PIECES) for rank, part in received.items() if len(part)]
        tests += [self.send(part, rank, _PIECES) for rank, part in sent.items() if len(part)]
        return all_of(tests)


def _in_turn(started: Iterator[Test]) -> Test:
    """Each is started when its predecessor is complete, which bounds what the MPI must keep for them."""
    now = next(started)

    def test() -> bool:
        nonlocal now
        while now():
            following = next(started, None)
            if following is None:
                return True
            now = following
        return False

    return test
