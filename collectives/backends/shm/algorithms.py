"""How arrays move between the ranks of a node: read in place if visible, otherwise in tiles through staging buffers.

A rank's array is *visible* to the others if it is in the rank's inline buffer, or in memory that they share. If any of
a collective's inputs is not visible, all of them go through the staging buffers. In round k every rank that sends
copies its k-th tile into one of its two buffers. Each rank publishes that it has done its part, and waits until all
ranks have done theirs. Then it reads what it needs from the other ranks' buffers while these are still in a cache, and
its own values from its array, which saves a quarter of the time.

Reductions combine the ranks' values in the order of `reduction.tree`, on every path and every rank. So the same inputs
give the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from collectives.backends.shm.segment import SUM_ALONE, TILE_BYTES, ControlBlock
from collectives.native import FLOAT32, copy
from collectives.reduction import HALVES, combine_in_tree
from collectives.transport import Epilogue, chunks, parts_of

Array = np.ndarray[Any, Any]
#: Yields one test for each wait.
Waits = Generator[Callable[[], bool], None, None]

# Number of 16-bit floats that are widened to float32 at a time: their 256 KiB fit into the L2 cache.
_WIDENED = 64 << 10
# Bytes of a cache line. Parts begin at multiples of it from the start of the array. So no two ranks write into the same
# line, unless the array itself begins within a line.
_ALIGN = 64


def combine_all(sources: Sequence[Array], out: Array, ufunc: np.ufunc, epilogue: Epilogue | None) -> None:
    """Combines the sources in the tree's order, applies `epilogue`, and writes to `out`, which may be one of them."""
    if out.dtype in HALVES:
        combine_halves(sources, out, ufunc, epilogue)
        return
    combine_in_tree(sources, ufunc, out)
    if epilogue is not None:
        epilogue(out)


def combine_halves(sources: Sequence[Array], out: Array, ufunc: np.ufunc, epilogue: Epilogue | None) -> None:
    """Does what `combine_all` does, for 16-bit floats: computes in float32, epilogue included, and rounds once."""
    step = _WIDENED // len(sources)
    buffers = np.empty((len(sources), min(len(out), step)), FLOAT32)
    for start, stop in chunks(len(out), step):
        totals = buffers[:, : stop - start]
        for total, source in zip(totals, sources, strict=True):
            copy(total, source[start:stop])
        combine_in_tree(list(totals), ufunc, totals[0])
        if epilogue is not None:
            epilogue(totals[0])
        copy(out[start:stop], totals[0])


