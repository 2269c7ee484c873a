"""What a backend must be able to do: move and combine contiguous host arrays without ever blocking.

A transport knows nothing of dtypes' meaning, lengths, scales, queues or time limits: `Communicator` has those once for
all backends. Each method starts one collective and returns its `Test`; the caller keeps the arrays alive and unchanged
until that test answers True. All ranks call the same methods in the same order, except `send` and `recv`.

A leaving rank tells every other its exit status and how many calls it made on each communicator (`ExitNotice`). The
count is what makes the answer exact: a rank that took part in call #5 and left is no reason to give up call #5, which
may still be waiting for a slow rank; one that left before call #5 is.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from collectives.errors import TooManyCommunicators
from collectives.reduction import Array, ReduceOp
from collectives.world import STOPPED

#: The exit status of a rank that ended without a word: killed, or by os._exit.
LOST = -1


@dataclass(frozen=True, kw_only=True)
class ExitNotice:
    """What a rank says when it leaves. status: its exit status; calls: communicator → number of calls it made."""

    status: int
    calls: Mapping[str, int]

    @property
    def failed(self) -> bool:
        """True if this rank did not leave in order."""
        return not is_clean(self.status)

    def encode(self) -> bytes:
        """This notice as JSON. Communicators that differ by a number alone and made as many calls are one entry."""
        runs: list[list[Any]] = []  # [text before the number, text after it, first, last, calls]
        for before, after, number, count in sorted((*_numbered(key), count) for key, count in self.calls.items()):
            if runs and runs[-1] == [before, after, runs[-1][2], number - 1, count]:
                runs[-1][3] = number
            else:
                runs.append([before, after, number, number, count])
        return json.dumps([self.status, runs]).encode()

    @staticmethod
    def decode(message: bytes) -> ExitNotice:
        """The notice that `encode` wrote."""
        status, runs = json.loads(message)
        calls = {}
        for before, after, first, last, count in runs:
            for number in range(first, last + 1):
                calls[before if number < 0 else f"{before}{number}{after}"] = count
        return ExitNotice(status=status, calls=calls)


_NUMBER = re.compile(r"(.*\.)(0|[1-9]\d*)(.*)")


def _numbered(key: str) -> tuple[str, str, int]:
    """`_numbered("world.3:1") == ("world.", ":1", 3)`, `_numbered("world") == ("world", "", -1)`"""
    parts = _NUMBER.fullmatch(key)
    return (key, "", -1) if parts is None else (parts[1], parts[3], int(parts[2]))


def is_clean(status: int) -> bool:
    """True for the exit status of a rank that has done its work, or has stopped as it was asked to.

    >>> [is_clean(status) for status in (0, STOPPED, 1, 143)]
    [True, True, False, False]
    """
    return status in (0, STOPPED)


def left_before(exit_notices: Mapping[int, ExitNotice], communicator: str, number: int) -> list[int]:
    """The ranks that left before making call `number` (counted from 0) on that communicator, in rank order.

    A rank that failed counts whatever it made: it may have died with calls queued, and the job is lost anyway.
    """
    return sorted(
        rank for rank, left in exit_notices.items() if left.failed or left.calls.get(communicator, 0) <= number
    )


def among(members: Sequence[int], exit_notices: Mapping[int, ExitNotice]) -> dict[int, ExitNotice]:
    """The exit notices by rank in a communicator. members: the ranks of the world that are in it, in its order"""
    return {rank: exit_notices[member] for rank, member in enumerate(members) if member in exit_notices}


def describe_exits(exit_notices: Mapping[int, ExitNotice], ranks: list[int]) -> str:
    """`rank 1 has left (exit status 0)`, for one rank or several."""
    return " and ".join(f"rank {rank} has {_how(exit_notices[rank].status)}" for rank in ranks)


def _how(status: int) -> str:
    if status == LOST:
        return "ended without leaving (killed?)"
    if status == STOPPED:
        return f"stopped as asked (exit status {status})"
    return "left (exit status 0)" if status == 0 else f"failed (exit status {status})"


T = TypeVar("T")

#: Makes progress; True once the collective is complete on this rank; raises if it failed.
Test = Callable[[], bool]
#: A call's steps: yields the test of each operation, and returns the call's result.
Steps = Generator[Test, None, T]
#: Turns a reduction's total, or any part of it, into the result, in place.
Finish = Callable[[Array], None]

#: Bytes of the longest eager message, which is sent at once; longer messages may wait until they are received.
EAGER_LIMIT = 4096
#: The tag of eager messages, which `arrived` returns; the user's tag is part of the message.
EAGER_TAG = 0
#: Tags of the arrays that follow an eager message are from this one up to twice it.
RENDEZVOUS_TAG = 2**14

#: int64 words of a signature, as ranks exchange it.
WORDS = 16
#: What the words are. SEQUENCE is written last; IN and OUT are two words each: segment and offset of a shared array.
SEQUENCE, HASH, ROWS, NBYTES, PREFIX, IN, OUT = 0, 1, 2, 3, 4, 5, 7
#: The words of each rank's signature.
Signatures = Sequence[Sequence[int]]


class Signature(NamedTuple):
    """What one rank calls. digest: of what must be equal; rows: length along axis 0; nbytes: of its contribution."""

    digest: int
    rows: int = 0
    nbytes: int = 0


class Placement(NamedTuple):
    """A rank in a communicator, the same among the ranks of its node, and which node that is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


