"""Lengths as callers say them: what is meant, and what cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import ArgumentError
from collectives.lengths import check_lengths, even_lengths, exchanged_rows, in_words, joined_rows, split_rows


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [(7, 3, [3, 2, 2]), (0, 2, [0, 0]), (2, 4, [1, 1, 0, 0]), (8, 4, [2, 2, 2, 2]), (5, 1, [5])],
)
def test_even_lengths_are_array_splits(total: int, size: int, expected: list[int]) -> None:
    assert even_lengths(total, size) == expected
    assert [len(part) for part in np.array_split(np.arange(total), size)] == expected


def test_lengths_are_whole_numbers_one_a_rank() -> None:
    assert check_lengths((2, np.int64(0), 1), 3) == [2, 0, 1]
    for bad in ([1, 2], [1, -1, 0], None, ["a", 1, 1], [1, 1.5, 1]):
        with pytest.raises(ArgumentError, match="lengths should be"):
            check_lengths(bad, 3)  # type: ignore[arg-type]


def test_what_is_split_adds_up() -> None:
    assert split_rows(7, None, 3) == [3, 2, 2]
    assert split_rows(7, (0, 7, 0), 3) == [0, 7, 0]
    with pytest.raises(ArgumentError, match="add up to 6, x has 7 rows"):
        split_rows(7, [1, 2, 3], 3)


def test_what_is_joined_is_known_or_exchanged() -> None:
    assert joined_rows(4, None, 1, 3) is None
    assert joined_rows(4, None, 0, 1) == [4]
    assert joined_rows(4, "equal", 1, 3) == [4, 4, 4]
    assert joined_rows(4, [1, 4, 0], 1, 3) == [1, 4, 0]


TABLE = [[5, 6], [4, 0]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [(None, ([2, 2], None)), ([1, 3], ([1, 3], None)), ("equal", ([2, 2], [[2, 2]] * 2)), (TABLE, ([4, 0], TABLE))],
)
def test_what_is_exchanged(lengths: Any, expected: Any) -> None:
    assert exchanged_rows(4, lengths, 1, 2) == expected
    assert exchanged_rows(4, None, 0, 1) == ([4], [[4]])


@pytest.mark.parametrize(
    ("function", "lengths", "reason"),
    [
        (joined_rows, "even", "should be a list"),
        (joined_rows, [4, 3], "but x has 5 rows"),
        (exchanged_rows, "even", "a table"),
        (exchanged_rows, "equal", "a multiple of 2"),
        (exchanged_rows, [[1, 2]], "a table of 2 rows"),
        (exchanged_rows, [1, 3], "add up to 4"),
    ],
)
def test_what_cannot_be(function: Any, lengths: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        function(5, lengths, 0, 2)


def test_words_do_not_depend_on_the_kind_of_sequence() -> None:
    assert in_words((np.int64(1), 2), [1, 2]) == in_words([1, 2], [1, 2]) == " lengths [1, 2]"
    assert (in_words("equal", [1, 1]), in_words(None, None)) == (" lengths equal", "")
