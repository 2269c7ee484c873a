"""How data moves between the ranks of a node: read in place if all can see it, else in tiles over staging buffers.

A rank's contribution is *visible* to the others if it fits into its inline buffer, or lies in memory that they share.
Otherwise it goes through the staging buffers: in round k every rank copies its k-th tile into one of its two, publishes
that, waits until all have, and takes what it needs from the others' while these are still in a cache.

Reductions combine the ranks' values in the order of `reduction.tree`, by whichever path and on whichever rank: the same
inputs give the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from collectives.backends.shm.segment import STAGING_BYTES, SUM_ALONE, ControlBlock
from collectives.native import FLOAT32, copy
from collectives.reduction import HALVES, combine_in_tree
from collectives.transport import Finish, chunks, parts_of

Array = np.ndarray[Any, Any]
#: Yields what to wait for.
Waits = Generator[Callable[[], bool], None, None]

_WIDENED = 64 << 10  # 16-bit floats that are float32 at a time: 256 KiB stay in the second-level cache
_ALIGN = 64  # bytes: no two ranks write into the same cache line


def combine_all(sources: Sequence[Array], out: Array, ufunc: np.ufunc, finish: Finish | None) -> None:
    """out = what finish makes of the sources, combined in the tree's order. `out` may be the memory of one of them."""
    if out.dtype in HALVES:
        combine_halves(sources, out, ufunc, finish)
        return
    combine_in_tree(sources, ufunc, out)
    if finish is not None:
        finish(out)


def combine_halves(sources: Sequence[Array], out: Array, ufunc: np.ufunc, finish: Finish | None) -> None:
    """The same for floats of 16 bits, which are combined and finished in float32, and rounded once."""
    step = _WIDENED // len(sources)
    buffers = np.empty((len(sources), min(len(out), step)), FLOAT32)
    for start, stop in chunks(len(out), step):
        totals = buffers[:, : stop - start]
        for total, source in zip(totals, sources, strict=True):
            copy(total, source[start:stop])
        combine_in_tree(list(totals), ufunc, totals[0])
        if finish is not None:
            finish(totals[0])
        copy(out[start:stop], totals[0])


