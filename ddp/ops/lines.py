"""Straight lines by rows: each row of a matrix times a number of its own plus another, the core of a normalisation.

NumPy broadcasts slowly: where an operand repeats along the inner axis in one place and steps in another, its iterator
copies it through a buffer. Short rows therefore get their factors as products of thin matrices, which BLAS writes
faster; for long rows the buffer is made shorter than a row, so that nothing is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddp.ops._op import Array

LONG = 512  # elements of a row from which broadcasting is faster


class _Lines:
    """What both ways have: memory for one more matrix."""

    def __init__(self, xp: Any, rows: int, n: int, dtype: Any) -> None:
        self.xp, self._shape, self._dtype = xp, (rows, n), dtype
        self._scratch: Array | None = None

    def room(self, rows: int) -> Array:
        """(rows, n) to write to, the same memory each time."""
        if self._scratch is None:
            self._scratch = self.xp.empty(self._shape, self._dtype)
        return self._scratch[:rows]


class _Broadcasts(_Lines):
    """The plain way. w, b: (n,) or None, a factor and a summand for each column."""

    def __init__(self, xp: Any, rows: int, n: int, dtype: Any, w: Array | None, b: Array | None) -> None:
        super().__init__(xp, rows, n, dtype)
        self.w, self.b = w, b

    def line(self, x: Array, a: Array, c: Array | None, out: Array) -> None:
        """out = (x*a + c)*w + b. x, out: (rows, n); a, c: (rows,)."""
        self.xp.multiply(x, a[:, None], out=out)
        if c is not None:
            out += c[:, None]
        if self.w is not None:
            out *= self.w
        if self.b is not None:
            out += self.b

    def plane(self, x: Array, a: Array, y: Array, s: Array, c: Array | None, out: Array) -> None:
        """out = x*w*a + y*s + c. x, y, out: (rows, n); a, s, c: (rows,)."""
        other = self.xp.multiply(y, s[:, None], out=self.room(len(y)))
        if c is not None:
            other += c[:, None]
        self.xp.multiply(x, a[:, None], out=out)
        if self.w is not None:
            out *= self.w
        out += other


class _Products(_Lines):
    """By products of thin matrices: (rows, 2) of factors with (2, n) of w above b, or above 1."""

    def __init__(self, xp: Any, rows: int, n: int, dtype: Any, w: Array | None, b: Array | None) -> None:
        super().__init__(xp, rows, n, dtype)
        self.thin = xp.zeros((rows, 2), dtype)
        self.affine, self.ones = xp.empty((2, n), dtype), xp.ones((2, n), dtype)
        self.affine[0] = self.ones[0] = 1 if w is None else w
        self.affine[1] = 0 if b is None else b
        self.shifted = b is not None

    def _product(self, left: Any, right: Any, affine: Array, out: Array) -> Array:
        thin = self.thin[: len(out)]
        thin[:, 0] = left
        thin[:, 1] = right
        return self.xp.matmul(thin, affine, out=out)

    def line(self, x: Array, a: Array, c: Array | None, out: Array) -> None:
        """out = (x*a + c)*w + b. x, out: (rows, n); a, c: (rows,)."""
        self._product(a, 0, self.ones, out)  # not b: 0 times an infinite one would be nan
        out *= x
        if c is not None or self.shifted:
            out += self._product(0 if c is None else c, 1, self.affine, self.room(len(x)))

    def plane(self, x: Array, a: Array, y: Array, s: Array, c: Array | None, out: Array) -> None:
        """out = x*w*a + y*s + c. x, y, out: (rows, n); a, s, c: (rows,)."""
        other = self.room(len(x))
        self._product(0, s, self.ones, out)
        out *= y
        other = self._product(a, 0, self.ones, other)
        other *= x
        out += other
        if c is not None:
            out += self._product(0, c, self.ones, other)


_SHORT: dict[str, type[_Broadcasts | _Products]] = {"numpy": _Products, "cupy": _Broadcasts}
_COPIES = {"numpy": True, "cupy": False}  # whether broadcasting goes through a buffer


def lines(xp: Any, rows: int, n: int, dtype: Any, w: Array | None = None, b: Array | None = None) -> Any:
    """What draws lines over up to `rows` rows of `n` at a time, in the way that is fastest for them."""
    return (_Broadcasts if n >= LONG else _SHORT[xp.__name__])(xp, rows, n, dtype, w, b)


@contextlib.contextmanager
def long_rows(xp: Any, n: int) -> Iterator[None]:
    """Inside, NumPy broadcasts over rows of `n` without copies, if they are long."""
    if n < LONG or not _COPIES[xp.__name__]:
        yield
        return
    before = np.setbufsize(LONG // 2)
    try:
        yield
    finally:
        np.setbufsize(before)
