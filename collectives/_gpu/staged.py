"""Device arrays over the host's transport: through pinned memory, in chunks, so that no link waits for another.

    chunk            0      1      2      3
    copied down      ====   ====   ====   ====
    transferred             ====   ====   ====   ====
    copied up                      ====   ====   ====   ====

Three slots of pinned memory go round. Each is filled on one stream, handed to the transport when the host has seen that
copy done, emptied on a second stream, and filled again when the host has seen that done. What the transport computes is
what it computes for host arrays, chunk by chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives._gpu.carrier import Rest
from collectives._gpu.cuda import Cuda
from collectives._gpu.rounds import Span, lengths, part_spans, spans
from collectives.backends.transport import Test, Transport, offsets
from collectives.engine.call import Steps
from collectives.reduction import Array, ReduceOp, wire_op

CHUNK = 4 << 20  # bytes; a copy of this size takes long enough to hide its launch, and short enough to overlap
_LEAST = 16 << 10  # bytes of one rank's part of a chunk, however many ranks there are
_SLOTS = 3


class Slot:
    """Pinned memory of one chunk on its way: what is sent, what comes back, and how far the copies are."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._sent = self._got = cuda.pinned(0)
        self.down: Any = None  # behind the copies into it
        self.up: Any = None  # behind the copies out of it

    def sent(self, count: int, dtype: Any = np.uint8) -> Array:
        """Room for what goes out, (count,)."""
        self._sent = self._grown(self._sent, count * np.dtype(dtype).itemsize)
        return self._sent[: count * np.dtype(dtype).itemsize].view(dtype)

    def got(self, count: int, dtype: Any = np.uint8) -> Array:
        """Room for what comes in, (count,)."""
        self._got = self._grown(self._got, count * np.dtype(dtype).itemsize)
        return self._got[: count * np.dtype(dtype).itemsize].view(dtype)

    def _grown(self, room: Array, nbytes: int) -> Array:
        return room if room.nbytes >= nbytes else self._cuda.pinned(nbytes)


