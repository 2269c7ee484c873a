"""How data moves between the ranks of a node: read where it lies if all can see it, else in tiles over the stages.

A rank's contribution is *visible* to the others if it fits into its slot, or lies in memory that they share. Otherwise
it goes through the stages: in round k every rank copies its k-th tile into one of its two stages, says so, waits until
all have, and takes what it needs from the others' while these are still in a cache.

Reductions combine the ranks' values in rank order, whichever way the data came and whoever does it: the same inputs
give the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from collectives.backends.shm.control_block import STAGING_BYTES, ControlBlock
from collectives.transport import Finish, chunks

Array = np.ndarray[Any, Any]
#: Yields what to wait for.
Waits = Generator[Callable[[], bool], None, None]

# Up to this many ranks each one sums whole tiles for itself: fewer phases, and nothing to copy back.
_SUM_ALONE = 3
_ALIGN = 64  # bytes: no two ranks write into the same cache line


def combine_all(sources: Sequence[Array], out: Array, ufunc: np.ufunc, scratch: Array | None = None) -> None:
    """out = sources[0] ∘ sources[1] ∘ …, in this order.

    scratch: like out; for what lies between, where out is the memory of one of three or more sources
    """
    if len(sources) == 1:
        if out is not sources[0]:
            np.copyto(out, sources[0])
        return
    between = out if scratch is None else scratch
    left = sources[0]
    for right in sources[1:-1]:
        ufunc(left, right, out=between)
        left = between
    ufunc(left, sources[-1], out=out)


def share(length: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """The part of `length` items that a rank reduces for all; parts begin on cache lines."""
    line = max(1, _ALIGN // itemsize)
    lines = -(-length // line)
    return min(length, lines * rank // size * line), min(length, lines * (rank + 1) // size * line)


# Visible contributions -----------------------------------------------------------------------------------------------


def reduce_visible(sources: Sequence[Array], out: Array, ufunc: np.ufunc, finish: Finish | None) -> None:
    """out = the reduction of the sources, tile by tile. All: (n,) of one dtype; out overlaps none of them."""
    for start, stop in chunks(len(out), STAGING_BYTES // out.itemsize):
        part = out[start:stop]
        combine_all([source[start:stop] for source in sources], part, ufunc)
        if finish is not None:
            finish(part)


def reduce_into_all(
    sources: Sequence[Array], outs: Sequence[Array], me: int, ufunc: np.ufunc, finish: Finish | None
) -> None:
    """This rank's share of the reduction, into every rank's out; `outs[rank]` may be `sources[rank]`."""
    length, itemsize = len(outs[me]), outs[me].itemsize
    first, last = share(length, itemsize, len(sources), me)
    step = STAGING_BYTES // itemsize
    scratch = np.empty(min(step, last - first), outs[me].dtype) if len(sources) > 2 else None
    others = [out for rank, out in enumerate(outs) if rank != me]
    for start, stop in chunks(last - first, step):
        start, stop = first + start, first + stop
        part = outs[me][start:stop]
        between = None if scratch is None else scratch[: stop - start]
        combine_all([source[start:stop] for source in sources], part, ufunc, between)
        if finish is not None:
            finish(part)
        for out in others:
            np.copyto(out[start:stop], part)


# Through the stages --------------------------------------------------------------------------------------------------


def all_reduce(control: ControlBlock, x: Array, out: Array, ufunc: np.ufunc, finish: Finish | None) -> Waits:
    """x, out: (n,); out may be x."""
    alone = control.size <= _SUM_ALONE
    scratch = None if alone else np.empty(STAGING_BYTES // x.itemsize // control.size + _ALIGN, x.dtype)
    for start, stop in chunks(len(x), STAGING_BYTES // x.itemsize):
        staged = _staged(control, x.dtype, stop - start)
        np.copyto(staged[control.me], x[start:stop])
        control.advance()
        yield control.advanced
        part = out[start:stop]
        if alone:
            combine_all(staged, part, ufunc)
            if finish is not None:
                finish(part)
            continue
        a, b = share(stop - start, x.itemsize, control.size, control.me)
        # Nobody else reads this part of this rank's stage, so the total can take its place.
        assert scratch is not None
        total = staged[control.me][a:b]
        combine_all([source[a:b] for source in staged], total, ufunc, scratch[: b - a])
        if finish is not None:
            finish(total)
        control.advance()
        yield control.advanced
        for rank, source in enumerate(staged):
            a, b = share(stop - start, x.itemsize, control.size, rank)
            np.copyto(part[a:b], source[a:b])


def reduce(control: ControlBlock, x: Array, out: Array | None, ufunc: np.ufunc, finish: Finish | None) -> Waits:
    """x: (n,); out: (n,) on the root, None elsewhere."""
    for start, stop in chunks(len(x), STAGING_BYTES // x.itemsize):
        staged = _staged(control, x.dtype, stop - start)
        np.copyto(staged[control.me], x[start:stop])
        control.advance()
        yield control.advanced
        if out is not None:
            part = out[start:stop]
            combine_all(staged, part, ufunc)
            if finish is not None:
                finish(part)


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
            combine_all([source[control.me * step :][: len(part)] for source in staged], part, ufunc)
            if finish is not None:
                finish(part)


def broadcast(control: ControlBlock, x: Array, root: int) -> Waits:
    """x: (n,) uint8, read on the root, written elsewhere."""
    for start, stop in chunks(len(x), STAGING_BYTES):
        staged = control.turn()[root][: stop - start]
        if control.me == root:
            np.copyto(staged, x[start:stop])
        control.advance()
        yield control.advanced
        if control.me != root:
            np.copyto(x[start:stop], staged)


def gather(control: ControlBlock, x: Array, out: Array | None, counts: Sequence[int]) -> Waits:
    """x: (counts[me],) uint8; out: (sum(counts),) uint8 where the whole is wanted, None elsewhere."""
    for start, stop in chunks(max(counts), STAGING_BYTES):
        staging = control.turn()
        mine = x[start:stop]
        np.copyto(staging[control.me][: len(mine)], mine)
        control.advance()
        if out is not None:  # what needs nobody fills the time until the others are there
            np.copyto(out[sum(counts[: control.me]) + start :][: len(mine)], mine)
        yield control.advanced
        at = 0
        for rank, count in enumerate(counts):
            if out is not None and rank != control.me and start < count:
                length = min(stop, count) - start
                np.copyto(out[at + start :][:length], staging[rank][:length])
            at += count


def scatter(control: ControlBlock, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Waits:
    """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[me],) uint8."""
    step = _step(control)
    for start, stop in chunks(max(counts), step):
        staged = control.turn()[root]
        if x is not None:
            _stage(staged, x, counts, root, start, stop, step)
        control.advance()
        part = out[start:stop]
        if x is not None:
            np.copyto(part, x[sum(counts[:root]) + start :][: len(part)])
        yield control.advanced
        if x is None:
            np.copyto(part, staged[_berth(control.me, root) * step :][: len(part)])


def all_to_all(control: ControlBlock, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Waits:
    """x: (sum(table[me]),) uint8; out: (...,) uint8; table[s][d]: how many bytes rank s sends to rank d."""
    me, step = control.me, _step(control)
    sends, receives = table[me], [row[me] for row in table]
    own_from, own_to = sum(sends[:me]), sum(receives[:me])
    for start, stop in chunks(max(max(row) for row in table), step):
        staging = control.turn()
        _stage(staging[me], x, sends, me, start, stop, step)
        control.advance()
        own = x[own_from + start : own_from + min(stop, sends[me])] if start < sends[me] else x[:0]
        np.copyto(out[own_to + start :][: len(own)], own)
        yield control.advanced
        at = 0
        for rank, count in enumerate(receives):
            if rank != me and start < count:
                length = min(stop, count) - start
                np.copyto(out[at + start :][:length], staging[rank][_berth(me, rank) * step :][:length])
            at += count


def _step(control: ControlBlock) -> int:
    """Bytes of a stage for each other rank, in whole cache lines."""
    return STAGING_BYTES // (control.size - 1) // _ALIGN * _ALIGN


def _berth(rank: int, of: int) -> int:
    """Which part of another rank's stage is for `rank`: that one needs none of its own."""
    return rank if rank < of else rank - 1


def _stage(staged: Array, x: Array, counts: Sequence[int], me: int, start: int, stop: int, step: int) -> None:
    """Copies bytes `start` to `stop` of what each other rank shall get into that rank's part of the stage."""
    at = 0
    for rank, count in enumerate(counts):
        if rank != me and start < count:
            length = min(stop, count) - start
            np.copyto(staged[_berth(rank, me) * step :][:length], x[at + start :][:length])
        at += count


def _staged(control: ControlBlock, dtype: np.dtype[Any], length: int) -> list[Array]:
    return [stage[: length * dtype.itemsize].view(dtype) for stage in control.turn()]
