"""Device arrays over the host's transport: through pinned memory, in chunks, so that no link waits for another.

    chunk            0      1      2      3
    copied down      ====   ====   ====   ====
    transferred             ====   ====   ====   ====
    copied up                      ====   ====   ====   ====

Three staging buffers of pinned memory go round. Each is filled on one stream, handed to the transport when the host has
seen that copy done, emptied on a second stream, and filled again when the host has seen that done. What the transport
computes is what it computes for host arrays, chunk by chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import Remainder
from collectives.reduction import Array, ReduceOp, wire_op
from collectives.transport import Steps, Test, Transport, chunks, offsets

CHUNK = 4 << 20  # bytes; a copy of this size takes long enough to hide its launch, and short enough to overlap
_LEAST = 16 << 10  # bytes of one rank's part of a chunk, however many ranks there are
_BUFFERS = 3

#: From where to where, in elements.
Span = tuple[int, int]
#: Starts the transfer of chunk k: what this rank sends in it, and what it receives.
Transfer = Callable[[int, Array, Array], Test]


def part_spans(counts: Sequence[int], most: int) -> list[list[Span]]:
    """Rounds in which each of several parts goes on by at most `most`: [round][part], within the part.

    `part_spans([5, 2], 3) == [[(0, 3), (0, 2)], [(3, 5), (2, 2)]]`
    """
    longest = max(counts, default=0)
    return [[(min(start, count), min(start + most, count)) for count in counts] for start in range(0, longest, most)]


class StagingBuffer:
    """Pinned memory of one chunk on its way: what is sent, what is received, and how far the copies are."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._memory = {"sent": cuda.pinned(0), "received": cuda.pinned(0)}
        self.down: Any = None  # the event behind the copies into it
        self.up: Any = None  # the event behind the copies out of it

    def array(self, which: str, parts: Sequence[Any], dtype: Any) -> Array:
        """Host memory for these parts of device arrays, one behind the other. which: "sent" or "received"."""
        nbytes = sum(part.size for part in parts) * np.dtype(dtype).itemsize
        if self._memory[which].nbytes < nbytes:
            self._memory[which] = self._cuda.pinned(nbytes)
        return self._memory[which][:nbytes].view(dtype)

    def pairs(self, which: str, parts: Sequence[Any], dtype: Any) -> list[tuple[Any, Array]]:
        """Each part with its own host memory."""
        whole, counts = self.array(which, parts, dtype), [part.size for part in parts]
        return [(part, whole[at : at + part.size]) for part, at in zip(parts, offsets(counts), strict=True)]


