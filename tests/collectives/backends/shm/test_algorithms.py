"""Who reduces which part. In which order: the contract's reductions in tree order, and test_contract_on_nodes.py."""

from __future__ import annotations

import pytest

from collectives.backends.shm.algorithms import part_to_reduce


@pytest.mark.parametrize(
    ("length", "itemsize", "size", "expected"),
    [
        (64, 4, 2, [(0, 32), (32, 64)]),
        (65, 4, 2, [(0, 32), (32, 65)]),
        (48, 4, 2, [(0, 16), (16, 48)]),  # whole cache lines: 16 floats each
        (5, 8, 3, [(0, 0), (0, 0), (0, 5)]),
        (0, 4, 2, [(0, 0), (0, 0)]),
        (7, 128, 3, [(0, 2), (2, 4), (4, 7)]),
    ],
)
def test_part_to_reduce(length: int, itemsize: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert [part_to_reduce(length, itemsize, size, rank) for rank in range(size)] == expected
