"""2-d convolution as matrix products over tiles: a few samples at a time are unfolded into columns that stay in cache.

Unfolding the whole batch would stream kernel-size times the input through memory, twice. The columns are not saved for
backward: unfolding a tile again is cheaper than reading back a copy of it that has left the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total
from ddp.ops.products import product

TILE = 1 << 18  # bytes of columns at a time: half of a small L2 cache, the products take the other half

Pair = tuple[int, int]


def output_size(n: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many positions a window of `kernel` takes along an axis of length `n`; not positive if it does not fit."""
    return (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


class _Unfold:
    """The columns of a batch, tile by tile. x: (N, C, H, W); a tile: (n, groups, C/groups * KH * KW, OH * OW)."""

    def __init__(
        self,
        xp: Any,
        dtype: Any,
        shape: tuple[int, ...],
        filters: tuple[int, ...],
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> None:
        self.xp, self.dtype, self.stride, self.padding, self.dilation = xp, dtype, stride, padding, dilation
        self.n, c, h, width = shape
        self.kernel = filters[2], filters[3]
        self.out: Pair = (
            output_size(h, self.kernel[0], stride[0], padding[0], dilation[0]),
            output_size(width, self.kernel[1], stride[1], padding[1], dilation[1]),
        )
        self.column = (groups, c // groups * self.kernel[0] * self.kernel[1], self.out[0] * self.out[1])
        nbytes = self.column[0] * self.column[1] * self.column[2] * dtype.itemsize
        self.samples = max(1, min(self.n, TILE // max(nbytes, 1)))
        self.framed = (c, h + 2 * padding[0], width + 2 * padding[1])

    def tiles(self) -> Iterator[slice]:
        for start in range(0, self.n, self.samples):
            yield slice(start, min(start + self.samples, self.n))

    def columns(self, x: Array) -> Iterator[tuple[slice, Array]]:
        """Each tile of samples of x (N, C, H, W) with its columns, in one buffer that the next tile overwrites."""
        xp, (ph, pw) = self.xp, self.padding
        c, h, w = self.framed
        padded = ph > 0 or pw > 0
        if padded:
            frame = xp.zeros((self.samples, c, h, w), self.dtype)  # the border stays zero, tile after tile
        unfolded = xp.empty((self.samples, c, *self.kernel, *self.out), self.dtype)
        for tile in self.tiles():
            source = x[tile]
            n = source.shape[0]
            if padded:
                frame[:n, :, ph : h - ph, pw : w - pw] = source
                source = frame[:n]
            unfolded[:n] = self.windows(source)
            yield tile, unfolded[:n].reshape(n, *self.column)

    def windows(self, framed: Array) -> Array:
        """A view of `framed` (n, C, H, W) as (n, C, KH, KW, OH, OW): what each kernel element sees."""
        n, c, h, w = framed.strides
        return self.xp.lib.stride_tricks.as_strided(
            framed,
            (*framed.shape[:2], *self.kernel, *self.out),
            (n, c, h * self.dilation[0], w * self.dilation[1], h * self.stride[0], w * self.stride[1]),
        )

    def fold(self, columns: Array, into: Array) -> None:
        """Adds columns (n, groups, ..., OH * OW) into the framed samples (n, C, H, W) that they were unfolded from."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        columns = columns.reshape(*into.shape[:2], *self.kernel, oh, ow)
        for i in range(self.kernel[0]):
            rows = slice(i * dh, i * dh + sh * (oh - 1) + 1, sh)
            for j in range(self.kernel[1]):
                into[:, :, rows, j * dw : j * dw + sw * (ow - 1) + 1 : sw] += columns[:, :, i, j]


# z[n,o,p,q] = b[o] + sum_{c,i,j} w[o,c,i,j] * x[n,c,p*s+i*d,q*s+j*d] (x framed with zeros);
# dw = sum_n g @ columns^T, dx = w^T @ g folded back, db = sum g over n, p, q
def _conv2d(
    xp: Any,
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> tuple[Array, Any]:
    unfold = _Unfold(xp, x.dtype, x.shape, w.shape, stride, padding, dilation, groups)
    filters = w.reshape(groups, w.shape[0] // groups, unfold.column[1])
    out = xp.empty((x.shape[0], groups, filters.shape[1], unfold.column[2]), x.dtype)
    for tile, columns in unfold.columns(x):
        out[tile] = product(xp, filters, columns)
        if b is not None:
            out[tile] += b.reshape(groups, -1, 1)  # now, while the tile is in cache
    return out.reshape(x.shape[0], w.shape[0], *unfold.out), (x.shape, w.shape, stride, padding, dilation, groups)


def _conv2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    unfold = _Unfold(xp, g.dtype, *residual)
    groups, length, positions = unfold.column
    g = g.reshape(g.shape[0], groups, residual[1][0] // groups, positions)
    return (
        _input_gradient(xp, g, w.reshape(groups, w.shape[0] // groups, length), unfold) if needs[0] else None,
        _filter_gradient(xp, g, x, unfold).reshape(residual[1]) if needs[1] else None,
        total(g, (0, 3)).reshape(-1) if needs[2] else None,
    )


def _input_gradient(xp: Any, g: Array, filters: Array, unfold: _Unfold) -> Array:
    back = filters.swapaxes(-1, -2)
    (ph, pw), (c, h, w) = unfold.padding, unfold.framed
    dx = xp.zeros((g.shape[0], c, h, w), g.dtype)
    for tile in unfold.tiles():
        unfold.fold(product(xp, back, g[tile]), dx[tile])
    return dx[:, :, ph : h - ph, pw : w - pw]


def _filter_gradient(xp: Any, g: Array, x: Array, unfold: _Unfold) -> Array:
    # Added up over the tiles in float32 where they are float16, for the reason of `total`.
    dw = xp.zeros((unfold.column[0], g.shape[2], unfold.column[1]), "float32" if g.dtype.char == "e" else g.dtype)
    for tile, columns in unfold.columns(x):
        dw += total(product(xp, g[tile], columns.swapaxes(-1, -2)), 0, wide=True)
    return dw.astype(g.dtype, copy=False)


conv2d = Op(
    "conv2d",
    _conv2d,
    _conv2d_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
)
