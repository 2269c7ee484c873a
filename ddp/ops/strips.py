"""Few rows times one large matrix, again and again: where OpenBLAS packs the matrix anew each time, cut it into strips.

Packing takes as long as multiplying where the rows are few. Strips of columns below the size from which it packs (on
AVX-512) make the product up to twice as fast: 16 x 256 x 1024 at 104 instead of 47 GFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array

# The most that rows * depth * columns may be.
UNPACKED = {"numpy": 1_000_000, "cupy": 1 << 62}
# Into a given array; here nothing is of 16 bits. CuPy's: `ddp.ops.cuda.entries`
MATMULS: dict[str, Callable[..., Array]] = {
    "numpy": lambda xp, a, b, out: xp.matmul(a, b, out=out),
}
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


class Step:
    """The product that each time step takes with the same matrix w: (depth, columns), by strips."""

    def __init__(self, xp: Any, rows: int, w: Array) -> None:
        self.xp, self.matmul = xp, MATMULS[xp.__name__]
        self.count = strips(rows, w.shape[0], w.shape[1], UNPACKED[xp.__name__])
        self.w = _stripped(xp.ascontiguousarray(w), self.count)

    def __call__(self, x: Array, out: Array) -> Array:
        """x @ w into `out`, which is contiguous, and returned. x: (rows, depth)."""
        self.matmul(self.xp, x, self.w, _stripped(out, self.count))
        return out
