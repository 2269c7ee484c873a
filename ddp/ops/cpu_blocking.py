"""Blocking for the CPU: arrays are worked through in pieces that stay in the L2 cache.

Three forms: `tiled` for chains of elementwise steps, `Step` for a product of few rows with one large matrix, and
`lines` for affine maps of rows. A device takes each array in one piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ddp.ops.op import BITS, Array, array_function

# Tiles: a chain of elementwise steps over a large array costs a trip to memory a step, over a tile only to the cache.
#
# A kernel is a function of tiles that writes into those it is given. On a GPU one tile is the whole array.

TILE = 128 * 1024  # bytes of each array: large against the cost of a call, small enough for four in a level 2 cache

Kernel = Callable[..., None]


def tiled(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int = 0, **parameters: Any) -> None:
    """kernel(xp, *tiles, *scratch tiles) over `arrays` of one shape; None stays None.

    Arrays that are written to are C-contiguous. Small ones are one tile, in their own shape.
    """
    run_tiles(xp, kernel, arrays, scratch, parameters)


def run_whole(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int, parameters: Any) -> None:
    kernel(xp, *arrays, *[xp.empty_like(arrays[0]) for _ in range(scratch)], **parameters)


@array_function
def run_tiles(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int, parameters: Any) -> None:
    first = arrays[0]
    assert first is not None
    size = first.size
    step = TILE // first.itemsize
    if size <= step:
        run_whole(xp, kernel, arrays, scratch, parameters)
        return
    flat = [None if each is None else xp.ascontiguousarray(each).reshape(-1) for each in arrays]
    extra = [xp.empty(step, first.dtype) for _ in range(scratch)]
    for start in range(0, size, step):
        end = start + step
        if end > size:
            extra = [each[: size - start] for each in extra]
        kernel(xp, *[None if each is None else each[start:end] for each in flat], *extra, **parameters)


NARROW = 2  # bytes of float16, whose steps are taken in float32: NumPy's are slow, and each would be rounded


def curve(xp: Any, kernel: Kernel, x: Array, slope: bool, scratch: int, **parameters: Any) -> tuple[Array, Any]:
    """z = f(x) and with `slope` f'(x), else None, by kernel(xp, x, z, f'(x) or None, *scratch).

    Where both share their costly part, f'(x) is kept instead of x: as much memory, and backward is one product.
    """
    if x.dtype.itemsize == NARROW:
        out, d = curve(xp, kernel, x.astype("float32"), slope, scratch, **parameters)
        return out.astype(x.dtype), d.astype(x.dtype) if slope else None
    out = xp.empty(x.shape, x.dtype)
    d = xp.empty(x.shape, x.dtype) if slope else None
    tiled(xp, kernel, (x, out, d), scratch, **parameters)
    return out, d


def product(xp: Any, kernel: Kernel, g: Array, saved: Sequence[Array], scratch: int = 0, **parameters: Any) -> Array:
    """dx by kernel(xp, g, *saved, dx, *scratch): a backward that takes several steps an element."""
    dx = xp.empty(g.shape, g.dtype)
    tiled(xp, kernel, (g, *saved, dx), scratch, **parameters)
    return dx


@array_function
def blend(xp: Any, mask: Array, a: Array, b: Array, out: Array) -> None:
    """out = a where mask, else b: floating arrays of one dtype and size; `out` may be one of them."""
    # As `select` does it: a choice by integer arithmetic doesn't branch at every element.
    kind = BITS[a.dtype.itemsize]
    one, other = a.view(kind), b.view(kind)
    difference = xp.empty(out.shape, kind)
    xp.bitwise_xor(one, other, out=difference)
    xp.multiply(difference, mask, out=difference)
    xp.bitwise_xor(difference, other, out=out.view(kind))


@array_function
def keep(xp: Any, mask: Array, a: Array, out: Array) -> None:
    """out = a where mask, else 0: floating arrays of one dtype and size; `out` may be `a`."""
    kind = BITS[a.dtype.itemsize]
    xp.multiply(a.view(kind), mask, out=out.view(kind))


# Few rows times one large matrix, again and again: where OpenBLAS packs the matrix anew each time, cut it into strips.
#
# Packing takes as long as multiplying where the rows are few. Strips of columns below the size from which it packs (on
# AVX-512) make the product up to twice as fast: 16 x 256 x 1024 at 104 instead of 47 GFLOP/s.


@array_function
def largest_unpacked(xp: Any) -> int:
    """The most that rows * depth * columns may be for OpenBLAS to multiply without packing."""
    return 1_000_000


@array_function
def matmul_into(xp: Any, a: Array, b: Array, out: Array) -> Array:
    """a @ b into `out`; no factor is of 16 bits."""
    result: Array = xp.matmul(a, b, out=out)
    return result


NARROWEST = 32


def strips(rows: int, depth: int, columns: int, most: int) -> int:
    """Into how many equal strips of columns (rows, depth) @ (depth, columns) is cut: 1 where that does not help."""
    for count in range(1, columns // NARROWEST + 1):
        if columns % count == 0 and rows * depth * (columns // count) <= most:
            return count
    return 1


def _stripped(x: Array, count: int) -> Array:
    """x: (n, columns) as (count, n, columns/count), a view."""
    return x.reshape(x.shape[0], count, x.shape[1] // count).swapaxes(0, 1)


class BlockedProduct:
    """The product that each time step takes with the same matrix w: (depth, columns), by strips."""

    def __init__(self, xp: Any, rows: int, w: Array) -> None:
        self.xp = xp
        self.count = strips(rows, w.shape[0], w.shape[1], largest_unpacked(xp))
        self.w = _stripped(xp.ascontiguousarray(w), self.count)

    def __call__(self, x: Array, out: Array) -> Array:
        """x @ w into `out`, which is contiguous, and returned. x: (rows, depth)."""
        matmul_into(self.xp, x, self.w, _stripped(out, self.count))
        return out


# Straight lines by rows: each row of a matrix times a number of its own plus another, the core of a normalisation.
#
# NumPy broadcasts slowly: where an operand repeats along the inner axis in one place and steps in another, its iterator
# copies it through a buffer. Short rows therefore get their factors as products of thin matrices, which BLAS writes
# faster; for long rows the buffer is made shorter than a row, so that nothing is copied.

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


class BroadcastLines(_Lines):
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


@array_function
def lines(xp: Any, rows: int, n: int, dtype: Any, w: Array | None = None, b: Array | None = None) -> Any:
    """What draws lines over up to `rows` rows of `n` at a time, in the way that is fastest for them."""
    return (BroadcastLines if n >= LONG else _Products)(xp, rows, n, dtype, w, b)


@array_function
def long_rows(xp: Any, n: int) -> contextlib.AbstractContextManager[None]:
    """Inside, NumPy broadcasts over rows of `n` without copies, if they are long."""
    return _buffer_size(LONG // 2) if n >= LONG else contextlib.nullcontext()


@contextlib.contextmanager
def _buffer_size(size: int) -> Iterator[None]:
    before = np.setbufsize(size)
    try:
        yield
    finally:
        np.setbufsize(before)
