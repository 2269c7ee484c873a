"""Convolution as matrix products over tiles: what each position of the window sees, unfolded a tile at a time.

Unfolding the whole batch would stream kernel-size times the input through memory, twice. A tile, a few samples or a
few lines of one sample, stays in cache until the product has read it. It is not saved for backward: unfolding it again
is cheaper than reading back a copy that has left the cache.

There are two layouts. Rows hold what one position sees, with channels last: runs of KW * C elements are copied, and the
adjoint is added up in runs of OW * C. Columns hold what one kernel element sees: runs of OW, better for few channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from ddp.ops._op import Array
from ddp.ops.cuda import products
from ddp.ops.windows import TILES, Walk

FEW = 12  # channels of a group; with fewer, columns


class Shape(NamedTuple):
    """What a convolution maps: (n, groups * channels, H, W) to (n, groups * filters, OH, OW)."""

    n: int
    groups: int
    channels: int  # of one group
    filters: int  # of one group
    walk: Walk

    @classmethod
    def of(cls, n: int, filters: tuple[int, ...], groups: int, walk: Walk) -> Shape:
        """filters: the shape (O, C / groups, *kernel), or of a transposed convolution (C, O / groups, *kernel)"""
        return cls(n, groups, filters[1], filters[0] // groups, walk)


class Unfolded:
    """What the layouts share: tiles, and buffers of the dtype that products are added up in.

    correlate: x (n, groups * channels, H, W) to z (n, groups * filters, OH, OW), the convolution.
    adjoint: g of the shape of z to the gradients of x, of the filters, and of the bias if that costs nothing.
    """

    def __init__(self, xp: Any, shape: Shape, dtype: Any) -> None:
        self.xp, self.shape, self.dtype = xp, shape, dtype
        self.wide = self.working(dtype)
        oh, ow = shape.walk.out
        line = shape.groups * shape.channels * shape.walk.elements * ow * self.wide.itemsize
        tile = TILES[xp.__name__]
        self.samples = max(1, min(shape.n, tile // max(line * oh, 1)))
        self.lines = oh if self.samples > 1 else max(1, min(oh, tile // max(line, 1)))
        self._buffers: dict[str, Array] = {}

    def working(self, dtype: Any) -> Any:
        """The dtype of what is multiplied."""
        # NumPy does not multiply stacks of float16, and what is added up should be rounded once.
        return self.xp.dtype("float32") if dtype.itemsize == 2 else dtype

    def tiles(self) -> Iterator[slice]:
        """Samples that are taken together."""
        n = self.shape.n
        return (slice(start, min(start + self.samples, n)) for start in range(0, n, self.samples))

    def blocks(self) -> Iterator[slice]:
        """Lines of positions that are taken together: all of them, unless one sample alone is too large."""
        oh = self.shape.walk.out[0]
        return (slice(start, min(start + self.lines, oh)) for start in range(0, oh, self.lines))

    def buffer(self, name: str, *shape: int) -> Array:
        """Scratch of `shape`, zero at first, which the next tile overwrites. The first tile is the largest."""
        size = prod(shape)
        if name not in self._buffers:
            self._buffers[name] = self.xp.zeros(size, self.wide)
        return self._buffers[name][:size].reshape(shape)

    def gather(self, dw: Array, part: Array) -> Array:
        """dw + part, in float32 at least."""
        if dw is None:
            return part.astype(self.wide)
        dw += part
        return dw


class Rows(Unfolded):
    """Rows (groups, n * OH * OW, KH * KW * channels) times filters."""

    def correlate(self, x: Array, w: Array, b: Array | None) -> Array:
        xp, (n, groups, channels, filters, walk) = self.xp, self.shape
        oh, ow = walk.out
        kernel = xp.ascontiguousarray(w.reshape(groups, filters, channels, -1).transpose(0, 3, 2, 1), self.wide)
        kernel = kernel.reshape(groups, -1, filters)
        bias = None if b is None else b.reshape(groups, filters, 1, 1)
        out = xp.empty((n, groups, filters, oh, ow), self.dtype)
        for tile, image in self.images(x):
            for lines, rows in self.rows(image):
                z = xp.matmul(rows, kernel, out=self.buffer("z", groups, rows.shape[1], filters))
                z = z.reshape(groups, len(image), -1, ow, filters).transpose(1, 0, 4, 2, 3)
                if bias is None:
                    out[tile, :, :, lines] = z
                else:
                    xp.add(z, bias, out=out[tile, :, :, lines])
        return out.reshape(n, groups * filters, oh, ow)

    def adjoint(self, g: Array, w: Array | None, x: Array | None, b: bool) -> tuple[Array | None, Array | None, None]:
        xp, (n, groups, channels, filters, walk) = self.xp, self.shape
        oh, ow = walk.out
        g = g.reshape(n, groups, filters, oh, ow)
        dx: Any = None
        kernel: Any = None
        dw: Any = None
        if w is not None:
            kernel = w.reshape(groups, filters, channels, walk.elements).transpose(3, 0, 1, 2)
            kernel = xp.ascontiguousarray(kernel, self.wide)
            dx = xp.empty((n, groups * channels, *walk.image), self.dtype)
        images = ((tile, None) for tile in self.tiles()) if x is None else self.images(x)
        for tile, image in images:
            count = tile.stop - tile.start
            if kernel is not None:
                back = self.buffer("back", count, *walk.framed, groups * channels)
                back[...] = 0
            for lines, rows in self.rows(image) if image is not None else ((lines, None) for lines in self.blocks()):
                last = self.buffer("g", groups, count, lines.stop - lines.start, ow, filters)
                last[...] = g[tile, :, :, lines].transpose(1, 0, 3, 4, 2)
                last = last.reshape(groups, -1, filters)
                if rows is not None:
                    dw = self.gather(dw, xp.matmul(last.swapaxes(-1, -2), rows))
                if kernel is not None:
                    self.spread(last, kernel, back, lines)
            if dx is not None:
                dx[tile] = back[:, walk.inside[0], walk.inside[1]].transpose(0, 3, 1, 2)
        if dw is not None:
            dw = dw.reshape(groups * filters, *walk.kernel, channels).transpose(0, 3, 1, 2)
            dw = xp.ascontiguousarray(dw, self.dtype)
        return dx, dw, None

    def images(self, x: Array) -> Iterator[tuple[slice, Array]]:
        """Each tile of x with channels last, in its frame: (n, H, W, groups * channels)."""
        walk, c = self.shape.walk, x.shape[1]
        for tile in self.tiles():
            image = self.buffer("image", tile.stop - tile.start, *walk.framed, c)  # what is around stays zero
            image[:, walk.inside[0], walk.inside[1]] = x[tile].transpose(0, 2, 3, 1)
            yield tile, image

    def rows(self, image: Array) -> Iterator[tuple[slice, Array]]:
        """Each block of lines of an image, unfolded."""
        _, groups, channels, _, walk = self.shape
        for lines in self.blocks():
            seen = walk.view(self.xp, image, 1, lines)
            rows = self.buffer("rows", groups, *seen.shape[:-1], channels)
            rows[...] = seen.reshape(*seen.shape[:-1], groups, channels).transpose(5, 0, 1, 2, 3, 4, 6)
            yield lines, rows.reshape(groups, -1, walk.elements * channels)

    def spread(self, g: Array, kernel: Array, back: Array, lines: slice) -> None:
        """Adds what each kernel element (KH * KW, groups, filters, channels) makes of g into `back`."""
        _, groups, channels, _, walk = self.shape
        # As many as there were rows, which have been read: in their memory it stays one tile that the cache must hold.
        planes = self.buffer("rows", walk.elements, groups, g.shape[1], channels)
        self.xp.matmul(g, kernel, out=planes)
        planes = planes.reshape(walk.elements, groups, len(back), -1, walk.out[1], channels)
        back = back.reshape(*back.shape[:3], groups, channels).transpose(3, 0, 1, 2, 4)
        for plane, (rows, columns) in zip(planes, walk.shifts(lines), strict=True):
            back[:, :, rows, columns] += plane


class Columns(Unfolded):
    """Filters times columns (n, groups, channels * KH * KW, OH * OW); a last row of ones lets the bias be a filter."""

    def correlate(self, x: Array, w: Array, b: Array | None) -> Array:
        xp, (n, groups, _, filters, walk) = self.xp, self.shape
        oh, ow = walk.out
        kernel = w.reshape(groups, filters, -1).astype(self.wide, copy=False)
        ones = False
        if b is not None and not walk.still:
            ones, kernel = True, xp.concatenate((kernel, b.reshape(groups, filters, 1)), axis=-1, dtype=self.wide)
        out = xp.empty((n, groups, filters, oh * ow), self.dtype)
        for tile, positions, columns in self.columns(x, ones):
            if self.wide == self.dtype:
                self.product(kernel, columns, out[tile, :, :, positions])
            else:
                out[tile, :, :, positions] = self.product(kernel, columns)
            if b is not None and not ones:
                out[tile, :, :, positions] += b.reshape(groups, filters, 1)
        return out.reshape(n, groups * filters, oh, ow)

    def adjoint(
        self, g: Array, w: Array | None, x: Array | None, b: bool
    ) -> tuple[Array | None, Array | None, Array | None]:
        xp, (n, groups, channels, filters, walk) = self.xp, self.shape
        g = xp.ascontiguousarray(g, self.wide)  # the product of anything else may be slow
        g = g.reshape(n, groups, filters, prod(walk.out))
        dx = dw = db = None
        if w is not None:
            dx = self.spread(g, w.reshape(groups, filters, -1).astype(self.wide, copy=False).swapaxes(-1, -2))
        if x is not None:
            ones = b and not walk.still
            for tile, positions, columns in self.columns(x, ones):
                dw = self.gather(dw, self.added(g[tile, :, :, positions], columns.swapaxes(-1, -2)))
            if dw is not None:
                if ones:
                    db, dw = dw[..., -1].reshape(-1).astype(self.dtype), dw[..., :-1]
                dw = dw.reshape(groups * filters, channels, *walk.kernel).astype(self.dtype, copy=False)
        return dx, dw, db

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """a @ b."""
        return self.xp.matmul(a, b, out=out)

    def added(self, a: Array, b: Array) -> Array:
        """a @ b, added up over the samples."""
        return self.product(a, b).sum(0, dtype=self.wide)

    def columns(self, x: Array, ones: bool) -> Iterator[tuple[slice, slice, Array]]:
        """Each tile of samples and positions of x, unfolded."""
        xp, (_, groups, channels, _, walk) = self.xp, self.shape
        oh, ow = walk.out
        if walk.still:
            for tile in self.tiles():
                columns = x[tile].reshape(-1, groups, channels, oh * ow)
                yield tile, slice(None), columns.astype(self.wide, copy=False)
            return
        length = channels * walk.elements
        for tile in self.tiles():
            image = x[tile]
            count = len(image)
            if walk.framed != walk.image:
                framed = self.buffer("image", *image.shape[:2], *walk.framed)  # what is around stays zero
                framed[:, :, walk.inside[0], walk.inside[1]] = image
                image = framed
            for lines in self.blocks():
                seen = walk.view(xp, image, 2, lines)
                positions = slice(lines.start * ow, lines.stop * ow)
                columns = self.buffer("columns", count, groups, length + ones, positions.stop - positions.start)
                inner = columns[:, :, :length].reshape(count, groups, channels, *walk.kernel, -1, ow)
                inner[...] = seen.reshape(count, groups, channels, *seen.shape[2:]).transpose(0, 1, 2, 5, 6, 3, 4)
                if ones:
                    columns[:, :, -1] = 1
                yield tile, positions, columns

    def spread(self, g: Array, kernel: Array) -> Array:
        """kernel (groups, channels * KH * KW, filters) times g, added up where it was seen."""
        xp, (n, groups, channels, _, walk) = self.xp, self.shape
        ow = walk.out[1]
        dx = xp.empty((n, groups * channels, *walk.image), self.dtype)
        if walk.still:
            return self.product(kernel, g).reshape(dx.shape).astype(self.dtype, copy=False)
        product = (
            self.product if kernel.shape[-1] > 1 else xp.multiply
        )  # of a column and a row, which matmul is slow at
        for tile in self.tiles():
            count = tile.stop - tile.start
            back = self.buffer("back", count, groups * channels, *walk.framed)
            back[...] = 0
            for lines in self.blocks():
                positions = slice(lines.start * ow, lines.stop * ow)
                columns = self.buffer("spread", count, groups, kernel.shape[1], positions.stop - positions.start)
                product(kernel, g[tile, :, :, positions], out=columns)
                columns = columns.reshape(count, groups * channels, walk.elements, -1, ow)
                for element, (rows, across) in enumerate(walk.shifts(lines)):
                    back[:, :, rows, across] += columns[:, :, element]
            dx[tile] = back[:, :, walk.inside[0], walk.inside[1]]
        return dx


class _ByCublas(Columns):
    """Columns on a GPU, where CuPy's own products cannot be captured in a CUDA graph."""

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        return products.product(self.xp, a, b, out)


def _by_channels(xp: Any, shape: Shape, dtype: Any) -> Unfolded:
    return (Columns if shape.channels < FEW or shape.walk.still else Rows)(xp, shape, dtype)


LAYOUTS = {"numpy": _by_channels, "cupy": _ByCublas}


def unfolded(xp: Any, shape: Shape, dtype: Any) -> Any:
    """The layout that suits the shape."""
    return LAYOUTS[xp.__name__](xp, shape, dtype)