class Transport(ABC):
    """One rank's end of a communicator. Arrays are one-dimensional and C-contiguous.

    name: the backend's name; key: the same text on all ranks and different for each communicator of a world
    purpose: what this rank uses it for, in reports
    shares_memory: ranks of a node move arrays through shared memory
    combines_halves: reductions take floats of 16 bits, combine and finish them in float32, and round once
    combines_in_tree: reductions are carried out in the order of `reduction.tree` over ranks
    """

    name: str
    key: str
    purpose: str = ""
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    shares_memory = combines_halves = combines_in_tree = False
    _signatures: Array | None = None
    shared_arrays: Any = None  # of `comm.empty`, which duplicates have in common; `None` without shared memory

    @property
    def label(self) -> str:
        """The communicator as reports name it: `world.1 (DataParallel of Net)`."""
        return f"{self.key} ({self.purpose})" if self.purpose else self.key

    @property
    def placement(self) -> Placement:
        return Placement(self.rank, self.size, self.local_rank, self.local_size, self.node)

    @placement.setter
    def placement(self, value: Placement) -> None:
        self.rank, self.size, self.local_rank, self.local_size, self.node = value

    def inline_calls(
        self, plan: Any, steps: Callable[..., Steps[Any]], after_exchange: Callable[..., Steps[Any]]
    ) -> Any:
        """What carries out calls of this plan with the headers alone; None: they take the steps of any transport.

        steps: gives these; after_exchange: those from where ranks have shown each other their signatures
        """
        return None

    # Verification ----------------------------------------------------------------------------------------------------

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        """Shows the others this rank's signature of the next collective; complete when all have shown theirs.

        payload, out: what the next operation of this transport reads and writes, if anything, as it will be given there
        prefix: (n,) uint8, n the same on all ranks that give one: what `root_prefix` and `all_prefixes` hand out
        """
        self._signatures = np.zeros((self.size, WORDS), np.int64)
        mine = np.zeros(WORDS, np.int64)
        mine[HASH : HASH + len(signature)] = signature
        return self.all_prefixes(mine.view(np.uint8), self._signatures.view(np.uint8))

    def signatures(self) -> Signatures | None:
        """The signatures of all ranks; None if this call's were not exchanged."""
        return None if self._signatures is None else self._signatures.tolist()

    def verified_groups(self) -> Sequence[tuple[Transport, Sequence[int]]]:
        """The transports whose ranks compare their signatures, each with those ranks as this transport counts them."""
        return [(self, range(self.size))]

    def root_prefix(self, buffer: Array, root: int) -> Test:
        """buffer: (n,) uint8, written off the root with the root's prefix; on the root it is that prefix."""
        return self.broadcast(buffer, root)

    def all_prefixes(self, prefix: Array, buffer: Array) -> Test:
        """prefix: this rank's; buffer: (size, n) uint8, written with all ranks' prefixes."""
        return self.all_gather(prefix, buffer.reshape(-1), [prefix.nbytes] * self.size)

    def late(self) -> Sequence[int]:
        """The ranks for which this one waits, as far as that is known."""
        return []

    def pid(self, rank: int) -> int | None:
        """The process of a rank, None if it is on another node or not known."""
        return None

    @abstractmethod
    def exit_notices(self) -> Mapping[int, ExitNotice]:
        """The ranks of this communicator that are known to have left."""

    # Collectives -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        """x, out: (n,), same dtype; `x is out` reduces in place."""

    @abstractmethod
    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        """x: (n,); out: (n,) on the root, None elsewhere."""

    @abstractmethod
    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        """x: (sum(counts),); out: (counts[rank],), same dtype, in other memory."""

    @abstractmethod
    def broadcast(self, x: Array, root: int) -> Test:
        """x: (n,) uint8, read on the root, written elsewhere."""

    @abstractmethod
    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8 on the root, None elsewhere."""

    @abstractmethod
    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[rank],) uint8."""

    @abstractmethod
    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8."""

    @abstractmethod
    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        """x: (sum(table[rank]),) uint8; out: (...,) uint8; table[s][d]: how many bytes rank s sends to rank d."""

    @abstractmethod
    def barrier(self) -> Test:
        """Complete once every rank has started it."""

    # Point to point --------------------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, x: Array, dst: int, tag: int) -> Test:
        """x: (n,) uint8 to another rank; those of one tag arrive in order.

        tag: EAGER_TAG, or RENDEZVOUS_TAG <= tag < 2 * RENDEZVOUS_TAG
        """

    @abstractmethod
    def recv(self, out: Array, src: int, tag: int) -> Test:
        """out: (n,) uint8, as long as what the other rank sends under that tag, which is not EAGER_TAG."""

    @abstractmethod
    def arrived(self) -> tuple[int, Array] | None:
        """The next eager message that has arrived from any rank, with that rank; None: there is none now.

        Those of one rank come in the order in which it sent them. One thread at a time calls it.
        """

    # Life ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def group(self, members: Sequence[int], key: str, number: int) -> Steps[Transport]:
        """A transport of some or all of these ranks, in the order of `members`, whose calls never mix with this one's.

        The members alone call it, at about the same time.
        number: the same on all of them, and another one for each group that they may be making at once
        Raises: TooManyCommunicators, on this rank alone, if the backend has no room for it.
        """

    def empty(self, nbytes: int) -> Steps[Array | None]:
        """(nbytes,) uint8 in memory that the ranks of this node share; None if they share none. Collective."""
        yield from ()
        return None

    def close(self) -> None:
        """Frees what the backend holds for it; nothing is in flight, and other ranks may still use theirs."""
        return


class LayeredTransport(Transport):
    """A transport on top of an inner one of the same ranks, which does what is rare or needs no speed."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name, self.key, self.placement = inner.name, inner.key, inner.placement

    def pid(self, rank: int) -> int | None:
        return self._inner.pid(rank)

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return self._inner.exit_notices()

    def send(self, x: Array, dst: int, tag: int) -> Test:
        return self._inner.send(x, dst, tag)

    def recv(self, out: Array, src: int, tag: int) -> Test:
        return self._inner.recv(out, src, tag)

    def arrived(self) -> tuple[int, Array] | None:
        return self._inner.arrived()

    def group(self, members: Sequence[int], key: str, number: int) -> Steps[Transport]:
        return self._inner.group(members, key, number)

    def close(self) -> None:
        self._inner.close()


