"""Lengths as callers say them: what is meant, and what cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import ArgumentError
from collectives.lengths import exchanged_rows, in_words, joined_rows, split_rows


def test_what_is_split_adds_up() -> None:
    for total, size in ((7, 3), (0, 2), (2, 4), (8, 4), (5, 1)):
        assert split_rows(total, None, size) == [len(part) for part in np.array_split(np.arange(total), size)]
    assert split_rows(7, (0, np.int64(7), 0), 3) == [0, 7, 0]
    with pytest.raises(ArgumentError, match="add up to 6, x has 7 rows"):
        split_rows(7, [1, 2, 3], 3)
    for bad in ([1, 2], [1, -1, 0], 7, ["a", 1, 1], [1, 1.5, 1]):
        with pytest.raises(ArgumentError, match="lengths should be"):
            split_rows(1, bad, 3)  # type: ignore[arg-type]


def test_what_is_joined_is_known_or_exchanged() -> None:
    given = (None, "equal", [1, 4, 0])
    assert [joined_rows(4, lengths, 1, 3) for lengths in given] == [None, [4, 4, 4], [1, 4, 0]]  # type: ignore[arg-type]
    assert joined_rows(4, None, 0, 1) == [4]


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
