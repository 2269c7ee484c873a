"""Which elements a rank owns: one range of every bucket, so that each rank's state and work are 1/size of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ddp._layout import Place


class Piece(NamedTuple):
    """What a range holds of one gradient: its elements `start` to `stop`, which stand in the range from `at` on."""

    number: int
    start: int
    stop: int
    at: int


def split_bucket(length: int, line: int, size: int) -> list[int]:
    """How many elements of a bucket each rank owns: as even as possible in whole cache lines.

    A bucket of a multiple of line * size elements is split evenly; others need collectives of uneven lengths.

    length: elements; line: elements in a cache line. `split_bucket(100, 16, 3) == [32, 32, 36]`
    """
    lines = -(-length // line)
    ends = [min(length, lines * rank // size * line) for rank in range(size + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def cut_range(places: Sequence[tuple[int, Place]], first: int, last: int) -> list[Piece]:
    """What elements `first` to `last` of a bucket hold. An empty gradient is in every range that starts at 0.

    places: (number, place) of each gradient in the bucket
    """
    pieces = []
    for number, place in places:
        start, stop = max(place.start, first), min(place.stop, last)
        if start < stop:
            pieces.append(Piece(number, start - place.start, stop - place.start, start - first))
        elif place.start == place.stop and first == 0:
            pieces.append(Piece(number, 0, 0, 0))
    return pieces