def gather_records(transport: Transport, record: Any, nbytes: int = 4096) -> Steps[list[Any]]:
    """Every rank's record, which JSON can hold in that many bytes, in rank order. Collective."""
    text = json.dumps(record, ensure_ascii=False).encode()
    assert len(text) <= nbytes, f"{len(text)} bytes"
    everyones = np.empty((transport.size, nbytes), np.uint8)
    mine = np.frombuffer(text.ljust(nbytes), np.uint8)
    yield transport.all_gather(mine, everyones.reshape(-1), [nbytes] * transport.size)
    return [json.loads(row.tobytes()) for row in everyones]


def make_group(transport: Transport, members: Sequence[int] | None, key: str, number: int) -> Steps[Transport | None]:
    """As `Transport.group`, and every rank calls it. members: None on a rank that is in no group

    Returns: this rank's transport, or None
    Raises: TooManyCommunicators on every rank if one of them has no room.
    """
    yield transport.barrier()  # before it takes all members
    made = failure = None
    if members is not None:
        try:
            made = yield from transport.group(members, key, number)
        except TooManyCommunicators as error:
            failure = error
    failures = yield from gather_records(transport, failure is not None, 16)
    if any(failures):
        if made is not None:
            made.close()
        raise failure or TooManyCommunicators(
            f"rank {transport.rank}: another rank cannot make another communicator: close those that are not needed "
            "any more (comm.close())"
        )
    return made


def completed() -> bool:
    """The test of an operation that is complete when it starts."""
    return True


def differ(signatures: Signatures) -> bool:
    """True if the ranks' signatures are not of the same call."""
    first = signatures[0][HASH]
    return any(signature[HASH] != first for signature in signatures)


def chunks(length: int, step: int) -> list[tuple[int, int]]:
    """`chunks(5, 2) == [(0, 2), (2, 4), (4, 5)]`"""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def then(test: Test, finish: Finish | None, total: Array | None) -> Test:
    """The test of an operation that is complete once `finish` has been applied to its total, too."""
    if finish is None or total is None:
        return test
    done = False

    def both() -> bool:
        nonlocal done
        if not done and test():
            done = True
            finish(total)
        return done

    return both


def all_of(tests: list[Test]) -> Test:
    """The test of operations that go on beside each other; none is asked again once it was complete."""

    def test() -> bool:
        tests[:] = [each for each in tests if not each()]
        return not tests

    return test


def parts_of(whole: Any, counts: Sequence[int]) -> list[Any]:
    """Each rank's part of a joined array, on the host or a GPU."""
    return [whole[start : start + count] for start, count in zip(offsets(counts), counts, strict=True)]


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each rank's part starts: `offsets([2, 0, 3]) == [0, 2, 2]`."""
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count
    return starts


def spans(ranks: Sequence[int]) -> str:
    """`spans([0, 1, 2, 5]) == "0-2, 5"`"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def name_ranks(ranks: Sequence[int]) -> str:
    """`name_ranks([1, 2, 5]) == "ranks 1-2, 5"`, `name_ranks([3]) == "rank 3"`"""
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
