"""Who reduces which part, and in which order."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.backends.shm.algorithms import combine_all, part_to_reduce
from collectives.native import BFLOAT16, FLOAT16
from collectives.reduction import combine_in_tree


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


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("place", ["beside", "first", "last"])
def test_values_are_combined_in_the_order_of_the_tree(size: int, place: str) -> None:
    sources = list(np.random.default_rng(size).normal(size=(size, 50)).astype(np.float32))
    want = combine_in_tree(sources, np.add).copy()
    out = {"first": sources[0], "last": sources[-1]}.get(place, np.empty(50, np.float32))
    combine_all(sources, out, np.add, None)
    assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.maximum, np.minimum])
def test_floats_of_16_bits_are_combined_and_finished_in_float32(dtype: np.dtype, ufunc: np.ufunc) -> None:
    sources = list(np.random.default_rng(1).integers(0, 1 << 16, (3, 70_000), np.uint16).view(dtype))  # of all kinds
    with np.errstate(all="ignore"):
        want = sources[0].astype(np.float32)
        for source in sources[1:]:
            ufunc(want, source.astype(np.float32), out=want)
        want = (want / 3).astype(dtype)
        combine_all(sources, sources[1], ufunc, lambda total: np.divide(total, 3, out=total))
    assert sources[1].tobytes() == want.tobytes()
