"""How a kernel walks its arrays: few dimensions, in the order of memory. Pure, and once for each set of shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Walk(NamedTuple):
    """Sizes of dimensions, and of each array the elements from one to the next in each."""

    shape: Shape
    steps: tuple[Shape, ...]


def aligned(shape: Shape, own: Shape, steps: Shape) -> Shape:
    """The steps of an array of shape `own` that is broadcast to `shape`."""
    extra = len(shape) - len(own)
    return (*[0] * extra, *[0 if n == 1 and m != 1 else step for m, n, step in zip(shape[extra:], own, steps)])  # noqa: B905  # checked


def collapsed(shape: Shape, steps: Sequence[Shape]) -> Walk:
    """The same elements with fewer dimensions, in the order of the last array's memory.

    >>> collapsed((2, 3, 4), [(12, 4, 1), (0, 4, 1)])
    Walk(shape=(2, 12), steps=((12, 1), (0, 1)))
    """
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    dims.sort(key=lambda d: -abs(steps[-1][d]))
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in steps]
    for d in dims:
        if sizes and all(walk[-1] == each[d] * shape[d] for walk, each in zip(walks, steps, strict=True)):
            sizes[-1] *= shape[d]
            for walk, each in zip(walks, steps, strict=True):
                walk[-1] = each[d]
        else:
            sizes.append(shape[d])
            for walk, each in zip(walks, steps, strict=True):
                walk.append(each[d])
    if not sizes:
        return Walk((1,), tuple((0,) for _ in steps))
    return Walk(tuple(sizes), tuple(tuple(walk) for walk in walks))


def vectors(walk: Walk, outs: int, lanes: int) -> bool:
    """Whether `lanes` neighbours lie in one piece, or are one element, in every array, and never cross a row.

    outs: how many of the last arrays are written.
    """
    for a, steps in enumerate(walk.steps):
        if steps[-1] not in ((1,) if a >= len(walk.steps) - outs else (0, 1)):
            return False
        if any(step % lanes for step in steps[:-1]):
            return False
    return len(walk.shape) == 1 or walk.shape[-1] % lanes == 0


def small(walk: Walk) -> bool:
    """Whether 32 bits hold each offset, and each count with one stride of the grid beyond it."""
    reach = max(sum(abs(step) * (n - 1) for step, n in zip(steps, walk.shape, strict=True)) for steps in walk.steps)
    backwards = any(step < 0 for steps in walk.steps for step in steps)
    return not backwards and max(reach, math.prod(walk.shape)) < 2**31


def dense(shape: Shape, steps: Shape) -> Shape | None:
    """The order of dimensions, outermost first, in which such an array fills its memory; None if it does not."""
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -steps[d])
    expected = 1
    for d in reversed(order):
        if steps[d] != expected:
            return None
        expected *= shape[d]
    return (*[d for d in range(len(shape)) if shape[d] == 1], *order)


def row_major(shape: Shape) -> Shape:
    """The steps of an array in one piece."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))


class Reduction(NamedTuple):
    """kept: what each result stands for; over: what is reduced in it."""

    kept: Walk
    over: Walk


def split(shape: Shape, steps: Sequence[Shape], axes: Sequence[int]) -> Reduction:
    """A walk over `shape` cut in two, by the axes that go. The kept ones are in order: results are in one piece."""
    kept = [d for d in range(len(shape)) if d not in axes]
    out = row_major(tuple(shape[d] for d in kept))
    outer = collapsed(tuple(shape[d] for d in kept), [*[[each[d] for d in kept] for each in steps], out])  # type: ignore[list-item]
    inner = collapsed(tuple(shape[d] for d in axes), [tuple(each[d] for d in axes) for each in (*steps[1:], steps[0])])
    return Reduction(Walk(outer.shape, outer.steps[:-1]), Walk(inner.shape, (inner.steps[-1], *inner.steps[:-1])))


def team(rows: int, n: int, along: bool) -> tuple[bool, int]:
    """Whether each result has a block rather than a thread, and in how many chunks all are cut.

    along: neighbours in memory meet in one result. It depends on sizes alone, so that a sum is the same in every run.
    """
    block = (along and (n > 32 or rows < 4096)) or (not along and rows < 8192 and n > 64 and rows * (n // 16) < 8192)
    if block:
        return True, max(1, min(1024 // max(rows, 1), n // 2048))
    return False, max(1, min(n // 16, 65536 // max(rows, 1), 1024))
