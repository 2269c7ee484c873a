"""Which rank owns what, as tables."""

from __future__ import annotations

import pytest

from ddp._layout import BucketSlice
from ddp.parallel.zero.shards import Piece, cut_range, split_bucket


@pytest.mark.parametrize(
    ("length", "size", "lengths"),
    [(96, 3, [32, 32, 32]), (96, 1, [96]), (100, 3, [32, 32, 36]), (16, 3, [0, 0, 16]), (5, 2, [0, 5]), (0, 2, [0, 0])],
)
def test_a_bucket_is_split_in_whole_cache_lines(length: int, size: int, lengths: list[int]) -> None:
    assert split_bucket(length, 16, size) == lengths


def part(start: int, stop: int) -> BucketSlice:
    return BucketSlice(bucket=0, start=start, stop=stop, shape=(stop - start,))


def test_a_range_cuts_through_gradients() -> None:
    slices = {7: part(0, 20), 3: part(32, 40), 5: part(48, 48), 4: part(48, 60)}
    assert cut_range(slices, 0, 16) == [Piece(7, 0, 16, 0), Piece(5, 0, 0, 0)]
    assert cut_range(slices, 16, 48) == [Piece(7, 16, 20, 0), Piece(3, 0, 8, 16)]
    assert cut_range(slices, 48, 64) == [Piece(4, 0, 12, 0)]
    assert cut_range(slices, 20, 32) == []