class Staged:
    """The carrier that goes through host memory, over any transport."""

    name = "host memory"
    capturable = False  # the host takes part in it

    def __init__(self, cuda: Cuda, transport: Transport) -> None:
        self._cuda = cuda
        self._transport = transport
        self._chunk = CHUNK
        self.stream = cuda.stream()
        self._down = cuda.stream()
        self._up = cuda.stream()
        self._slots = [Slot(cuda) for _ in range(_SLOTS)]

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Rest]:
        cuts = self._spans(x)

        def transfer(k: int, slot: Slot) -> Test:
            moved = slot.sent(_length(cuts[k]), x.dtype)
            return self._transport.all_reduce(moved, moved, wire_op(op))

        def up(k: int, slot: Slot) -> None:
            self._cuda.copy_up(_cut(out, cuts[k]), slot.sent(_length(cuts[k]), x.dtype), self._up)

        yield from self._relay(len(cuts), self._down_spans(x, cuts), transfer, up)
        return Rest(op, factor)

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, root: int) -> Steps[Rest]:
        cuts = self._spans(x)

        def transfer(k: int, slot: Slot) -> Test:
            total = None if out is None else slot.got(_length(cuts[k]), x.dtype)
            return self._transport.reduce(slot.sent(_length(cuts[k]), x.dtype), total, wire_op(op), root)

        def up(k: int, slot: Slot) -> None:
            self._cuda.copy_up(_cut(out, cuts[k]), slot.got(_length(cuts[k]), x.dtype), self._up)

        yield from self._relay(len(cuts), self._down_spans(x, cuts), transfer, None if out is None else up)
        return Rest(op, factor)

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Rest]:
        rounds = part_spans(counts, self._part(x.itemsize))
        rank = self._transport.rank

        def transfer(k: int, slot: Slot) -> Test:
            parts = lengths(rounds[k])
            total = slot.got(parts[rank], x.dtype)
            return self._transport.reduce_scatter(slot.sent(sum(parts), x.dtype), total, parts, wire_op(op))

        def up(k: int, slot: Slot) -> None:
            span = rounds[k][rank]
            self._cuda.copy_up(_cut(out, span), slot.got(_length(span), x.dtype), self._up)

        yield from self._relay(len(rounds), self._down_parts(x, counts, rounds), transfer, up)
        return Rest(op, factor)

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        cuts = self._spans(x)
        mine = self._transport.rank == root

        def transfer(k: int, slot: Slot) -> Test:
            return self._transport.broadcast(slot.sent(_length(cuts[k])), root)

        def up(k: int, slot: Slot) -> None:
            self._cuda.copy_up(_cut(x, cuts[k]), slot.sent(_length(cuts[k])), self._up)

        down = self._down_spans(x, cuts) if mine else None
        yield from self._relay(len(cuts), down, transfer, None if mine else up)

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        rounds = part_spans(counts, self._part(1))
        mine = [parts[self._transport.rank] for parts in rounds]

        def transfer(k: int, slot: Slot) -> Test:
            whole = None if out is None else slot.got(sum(lengths(rounds[k])))
            return self._transport.gather(slot.sent(_length(mine[k])), whole, lengths(rounds[k]), root)

        up = None if out is None else self._up_parts(out, counts, rounds)
        yield from self._relay(len(rounds), self._down_spans(x, mine), transfer, up)

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        rounds = part_spans(counts, self._part(1))
        mine = [parts[self._transport.rank] for parts in rounds]

        def transfer(k: int, slot: Slot) -> Test:
            parts = lengths(rounds[k])
            return self._transport.all_gather(slot.sent(_length(mine[k])), slot.got(sum(parts)), parts)

        up = self._up_parts(out, counts, rounds)
        yield from self._relay(len(rounds), self._down_spans(x, mine), transfer, up)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        rounds = part_spans(counts, self._part(1))
        mine = [parts[self._transport.rank] for parts in rounds]

        def transfer(k: int, slot: Slot) -> Test:
            whole = None if x is None else slot.sent(sum(lengths(rounds[k])))
            return self._transport.scatter(whole, slot.got(_length(mine[k])), lengths(rounds[k]), root)

        def up(k: int, slot: Slot) -> None:
            self._cuda.copy_up(_cut(out, mine[k]), slot.got(_length(mine[k])), self._up)

        down = None if x is None else self._down_parts(x, counts, rounds)
        yield from self._relay(len(rounds), down, transfer, up)

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        size, rank = self._transport.size, self._transport.rank
        # All pairs of ranks go on together, so that every rank counts the same rounds.
        rounds = part_spans([count for row in table for count in row], self._part(1))
        sends = [cuts[rank * size : (rank + 1) * size] for cuts in rounds]
        receives = [cuts[rank::size] for cuts in rounds]

        def transfer(k: int, slot: Slot) -> Test:
            flat = lengths(rounds[k])
            cut = [flat[row * size : (row + 1) * size] for row in range(size)]
            whole, room = slot.sent(sum(cut[rank])), slot.got(sum(row[rank] for row in cut))
            return self._transport.all_to_all(whole, room, cut)

        down = self._down_parts(x, table[rank], sends)
        up = self._up_parts(out, [row[rank] for row in table], receives)
        yield from self._relay(len(rounds), down, transfer, up)

    # Life ------------------------------------------------------------------------------------------------------------

    def watch(self, event: Any, call: object) -> None:
        return  # what can wait for other ranks is over already: the host took part in it

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    # The relay -------------------------------------------------------------------------------------------------------

    def _relay(
        self,
        rounds: int,
        down: Callable[[int, Slot], None] | None,
        transfer: Callable[[int, Slot], Test],
        up: Callable[[int, Slot], None] | None,
    ) -> Steps[None]:
        """Takes every chunk down, over and up. down, up: None where this rank sends or gets nothing."""
        begun = self._cuda.mark(self.stream)
        self._down.wait_event(begun)
        self._up.wait_event(begun)
        for k in range(rounds + 1):
            if k < rounds:
                slot = self._slots[k % _SLOTS]
                if slot.up is not None:
                    yield functools.partial(self._cuda.passed, slot.up)
                if down is not None:
                    down(k, slot)
                    slot.down = self._cuda.mark(self._down)
            if k > 0:
                slot = self._slots[(k - 1) % _SLOTS]
                if down is not None:
                    yield functools.partial(self._cuda.passed, slot.down)
                yield transfer(k - 1, slot)
                if up is not None:
                    up(k - 1, slot)
                    slot.up = self._cuda.mark(self._up)
        self.stream.wait_event(self._cuda.mark(self._up))

    def _spans(self, x: Any) -> list[Span]:
        return spans(x.size, max(self._chunk // x.itemsize, 1))

    def _part(self, itemsize: int) -> int:
        return max(self._chunk // self._transport.size, _LEAST) // itemsize

    def _down_spans(self, x: Any, cuts: Sequence[Span]) -> Callable[[int, Slot], None]:
        def down(k: int, slot: Slot) -> None:
            self._cuda.copy_down(slot.sent(_length(cuts[k]), x.dtype), _cut(x, cuts[k]), self._down)

        return down

    def _down_parts(
        self, x: Any, counts: Sequence[int], rounds: Sequence[Sequence[Span]]
    ) -> Callable[[int, Slot], None]:
        starts = offsets(counts)

        def down(k: int, slot: Slot) -> None:
            parts = lengths(rounds[k])
            room = slot.sent(sum(parts), x.dtype)
            for start, span, at, length in zip(starts, rounds[k], offsets(parts), parts, strict=True):
                self._cuda.copy_down(room[at : at + length], _cut(x, span, start), self._down)

        return down

    def _up_parts(
        self, out: Any, counts: Sequence[int], rounds: Sequence[Sequence[Span]]
    ) -> Callable[[int, Slot], None]:
        starts = offsets(counts)

        def up(k: int, slot: Slot) -> None:
            parts = lengths(rounds[k])
            room = slot.got(sum(parts), out.dtype)
            for start, span, at, length in zip(starts, rounds[k], offsets(parts), parts, strict=True):
                self._cuda.copy_up(_cut(out, span, start), room[at : at + length], self._up)

        return up


def _length(span: Span) -> int:
    return span[1] - span[0]


def _cut(array: Any, span: Span, start: int = 0) -> Any:
    return array[start + span[0] : start + span[1]]