def share(length: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """The part of `length` items that a rank reduces for all; parts begin on cache lines."""
    line = max(1, _ALIGN // itemsize)
    lines = -(-length // line)
    return min(length, lines * rank // size * line), min(length, lines * (rank + 1) // size * line)


# Visible contributions -----------------------------------------------------------------------------------------------


def reduce_visible(sources: Sequence[Array], out: Array, ufunc: np.ufunc, finish: Finish | None) -> None:
    """out = the reduction of the sources, tile by tile. All: (n,) of one dtype; out overlaps none of them."""
    for start, stop in chunks(len(out), STAGING_BYTES // out.itemsize):
        combine_all([source[start:stop] for source in sources], out[start:stop], ufunc, finish)


def reduce_into_all(
    sources: Sequence[Array], outs: Sequence[Array], me: int, ufunc: np.ufunc, finish: Finish | None
) -> None:
    """This rank's share of the reduction, into every rank's out; `outs[rank]` may be `sources[rank]`."""
    length, itemsize = len(outs[me]), outs[me].itemsize
    first, last = share(length, itemsize, len(sources), me)
    step = STAGING_BYTES // itemsize
    others = [out for rank, out in enumerate(outs) if rank != me]
    for start, stop in chunks(last - first, step):
        start, stop = first + start, first + stop
        part = outs[me][start:stop]
        combine_all([source[start:stop] for source in sources], part, ufunc, finish)
        for out in others:
            np.copyto(out[start:stop], part)


# Through the stages --------------------------------------------------------------------------------------------------


def all_reduce(control: ControlBlock, x: Array, out: Array, ufunc: np.ufunc, finish: Finish | None) -> Waits:
    """x, out: (n,); out may be x."""
    if control.size <= SUM_ALONE:
        yield from reduce(control, x, out, ufunc, finish)
        return
    for start, stop in chunks(len(x), STAGING_BYTES // x.itemsize):
        staged = _staged(control, x.dtype, stop - start)
        np.copyto(staged[control.me], x[start:stop])
        control.advance()
        yield control.advanced
        a, b = share(stop - start, x.itemsize, control.size, control.me)
        # No other rank reads this part of this rank's stage, so the total can take its place.
        total = staged[control.me][a:b]
        combine_all([source[a:b] for source in staged], total, ufunc, finish)
        control.advance()
        yield control.advanced
        for rank, source in enumerate(staged):
            a, b = share(stop - start, x.itemsize, control.size, rank)
            np.copyto(out[start:stop][a:b], source[a:b])


def reduce(control: ControlBlock, x: Array, out: Array | None, ufunc: np.ufunc, finish: Finish | None) -> Waits:
    """x: (n,); out: (n,) where the whole is wanted, None elsewhere."""
    for start, stop in chunks(len(x), STAGING_BYTES // x.itemsize):
        staged = _staged(control, x.dtype, stop - start)
        np.copyto(staged[control.me], x[start:stop])
        control.advance()
        yield control.advanced
        if out is not None:
            combine_all(staged, out[start:stop], ufunc, finish)


def reduce_scatter(
    control: ControlBlock, x: Array, out: Array, counts: Sequence[int], ufunc: np.ufunc, finish: Finish | None
) -> Waits:
    """x: (sum(counts),); out: (counts[me],)."""
    step = STAGING_BYTES // x.itemsize // control.size
    for start, stop in chunks(max(counts), step):
        staged = _staged(control, x.dtype, step * control.size)
        at = 0
        for rank, count in enumerate(counts):
            source = x[at + start : at + min(stop, count)] if start < count else x[:0]
            np.copyto(staged[control.me][rank * step :][: len(source)], source)
            at += count
        control.advance()
        yield control.advanced
        part = out[start:stop]
        if len(part):
            combine_all([source[control.me * step :][: len(part)] for source in staged], part, ufunc, finish)


def broadcast(control: ControlBlock, x: Array, root: int) -> Waits:
    """x: (n,) uint8, read on the root, written elsewhere."""
    sends, receives = ([(0, x)], []) if control.me == root else ([], [(root, 0, x)])
    return _exchange(control, sends, receives, None, STAGING_BYTES, len(x))


def gather(control: ControlBlock, x: Array, out: Array | None, counts: Sequence[int]) -> Waits:
    """x: (counts[me],) uint8; out: (sum(counts),) uint8 where the whole is wanted, None elsewhere."""
    receives, own = [], None
    if out is not None:
        parts = parts_of(out, counts)
        receives = [(rank, 0, parts[rank]) for rank in control.others]
        own = x, parts[control.me]
    return _exchange(control, [(0, x)], receives, own, STAGING_BYTES, max(counts))


def scatter(control: ControlBlock, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Waits:
    """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[me],) uint8."""
    me, step = control.me, _step(control)
    if x is None:
        return _exchange(control, [], [(root, _offset(me, root) * step, out)], None, step, max(counts))
    parts = parts_of(x, counts)
    sends = [(_offset(rank, me) * step, parts[rank]) for rank in control.others]
    return _exchange(control, sends, [], (parts[me], out), step, max(counts))


def all_to_all(control: ControlBlock, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Waits:
    """x: (sum(table[me]),) uint8; out: (...,) uint8; table[s][d]: how many bytes rank s sends to rank d."""
    me, step = control.me, _step(control)
    sent, received = parts_of(x, table[me]), parts_of(out, [row[me] for row in table])
    sends = [(_offset(rank, me) * step, sent[rank]) for rank in control.others]
    receives = [(rank, _offset(me, rank) * step, received[rank]) for rank in control.others]
    return _exchange(control, sends, receives, (sent[me], received[me]), step, max(max(row) for row in table))


def _exchange(
    control: ControlBlock,
    sends: Sequence[tuple[int, Array]],
    receives: Sequence[tuple[int, int, Array]],
    own: tuple[Array, Array] | None,
    step: int,
    longest: int,
) -> Waits:
    """Moves arrays of bytes through the stages, `step` bytes of each in a round.

    sends: where in this rank's stage, and what; receives: from which rank's stage, where in it, and into what
    own: what this rank copies for itself; longest: bytes of the longest array on any rank
    """
    for start, stop in chunks(longest, step):
        staging = control.turn()
        mine = staging[control.me]
        for at, source in sends:
            part = source[start:stop]
            mine[at : at + len(part)] = part
        control.advance()
        if own is not None:  # what needs no other rank fills the time until the others are there
            own[1][start:stop] = own[0][start:stop]
        yield control.advanced
        for rank, at, target in receives:
            part = target[start:stop]
            part[:] = staging[rank][at : at + len(part)]


def _step(control: ControlBlock) -> int:
    """Bytes of a stage for each other rank, in whole cache lines."""
    return STAGING_BYTES // (control.size - 1) // _ALIGN * _ALIGN


def _offset(rank: int, of: int) -> int:
    """Which part of another rank's stage is for `rank`: that one needs none of its own."""
    return rank if rank < of else rank - 1


def _staged(control: ControlBlock, dtype: np.dtype[Any], length: int) -> list[Array]:
    return [stage[: length * dtype.itemsize].view(dtype) for stage in control.turn()]
