"""What a backend must be able to do: move and combine contiguous host arrays without ever blocking.

A transport knows nothing of dtypes' meaning, lengths, scales, queues or time limits: `Communicator` has those once for
all backends. Each method starts one collective and returns its `Test`; the caller keeps the arrays alive and unchanged
until that test answers True. All ranks call the same methods in the same order, but for `send` and `recv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from collectives.engine.verify import Signature, Signatures
from collectives.exit_notice import ExitNotice
from collectives.reduction import Array, ReduceOp

#: Makes progress; True once the collective is complete on this rank; raises if it failed.
Test = Callable[[], bool]

#: Turns a reduction's total, or any part of it, into the answer, in place.
Finish = Callable[[Array], None]

#: Bytes of the longest letter, which is on its way at once; longer messages may wait until they are received.
EAGER_LIMIT = 4096
#: The tag of letters, which `arrived` hands out; the tag that a user gave stands in them.
EAGER_TAG = 0
#: Tags of the arrays that follow a letter are from it up to twice it.
RENDEZVOUS_TAG = 2**14


class Transport(Protocol):
    """One rank's end of a communicator. Arrays are one-dimensional and C-contiguous.

    name: the backend's name; key: the same text on all ranks and different for each communicator of a world
    """

    name: str
    key: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        """Shows the others this rank's header of the collective that comes next; complete when all have shown theirs.

        payload, out: what the next operation of this transport reads and writes, if anything, as it will be given there
        prefix: (n,) uint8, n the same on all ranks that give one: what `root_prefix` and `all_prefixes` hand out
        """

    def signatures(self) -> Signatures | None:
        """The headers of the ranks that have met; None if this call's were not exchanged."""

    def root_prefix(self, room: Array, root: int) -> Test:
        """room: (n,) uint8, written off the root with the root's prefix; on the root it is that prefix."""

    def all_prefixes(self, prefix: Array, room: Array) -> Test:
        """prefix: this rank's; room: (size, n) uint8, written with all ranks' prefixes."""

    def late(self) -> Sequence[int]:
        """The ranks for which this one waits, as far as that is known."""

    def pid(self, rank: int) -> int | None:
        """The process that a rank is, if that is one of this machine, with a flight record of its own."""

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        """x, out: (n,), same dtype; `x is out` reduces in place."""

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        """x: (n,); out: (n,) on the root, None elsewhere."""

    def broadcast(self, x: Array, root: int) -> Test:
        """x: (n,) uint8, read on the root, written elsewhere."""

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8 on the root, None elsewhere."""

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[rank],) uint8."""

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8."""

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        """x: (sum(counts),); out: (counts[rank],), same dtype, in other memory."""

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        """x: (sum(table[rank]),) uint8; out: (...,) uint8; table[s][d]: how many bytes rank s sends to rank d."""

    def send(self, x: Array, dst: int, tag: int) -> Test:
        """x: (n,) uint8 to another rank; those of one tag arrive in order. tag: LETTERS, or TAGS <= tag < 2 * TAGS"""

    def recv(self, out: Array, src: int, tag: int) -> Test:
        """out: (n,) uint8, as long as what the other rank sends under that tag, which is not LETTERS."""

    def arrived(self) -> tuple[int, Array] | None:
        """The next letter that has arrived from any rank, with that rank; None: there is none now.

        Those of one rank come in the order in which it sent them. One thread at a time calls it.
        """

    def barrier(self) -> Test:
        """Complete once every rank has started it."""

    def duplicate(self, key: str) -> tuple[Transport, Test]:
        """A transport of the same ranks whose calls never mix with this one's; usable once the test is True."""

    def split(self, members: Sequence[int] | None, key: str) -> tuple[Transport | None, Test]:
        """A transport of some of these ranks, in the order of `members`; usable once the test is True.

        Every rank calls it at about the same time. members: one list for all ranks in it; None: this rank is in none
        """

    def group(self, members: Sequence[int], key: str, missing: list[int]) -> tuple[Transport, Test]:
        """As `split`, but these ranks alone call it; usable once the test is True.

        missing: the other members; those that have come are taken out of it
        """

    def close(self) -> None:
        """Frees what the backend holds for it; nothing is in flight, and other ranks may still use theirs."""

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        """The ranks of this communicator that are known to have left."""


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


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each rank's part starts: `offsets([2, 0, 3]) == [0, 2, 2]`."""
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count
    return starts
