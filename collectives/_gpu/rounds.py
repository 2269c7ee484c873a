"""How a large array is cut so that copies and transfers overlap: pure functions, the same cuts on every rank."""

from __future__ import annotations

from collections.abc import Sequence

#: From where to where, in elements.
Span = tuple[int, int]


def spans(total: int, most: int) -> list[Span]:
    """`spans(10, 4) == [(0, 4), (4, 8), (8, 10)]`; nothing at all for a total of 0."""
    return [(start, min(start + most, total)) for start in range(0, total, most)]


def part_spans(counts: Sequence[int], most: int) -> list[list[Span]]:
    """Rounds in which each of several parts goes on by at most `most`: [round][part], within the part.

    `part_spans([5, 2], 3) == [[(0, 3), (0, 2)], [(3, 5), (2, 2)]]`
    """
    longest = max(counts, default=0)
    return [[(min(start, count), min(start + most, count)) for count in counts] for start in range(0, longest, most)]


def lengths(parts: Sequence[Span]) -> list[int]:
    """`lengths([(0, 3), (2, 2)]) == [3, 0]`"""
    return [stop - start for start, stop in parts]
