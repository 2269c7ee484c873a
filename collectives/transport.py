"""What a backend must implement: moving and combining contiguous host arrays without ever blocking.

The meaning of dtypes, lengths and scales, the queue of calls and time limits are not the transport's concern:
`Communicator` handles them once for all backends. A method that moves arrays starts one operation and returns its
`Test`. The caller keeps the arrays alive and unchanged until that test returns True. All ranks call the methods of
collectives in the same order; `send`, `recv` and `arrived` may come in any order.

A rank that leaves sends every other rank its exit status and its number of calls on each communicator (`ExitNotice`).
With that count the others can tell whether to keep waiting, say in call #5. If the rank made call #5 before it left,
they keep waiting, since another, slow rank may be the reason for the wait. If it left before call #5, they give up.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from collectives.errors import TooManyCommunicators, ranks_with_verb
from collectives.reduction import Array, ReduceOp
from collectives.world import STOPPED

#: The exit status of a rank that ended without an exit notice: killed, or by os._exit.
LOST = -1


@dataclass(frozen=True, kw_only=True)
class ExitNotice:
    """What a rank sends when it leaves.

    status: its exit status
    calls: its number of calls by communicator, and of sends and receives by pair of ranks
    """

    status: int
    calls: Mapping[str, int]

    @property
    def failed(self) -> bool:
        """True if the rank failed: its status is neither 0 nor STOPPED."""
        return not is_clean(self.status)

    def encode(self) -> bytes:
        """This notice as JSON. It has one entry for keys with consecutive numbers, same other text and same count."""
        runs: list[list[Any]] = []  # [text before the number, text after it, first, last, calls]
        for head, tail, number, count in sorted((*_numbered(key), count) for key, count in self.calls.items()):
            if runs and runs[-1] == [head, tail, runs[-1][2], number - 1, count]:
                runs[-1][3] = number
            else:
                runs.append([head, tail, number, number, count])
        return json.dumps([self.status, runs]).encode()

    @staticmethod
    def decode(message: bytes) -> ExitNotice:
        """The notice that `encode` wrote as JSON."""
        status, runs = json.loads(message)
        calls = {}
        for head, tail, first, last, count in runs:
            for number in range(first, last + 1):
                calls[head if number < 0 else f"{head}{number}{tail}"] = count
        return ExitNotice(status=status, calls=calls)


_NUMBER = re.compile(r"(.*\.)(0|[1-9]\d*)(.*)")


def _numbered(key: str) -> tuple[str, str, int]:
    """Splits a key around the last number that follows a dot. Returns: text before it, text after it, number or -1.

    `_numbered("world.3:1") == ("world.", ":1", 3)`, `_numbered("world") == ("world", "", -1)`
    """
    parts = _NUMBER.fullmatch(key)
    return (key, "", -1) if parts is None else (parts[1], parts[3], int(parts[2]))


def is_clean(status: int) -> bool:
    """True for the exit status of a rank that has finished its work, or has stopped on request.

    >>> [is_clean(status) for status in (0, STOPPED, 1, 143)]
    [True, True, False, False]
    """
    return status in (0, STOPPED)


def left_before(exit_notices: Mapping[int, ExitNotice], communicator: str, number: int) -> list[int]:
    """The ranks that left before making call `number` (counted from 0) on that communicator, in rank order.

    A rank that failed always counts: it may have died with calls queued, and the job is lost anyway.
    """
    return sorted(
        rank for rank, notice in exit_notices.items() if notice.failed or notice.calls.get(communicator, 0) <= number
    )


def notices_of(members: Sequence[int], exit_notices: Mapping[int, ExitNotice]) -> dict[int, ExitNotice]:
    """The exit notices of a communicator's members, by their rank in it.

    members: for each rank of the communicator, its rank in the world
    """
    return {rank: exit_notices[member] for rank, member in enumerate(members) if member in exit_notices}


def describe_exits(exit_notices: Mapping[int, ExitNotice], ranks: Sequence[int]) -> str:
    """How ranks have left: `"rank 0 has failed (exit status 1) and ranks 1-2 have left (exit status 0)"`."""
    by_status: dict[int, list[int]] = {}
    for rank in ranks:
        by_status.setdefault(exit_notices[rank].status, []).append(rank)
    return " and ".join(
        f"{ranks_with_verb(group, 'has', 'have')} {_describe_status(status)}" for status, group in by_status.items()
    )


def _describe_status(status: int) -> str:
    if status == LOST:
        return "ended without leaving (killed?)"
    if status == STOPPED:
        return f"stopped as asked (exit status {status})"
    if status == 0:
        return "left (exit status 0)"
    return f"failed (exit status {status})"


T = TypeVar("T")

#: Makes progress; returns True once the collective is complete on this rank; raises if it failed.
Test = Callable[[], bool]
#: The steps of a call: yields the test of each operation, and returns the call's result.
Steps = Generator[Test, None, T]
#: Turns a reduction's total, or any slice of it, into the result, in place.
Epilogue = Callable[[Array], None]

#: Maximum size of an eager message (bytes), which is sent at once. A larger message may wait until it is received.
EAGER_LIMIT = 4096
#: The tag of eager messages, the only messages that `arrived` returns. The user's tag is part of the message.
EAGER_TAG = 0
#: The smallest tag of an array that follows an eager message. All of these tags are below twice this number.
RENDEZVOUS_TAG = 2**14

#: Number of int64 words of a signature, as ranks exchange it.
WORDS = 16
# The index of each word. SEQUENCE is written last. IN and OUT have two words: segment and offset of a shared array.
SEQUENCE = 0
DIGEST = 1
ROWS = 2
NBYTES = 3
PREFIX = 4
IN = 5
OUT = 7
#: The words of each rank's signature.
Signatures = Sequence[Sequence[int]]


class Signature(NamedTuple):
    """What a rank shows the others before a call.

    digest: a hash of everything that must be equal on all ranks; the ranks compare it
    rows: `Plan.checksum`: the length along axis 0, or a checksum
    nbytes: not used; transports with shared memory write the size of the array into this word themselves
    """

    digest: int
    rows: int = 0
    nbytes: int = 0


class RankInfo(NamedTuple):
    """A rank's number and the number of ranks, in its communicator and on its node; and the node's number."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


