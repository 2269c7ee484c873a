"""How matrices lie in memory, as cuBLASLt wants to hear it: pure, so that the test is the table.

A matrix is taken as it is if its elements lie side by side along one axis and forward along the other: so a transpose
costs nothing. Leading axes are one batch if one stride leads from each matrix to the next; 0 is a stride, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

LOOPS = 16  # products that are rather launched one by one than having a factor copied
MOST = (1 << 31) - 1  # rows, columns or matrices of one product

#: What a pointer's last byte says of its alignment in bytes, as far as the library cares.
ALIGNMENTS = tuple(next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if byte % size == 0) for byte in range(256))


class Lying(NamedTuple):
    """across: elements of a column, not of a row, are neighbours; lead: elements from one row or column to the next."""

    across: bool
    lead: int


def elements(strides: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Strides in elements; None if one is not a whole number of them."""
    return None if any(each % itemsize for each in strides) else tuple([each // itemsize for each in strides])


def lying(shape: Sequence[int], strides: Sequence[int]) -> Lying | None:
    """How a matrix lies, None if it must be copied. strides: in elements."""
    (rows, columns), (down, right) = shape, strides
    if (right == 1 or columns == 1) and (down >= max(columns, 1) or rows == 1):
        return Lying(False, down if rows > 1 else max(columns, 1))
    if (down == 1 or rows == 1) and (right >= max(rows, 1) or columns == 1):
        return Lying(True, right if columns > 1 else max(rows, 1))
    return None


def one_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride from each matrix of leading axes to the next, None if there is no single one."""
    merged = _merged(shape, [strides])
    if not merged:
        return 0
    return merged[0][1][0] if len(merged) == 1 else None


class Batch(NamedTuple):
    """One product of `many` matrices for each of `starts`, where each operand begins; steps: from each to the next."""

    many: int
    steps: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def batch(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Batch | None:
    """Leading axes as batches; strides: of each operand, in elements. None if that takes more than LOOPS products."""
    axes = _merged(shape, strides)
    if not axes:
        return Batch(1, (0,) * len(strides), ((0,) * len(strides),))
    widest = max(range(len(axes)), key=lambda i: axes[i][0])
    count, steps = axes.pop(widest)
    if prod([size for size, _ in axes]) > LOOPS or count > MOST or any(step < 0 for step in steps):
        return None
    return Batch(count, steps, tuple(_starts(axes, len(strides))))


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """The axes, outermost first, without those of one element; two are one where no operand can tell them apart."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in reversed(list(zip(shape, *strides, strict=True))):
        if size == 1:
            continue
        if found:
            inner, inner_steps = found[-1]
            if all(step == below * inner for step, below in zip(steps, inner_steps, strict=True)):
                found[-1] = (inner * size, inner_steps)
                continue
        found.append((size, tuple(steps)))
    return found[::-1]


def _starts(axes: Sequence[tuple[int, tuple[int, ...]]], operands: int) -> Iterator[tuple[int, ...]]:
    if not axes:
        yield (0,) * operands
        return
    (size, steps), *rest = axes
    for i in range(size):
        for inner in _starts(rest, operands):
            yield tuple([i * step + start for step, start in zip(steps, inner, strict=True)])
