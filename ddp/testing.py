"""Compares tensors in tests, with PyTorch's tolerances."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError

__all__ = ["assert_close"]

# rtol and atol by dtype. Other dtypes are compared exactly.
_TOLERANCES = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_dtype: bool = True,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """Asserts that shapes and dtypes are equal, and |actual - expected| <= atol + rtol * |expected| everywhere.

    actual, expected: tensors on any devices, NumPy arrays or numbers
    rtol, atol: give both or none. None: (1e-3, 1e-5) for float16, (1.6e-2, 1e-5) for bfloat16, (1.3e-6, 1e-5) for
    float32, (1e-7, 1e-7) for float64, 0 for others; if dtypes differ, the larger ones
    equal_nan: whether nan equals nan. check_dtype: whether dtypes have to be the same
    msg: the error's text, or a function of the text that it would have

    Differences are taken in float64.

    Raises: AssertionError, which says how many elements differ, the greatest difference and where, or how shapes or
    dtypes differ; ArgumentError if only one of rtol and atol is given; DtypeError for values of other types.
    """
    if (rtol is None) != (atol is None):
        raise ArgumentError(f"assert_close: expected both rtol and atol or none, got {rtol=}, {atol=}")
    problem = _problem(_as_array(actual), _as_array(expected), (rtol, atol), equal_nan, check_dtype)
    if problem:
        raise AssertionError(msg(problem) if callable(msg) else msg or problem)


def _as_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy(force=True)
    if isinstance(value, np.ndarray | Number):
        return np.asarray(value)
    raise DtypeError(f"assert_close: expected a tensor, an array or a number, got {type(value).__name__}")


def _problem(a: Any, e: Any, given: Any, equal_nan: bool, check_dtype: bool) -> str:
    """Says how the arrays differ; returns "" if they are close."""
    if a.shape != e.shape:
        return f"the shape is {a.shape}, expected {e.shape}"
    if check_dtype and a.dtype != e.dtype:
        return f"the dtype is {a.dtype}, expected {e.dtype}"
    if given[0] is None:
        given = max(_TOLERANCES.get(x.dtype.name, (0, 0)) for x in (a, e))
    rtol, atol = given
    wrong = a != e
    dtype = np.result_type(a, e, "float64")
    a = a.astype(dtype)
    e = e.astype(dtype)
    with np.errstate(all="ignore"):
        difference = abs(a - e)
        allowed = atol + rtol * abs(e)
    # Without a tolerance, only the exact comparison counts: float64 does not tell large integers apart.
    wrong &= ~((difference <= allowed) & (allowed > 0) & np.isfinite(difference))
    if equal_nan:
        wrong &= ~(np.isnan(a) & np.isnan(e))
    if not wrong.any():
        return ""
    difference = np.where(wrong, difference, 0)
    place = tuple(map(int, np.unravel_index(difference.argmax(), difference.shape)))
    return (
        f"{wrong.sum()} of {wrong.size} elements ({wrong.mean():.1%}) are not close ({atol=:g}, {rtol=:g}): the "
        f"greatest difference is {difference[place]:.6g} at {place}: got {a[place]}, expected {e[place]}"
    )
