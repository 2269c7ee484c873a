"""What a reduction means: pairs without meaning, scales, and how a mean is divided."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives import ArgumentError, DtypeError
from collectives.reduction import BFLOAT16, ReduceOp, check_scale, combine_in_tree, divide_and_scale, tree, wire_dtype


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [
        ("?", "sum", "it has max, min"),
        ("c8", "max", "it has sum, mean, prod"),
        ("O", "sum", "it cannot be reduced"),
        ("float8_e4m3fn", "max", "it cannot be reduced"),
    ],
)
def test_pairs_without_meaning(dtype: str, op: str, why: str) -> None:
    with pytest.raises(DtypeError, match=why):
        wire_dtype(np.dtype(getattr(ml_dtypes, dtype, dtype)), ReduceOp(op))


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8", "c8"])
def test_scales_are_real_numbers(dtype: str) -> None:
    for good in (0.5, 2, Fraction(1, 2), np.float32(0.5), np.array(0.5), BFLOAT16.type(0.5), lambda: 0.5):
        check_scale(np.dtype(dtype), good)
    for bad in ("0.5", 1j, np.ones(3), [0.5], np.array("a")):
        with pytest.raises(ArgumentError, match="scale should be a real number"):
            check_scale(np.dtype(dtype), bad)
    with pytest.raises(DtypeError, match="scale needs a floating or complex dtype"):
        check_scale(np.dtype("i4"), 0.5)


def test_a_scale_is_applied_in_the_dtype_of_the_array_whatever_its_own() -> None:
    answers = []
    for scale in (0.1, np.float64(0.1), np.array(0.1)):
        total = np.linspace(0, 1, 1001, dtype=np.float32)
        # NumPy's scalars and 0-d arrays are accepted, too.
        divide_and_scale(total, ReduceOp.SUM, 2, scale)  # type: ignore[arg-type]
        answers.append(total.tobytes())
    assert len(set(answers)) == 1


def test_a_mean_is_divided_not_multiplied_unless_that_is_exact() -> None:
    for size in range(2, 70):
        total = np.arange(100, dtype=np.float32) * np.float32(0.1)
        expected = total / np.float32(size)
        divide_and_scale(total, ReduceOp.MEAN, size, None)
        assert_array_equal(total, expected)


@pytest.mark.parametrize(
    ("count", "steps", "sum_of"),
    [
        (1, (), "0"),
        (3, ((0, 1), (0, 2)), "((0+1)+2)"),
        (5, ((0, 1), (2, 3), (0, 2), (0, 4)), "(((0+1)+(2+3))+4)"),
        (6, ((0, 1), (2, 3), (0, 2), (4, 5), (0, 4)), "(((0+1)+(2+3))+(4+5))"),
    ],
)
def test_the_tree_over_ranks(count: int, steps: tuple[tuple[int, int], ...], sum_of: str) -> None:
    assert tree(count) == steps
    assert combine_in_tree([str(rank) for rank in range(count)], lambda a, b, out=None: f"({a}+{b})") == sum_of