class Transport(ABC):
    """One rank's end of a communicator. Arrays are one-dimensional and C-contiguous.

    name: the backend's name; key: identifies the communicator: the same on all its ranks, unique in its world
    purpose: what this rank uses the communicator for, shown in reports
    shares_memory: ranks of a node exchange arrays through shared memory
    combines_halves: reductions take 16-bit floats, compute in float32, epilogue included, and round once
    combines_in_tree: reductions combine in the order of `reduction.tree` over ranks
    in_flight: how many collectives may run at once if all ranks start their operations in the same order
    """

    name: str
    key: str
    purpose: str = ""
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    shares_memory = False
    combines_halves = False
    combines_in_tree = False
    in_flight = 1
    _signatures: Array | None = None
    shared_arrays: Any = None  # The arrays of `comm.empty`, shared with duplicates; None without shared memory.

    @property
    def label(self) -> str:
        """The communicator's name in reports: `world.1 (DataParallel of Net)`."""
        return f"{self.key} ({self.purpose})" if self.purpose else self.key

    @property
    def rank_info(self) -> RankInfo:
        return RankInfo(self.rank, self.size, self.local_rank, self.local_size, self.node)

    @rank_info.setter
    def rank_info(self, value: RankInfo) -> None:
        self.rank, self.size, self.local_rank, self.local_size, self.node = value

    def inline_calls(
        self, plan: Any, steps: Callable[..., Steps[Any]], after_exchange: Callable[..., Steps[Any]]
    ) -> Any:
        """A fast path for calls of `plan`: it exchanges the arrays together with the signatures. None if there is none.

        steps: returns all steps of a call; after_exchange: returns those after the exchange of signatures
        """
        return None

    # Verification ----------------------------------------------------------------------------------------------------

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        """Shows the other ranks the signature of this rank's next call. The test is True once all have shown theirs.

        A transport that does not compare this call shows nothing. Then the test is True at once: see `signatures`.

        payload, out: the arrays that the next operation of this transport reads and writes, if any
        prefix: (n,) uint8, which other ranks get by `root_prefix` and `all_prefixes`; n is equal on all ranks that pass
        one
        """
        self._signatures = np.zeros((self.size, WORDS), np.int64)
        words = np.zeros(WORDS, np.int64)
        words[DIGEST : DIGEST + len(signature)] = signature
        return self.all_prefixes(words.view(np.uint8), self._signatures.view(np.uint8))

    def signatures(self) -> Signatures | None:
        """The signatures of all ranks; None if they were not exchanged for this call."""
        return None if self._signatures is None else self._signatures.tolist()

    def verified_groups(self) -> Sequence[tuple[Transport, Sequence[int]]]:
        """The transports whose ranks compare signatures, and for each its ranks, as numbered in this transport."""
        return [(self, range(self.size))]

    def root_prefix(self, buffer: Array, root: int) -> Test:
        """Gives every rank the root's prefix. buffer: (n,) uint8; holds it on the root, and receives it elsewhere."""
        return self.broadcast(buffer, root)

    def all_prefixes(self, prefix: Array, buffer: Array) -> Test:
        """Gives every rank all prefixes. prefix: this rank's, (n,) uint8; buffer: (size, n) uint8, receives them."""
        return self.all_gather(prefix, buffer.reshape(-1), [prefix.nbytes] * self.size)

    def late(self) -> Sequence[int]:
        """The ranks for which this rank waits, as far as this rank knows."""
        return []

    def pid(self, rank: int) -> int | None:
        """The process id of a rank; None if it is on another node or unknown."""
        return None

    @abstractmethod
    def exit_notices(self) -> Mapping[int, ExitNotice]:
        """The ranks of this communicator that are known to have left, with their exit notices."""

    # Collectives -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Test:
        """x, out: (n,), same dtype; `x is out` reduces in place."""

    @abstractmethod
    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        """x: (n,); out: (n,) on the root, None elsewhere."""

    @abstractmethod
    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
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
        """table[s][d]: number of bytes from rank s to rank d.

        x: (sum(table[rank]),) uint8; out: (sum(row[rank] for row in table),) uint8
        """

    @abstractmethod
    def barrier(self) -> Test:
        """Complete once every rank has started it."""

    # Point to point --------------------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, x: Array, dst: int, tag: int) -> Test:
        """x: (n,) uint8, sent to another rank; messages with the same tag arrive in order.

        tag: EAGER_TAG, or RENDEZVOUS_TAG <= tag < 2 * RENDEZVOUS_TAG
        """

    @abstractmethod
    def recv(self, out: Array, src: int, tag: int) -> Test:
        """out: (n,) uint8, for the n bytes that the other rank sends; tag: as in `send`, but not EAGER_TAG."""

    @abstractmethod
    def arrived(self) -> tuple[int, Array] | None:
        """The next eager message that has arrived from any rank, as (rank, message); None if there is none.

        Messages of one rank come in the order in which it sent them. Only one thread at a time may call this.
        """

    # Groups, shared memory, closing ----------------------------------------------------------------------------------

    @abstractmethod
    def group(self, members: Sequence[int], key: str, number: int) -> Steps[Transport]:
        """Makes a transport of the ranks `members` of this transport, in this order. Calls of the two never mix.

        Only the members call it, and each waits until all have called it.
        number: the same on all members; groups that may be made at the same time have different numbers
        Raises: TooManyCommunicators, on this rank only, if the backend has no room for it.
        """

    def empty(self, nbytes: int) -> Steps[Array | None]:
        """(nbytes,) uint8 in memory that the ranks of this node share; None if they share no memory. Collective."""
        yield from ()
        return None

    def close(self) -> None:
        """Frees the backend's resources. This rank must have nothing in flight; other ranks may still use their end."""
        return