def part_to_reduce(length: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Start and stop of the part of `length` items that a rank reduces for all: whole cache lines, except the last."""
    line = max(1, _ALIGN // itemsize)
    lines = -(-length // line)
    return min(length, lines * rank // size * line), min(length, lines * (rank + 1) // size * line)


# Visible arrays ------------------------------------------------------------------------------------------------------


def reduce_visible(sources: Sequence[Array], out: Array, ufunc: np.ufunc, epilogue: Epilogue | None) -> None:
    """Reduces the sources into `out`, tile by tile. All are (n,), of one dtype; `out` overlaps no source."""
    for start, stop in chunks(len(out), TILE_BYTES // out.itemsize):
        combine_all([source[start:stop] for source in sources], out[start:stop], ufunc, epilogue)


def reduce_into_all(
    sources: Sequence[Array], outs: Sequence[Array], me: int, ufunc: np.ufunc, epilogue: Epilogue | None
) -> None:
    """Computes this rank's part of the reduction, and writes it into all `outs`. `outs[i]` may be `sources[i]`."""
    own_out = outs[me]
    itemsize = own_out.itemsize
    first, last = part_to_reduce(len(own_out), itemsize, len(sources), me)
    step = TILE_BYTES // itemsize
    others = [out for rank, out in enumerate(outs) if rank != me]
    for tile_start, tile_stop in chunks(last - first, step):
        start = first + tile_start
        stop = first + tile_stop
        part = own_out[start:stop]
        combine_all([source[start:stop] for source in sources], part, ufunc, epilogue)
        for out in others:
            np.copyto(out[start:stop], part)


# Through staging buffers ---------------------------------------------------------------------------------------------


def all_reduce(control: ControlBlock, x: Array, out: Array, ufunc: np.ufunc, epilogue: Epilogue | None) -> Waits:
    """x, out: (n,); out may be x."""
    if control.size <= SUM_ALONE:
        yield from _reduce_alone(control, x, out, ufunc, epilogue, read_by_others=True)
        return
    me = control.me
    for start, stop in chunks(len(x), control.staging_bytes // x.itemsize):
        staged = _staged(control, x.dtype, stop - start)
        tile = x[start:stop]
        np.copyto(staged[me], tile)
        control.advance()
        yield control.advanced
        a, b = part_to_reduce(stop - start, x.itemsize, control.size, me)
        sources = [source[a:b] for source in staged]
        sources[me] = tile[a:b]
        # The total overwrites this part of the staging buffer: other ranks read the part only in the next phase.
        combine_all(sources, staged[me][a:b], ufunc, epilogue)
        control.advance()
        yield control.advanced
        for rank, source in enumerate(staged):
            a, b = part_to_reduce(stop - start, x.itemsize, control.size, rank)
            np.copyto(out[start:stop][a:b], source[a:b])


def reduce(control: ControlBlock, x: Array, out: Array | None, ufunc: np.ufunc, epilogue: Epilogue | None) -> Waits:
    """x: (n,); out: (n,) on the root, None elsewhere."""
    return _reduce_alone(control, x, out, ufunc, epilogue, read_by_others=out is None)


def _reduce_alone(
    control: ControlBlock, x: Array, out: Array | None, ufunc: np.ufunc, epilogue: Epilogue | None, read_by_others: bool
) -> Waits:
    """Each rank with an `out` reduces the whole array by itself.

    read_by_others: whether another rank has an `out`, and therefore reads this rank's x
    """
    me = control.me
    for start, stop in chunks(len(x), control.staging_bytes // x.itemsize):
        sources = _staged(control, x.dtype, stop - start)
        tile = x[start:stop]
        if read_by_others:
            np.copyto(sources[me], tile)
        control.advance()
        yield control.advanced
        if out is not None:
            sources[me] = tile
            combine_all(sources, out[start:stop], ufunc, epilogue)


def reduce_scatter(
    control: ControlBlock, x: Array, out: Array, counts: Sequence[int], ufunc: np.ufunc, epilogue: Epilogue | None
) -> Waits:
    """x: (sum(counts),); out: (counts[me],)."""
    me = control.me
    step = control.staging_bytes // x.itemsize // control.size
    parts = parts_of(x, counts)
    for start, stop in chunks(max(counts), step):
        staged = _staged(control, x.dtype, step * control.size)
        for rank in control.others:
            tile = parts[rank][start:stop]
            np.copyto(staged[me][rank * step :][: len(tile)], tile)
        control.advance()
        yield control.advanced
        tile = out[start:stop]
        if len(tile):
            sources = [source[me * step :][: len(tile)] for source in staged]
            sources[me] = parts[me][start:stop]
            combine_all(sources, tile, ufunc, epilogue)


def broadcast(control: ControlBlock, x: Array, root: int) -> Waits:
    """x: (n,) uint8, read on the root, written elsewhere."""
    if control.me == root:
        return _exchange(control, [(0, x)], [], None, control.staging_bytes, len(x))
    return _exchange(control, [], [(root, 0, x)], None, control.staging_bytes, len(x))


def gather(control: ControlBlock, x: Array, out: Array | None, counts: Sequence[int]) -> Waits:
    """x: (counts[me],) uint8; out: (sum(counts),) uint8 on ranks that get the result, None elsewhere."""
    receives = []
    own_copy = None
    if out is not None:
        parts = parts_of(out, counts)
        receives = [(rank, 0, parts[rank]) for rank in control.others]
        own_copy = x, parts[control.me]
    return _exchange(control, [(0, x)], receives, own_copy, control.staging_bytes, max(counts))


def scatter(control: ControlBlock, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Waits:
    """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[me],) uint8."""
    me = control.me
    step = _step(control)
    if x is None:
        return _exchange(control, [], [(root, _offset(me, root) * step, out)], None, step, max(counts))
    parts = parts_of(x, counts)
    sends = [(_offset(rank, me) * step, parts[rank]) for rank in control.others]
    return _exchange(control, sends, [], (parts[me], out), step, max(counts))


def all_to_all(control: ControlBlock, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Waits:
    """table[s][d]: number of bytes from rank s to rank d.

    x: (sum(table[me]),) uint8; out: (sum(row[me] for row in table),) uint8
    """
    me = control.me
    step = _step(control)
    sent = parts_of(x, table[me])
    received = parts_of(out, [row[me] for row in table])
    sends = [(_offset(rank, me) * step, sent[rank]) for rank in control.others]
    receives = [(rank, _offset(me, rank) * step, received[rank]) for rank in control.others]
    return _exchange(control, sends, receives, (sent[me], received[me]), step, max(max(row) for row in table))


def _exchange(
    control: ControlBlock,
    sends: Sequence[tuple[int, Array]],
    receives: Sequence[tuple[int, int, Array]],
    own_copy: tuple[Array, Array] | None,
    step: int,
    longest: int,
) -> Waits:
    """Moves arrays of bytes through the staging buffers, `step` bytes of each array per round.

    sends: offset in this rank's staging buffer, and array; receives: source rank, offset in its buffer, and array
    own_copy: source and target of what this rank copies for itself; longest: bytes of the longest array on any rank
    """
    for start, stop in chunks(longest, step):
        staging = control.next_staging()
        own_staging = staging[control.me]
        for offset, source in sends:
            part = source[start:stop]
            own_staging[offset : offset + len(part)] = part
        control.advance()
        if own_copy is not None:  # This copy needs no other rank, so it comes before the wait for them.
            own_copy[1][start:stop] = own_copy[0][start:stop]
        yield control.advanced
        for rank, offset, target in receives:
            part = target[start:stop]
            part[:] = staging[rank][offset : offset + len(part)]


def _step(control: ControlBlock) -> int:
    """Bytes of a staging buffer for each other rank, in whole cache lines."""
    return control.staging_bytes // (control.size - 1) // _ALIGN * _ALIGN


def _offset(rank: int, owner: int) -> int:
    """The index of the part for `rank` in the owner's staging buffer, which has none for the owner itself."""
    return rank if rank < owner else rank - 1


def _staged(control: ControlBlock, dtype: np.dtype[Any], length: int) -> list[Array]:
    return [buffer[: length * dtype.itemsize].view(dtype) for buffer in control.next_staging()]