class HostStagedTransport:
    """The device transport that goes through host memory, over any transport."""

    name = "host memory"
    capturable = False  # the host takes part in it
    timeout = None  # what can wait for other ranks is over when it has been put on the stream

    def __init__(self, cuda: Cuda, transport: Transport) -> None:
        self._cuda = cuda
        self._transport = transport
        self._chunk = CHUNK
        self.stream = cuda.stream()
        self._down = cuda.stream()
        self._up = cuda.stream()
        self._buffers = [StagingBuffer(cuda) for _ in range(_BUFFERS)]

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Remainder]:
        cuts = self._spans(x)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.all_reduce(sent, received, wire_op(op))

        yield from self._pipeline(x.dtype, _slices(x, cuts), _slices(out, cuts), transfer)
        return Remainder(op, factor)

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int, factor: Any) -> Steps[Remainder]:
        cuts = self._spans(x)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.reduce(sent, None if out is None else received, wire_op(op), root)

        yield from self._pipeline(x.dtype, _slices(x, cuts), _slices(out, cuts), transfer)
        return Remainder(op, factor)

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Remainder]:
        rounds = self._rounds(counts, x.itemsize)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.reduce_scatter(sent, received, _lengths(rounds[k]), wire_op(op))

        ups = _slices(out, self._mine(rounds))
        yield from self._pipeline(x.dtype, _part_slices(x, counts, rounds), ups, transfer)
        return Remainder(op, factor)

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        cuts, is_root = self._spans(x), self._transport.rank == root

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.broadcast(sent if is_root else received, root)

        downs, ups = _slices(x if is_root else None, cuts), _slices(None if is_root else x, cuts)
        yield from self._pipeline(x.dtype, downs, ups, transfer)

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        rounds = self._rounds(counts)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.gather(sent, None if out is None else received, _lengths(rounds[k]), root)

        downs, ups = _slices(x, self._mine(rounds)), _part_slices(out, counts, rounds)
        yield from self._pipeline(x.dtype, downs, ups, transfer)

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        rounds = self._rounds(counts)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.all_gather(sent, received, _lengths(rounds[k]))

        downs, ups = _slices(x, self._mine(rounds)), _part_slices(out, counts, rounds)
        yield from self._pipeline(x.dtype, downs, ups, transfer)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        rounds = self._rounds(counts)

        def transfer(k: int, sent: Array, received: Array) -> Test:
            return self._transport.scatter(None if x is None else sent, received, _lengths(rounds[k]), root)

        downs, ups = _part_slices(x, counts, rounds), _slices(out, self._mine(rounds))
        yield from self._pipeline(out.dtype, downs, ups, transfer)

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        size, rank = self._transport.size, self._transport.rank
        # All pairs of ranks go on together, so that every rank counts the same rounds.
        rounds = self._rounds([count for row in table for count in row])

        def transfer(k: int, sent: Array, received: Array) -> Test:
            flat = _lengths(rounds[k])
            return self._transport.all_to_all(sent, received, [flat[at : at + size] for at in range(0, size**2, size)])

        downs = _part_slices(x, table[rank], [cuts[rank * size : (rank + 1) * size] for cuts in rounds])
        ups = _part_slices(out, [row[rank] for row in table], [cuts[rank::size] for cuts in rounds])
        yield from self._pipeline(x.dtype, downs, ups, transfer)

    def close(self) -> None:
        return

    # The pipeline ----------------------------------------------------------------------------------------------------

    def _pipeline(
        self, dtype: Any, downs: Sequence[Sequence[Any]], ups: Sequence[Sequence[Any]], transfer: Transfer
    ) -> Steps[None]:
        """Takes every chunk down, over and up. downs, ups: the parts of device arrays that each chunk is made of."""
        begun = self._cuda.mark(self.stream)
        self._down.wait_event(begun)
        self._up.wait_event(begun)
        for k in range(len(downs) + 1):
            if k < len(downs):
                buffer = self._buffers[k % _BUFFERS]
                if buffer.up is not None:
                    yield functools.partial(self._cuda.passed, buffer.up)
                if downs[k]:
                    for device, host in buffer.pairs("sent", downs[k], dtype):
                        self._cuda.copy_down(host, device, self._down)
                    buffer.down = self._cuda.mark(self._down)
            if k > 0:
                sends, receives, buffer = downs[k - 1], ups[k - 1], self._buffers[(k - 1) % _BUFFERS]
                if sends:
                    yield functools.partial(self._cuda.passed, buffer.down)
                sent, received = buffer.array("sent", sends, dtype), buffer.array("received", receives, dtype)
                yield transfer(k - 1, sent, received)
                if receives:
                    for device, host in buffer.pairs("received", receives, dtype):
                        self._cuda.copy_up(device, host, self._up)
                    buffer.up = self._cuda.mark(self._up)
        self.stream.wait_event(self._cuda.mark(self._up))

    def _spans(self, x: Any) -> list[Span]:
        return chunks(x.size, max(self._chunk // x.itemsize, 1))

    def _rounds(self, counts: Sequence[int], itemsize: int = 1) -> list[list[Span]]:
        return part_spans(counts, max(self._chunk // self._transport.size, _LEAST) // itemsize)

    def _mine(self, rounds: Sequence[Sequence[Span]]) -> list[Span]:
        return [parts[self._transport.rank] for parts in rounds]


def _lengths(parts: Sequence[Span]) -> list[int]:
    return [stop - start for start, stop in parts]


def _slices(array: Any, cuts: Sequence[Any]) -> list[list[Any]]:
    """One part of an array a chunk; nothing if there is no array."""
    return [[] if array is None else [array[start:stop]] for start, stop in cuts]


def _part_slices(array: Any, counts: Sequence[int], rounds: Sequence[Sequence[Span]]) -> list[list[Any]]:
    """Of each rank's part of an array, what a chunk takes of it; nothing if there is no array."""
    if array is None:
        return [[] for _ in rounds]
    starts = offsets(counts)
    return [[array[at + start : at + stop] for at, (start, stop) in zip(starts, cuts, strict=True)] for cuts in rounds]