class LayeredTransport(Transport):
    """A transport on top of an inner one of the same ranks.

    The inner transport does what is not a collective: sends and receives, exit notices, new groups.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.key = inner.key
        self.rank_info = inner.rank_info

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
    """Every rank's record, in rank order. record: this rank's; as JSON it must fit into `nbytes`. Collective."""
    text = json.dumps(record, ensure_ascii=False).encode()
    assert len(text) <= nbytes, f"{len(text)} bytes"
    texts = np.empty((transport.size, nbytes), np.uint8)
    padded = np.frombuffer(text.ljust(nbytes), np.uint8)
    yield transport.all_gather(padded, texts.reshape(-1), [nbytes] * transport.size)
    return [json.loads(row.tobytes()) for row in texts]


def make_group(transport: Transport, members: Sequence[int] | None, key: str, number: int) -> Steps[Transport | None]:
    """Like `Transport.group`, but every rank calls it. members: None on a rank that is in no group

    Returns: this rank's new transport, or None
    Raises: TooManyCommunicators on every rank if one of them has no room.
    """
    yield transport.barrier()  # `group` may block until all members call it. After the barrier all are about to.
    group: Transport | None = None
    failure = None
    if members is not None:
        try:
            group = yield from transport.group(members, key, number)
        except TooManyCommunicators as error:
            failure = error
    failures = yield from gather_records(transport, failure is not None, 16)
    if any(failures):
        if group is not None:
            group.close()
        raise failure or TooManyCommunicators(
            f"rank {transport.rank}: another rank cannot make another communicator: close those that are not needed "
            "any more (comm.close())"
        )
    return group


def completed() -> bool:
    """The test of an operation that was complete when it started."""
    return True


def differ(signatures: Signatures) -> bool:
    """True if the signatures show that the ranks make different calls."""
    first = signatures[0][DIGEST]
    return any(signature[DIGEST] != first for signature in signatures)


def chunks(length: int, step: int) -> list[tuple[int, int]]:
    """Start and end of each chunk of at most `step` items: `chunks(5, 2) == [(0, 2), (2, 4), (4, 5)]`"""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def then(test: Test, epilogue: Epilogue | None, total: Array | None) -> Test:
    """A test that applies `epilogue` to `total` when `test` becomes True. If one of these is None: `test` itself."""
    if epilogue is None or total is None:
        return test
    done = False

    def test_and_apply() -> bool:
        nonlocal done
        if not done and test():
            done = True
            epilogue(total)
        return done

    return test_and_apply


def all_of(tests: list[Test]) -> Test:
    """The test of several operations in progress at once. It stops calling a test that has returned True."""

    def test() -> bool:
        tests[:] = [pending for pending in tests if not pending()]
        return not tests

    return test


def parts_of(joined: Any, counts: Sequence[int]) -> list[Any]:
    """Each rank's part of a joined array, on the host or a GPU."""
    return [joined[start : start + count] for start, count in zip(offsets(counts), counts, strict=True)]


def offsets(counts: Sequence[int]) -> list[int]:
    """The index where each rank's part starts: `offsets([2, 0, 3]) == [0, 2, 2]`."""
    starts = []
    start = 0
    for count in counts:
        starts.append(start)
        start += count
    return starts
