"""Convolution by im2col and matrix products, and the sliding window that pooling and patches share with it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from ddp.ops.op import Array, Gradients, Needs, Op, Saved, array_function, compute_dtype, total

Pair = tuple[int, int]


@array_function
def tile_bytes(xp: Any) -> int:
    """Bytes to work on at a time: most of a 1 MiB L2 cache; what is made of them takes the rest."""
    return 640 << 10


def samples(xp: Any, n: int, nbytes: int) -> Iterator[slice]:
    """n samples of `nbytes` each, as many at a time as a tile holds."""
    step = max(1, tile_bytes(xp) // max(nbytes, 1))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def output_size(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False) -> int:
    """How many positions a window of `kernel` takes along an axis of length `n`; not positive if it does not fit.

    ceil: the last one may reach beyond the frame, if it starts within the image or the padding before it.
    """
    rest = n + 2 * padding - dilation * (kernel - 1) - 1
    out = (rest + stride - 1 if ceil else rest) // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= n + padding else out


class Window:
    """A window of `kernel` that slides over a padded image; every pair is (along H, along W).

    out: how many positions it takes; as many as fit unless given. padded: the size of the image with its padding, and
    with what the window needs beyond it. inside: where the image lies in there. elements: of the kernel.
    is_identity: each position sees one element, and all of them are the image. is_disjoint: no element is seen from two
    positions. covers_once: each is seen from one.
    """

    def __init__(
        self, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Pair | None = None
    ) -> None:
        self.image, self.kernel, self.stride, self.padding, self.dilation = image, kernel, stride, padding, dilation
        (h, w), (kh, kw), (sh, sw), (ph, pw), (dh, dw) = image, kernel, stride, padding, dilation
        self.out = oh, ow = out or (output_size(h, kh, sh, ph, dh), output_size(w, kw, sw, pw, dw))
        self.padded = (
            max(h + 2 * ph, (oh - 1) * sh + dh * (kh - 1) + 1),
            max(w + 2 * pw, (ow - 1) * sw + dw * (kw - 1) + 1),
        )
        self.inside = slice(ph, ph + h), slice(pw, pw + w)
        self.elements = kh * kw
        self.is_disjoint = sh > dh * (kh - 1) and sw > dw * (kw - 1)
        self.covers_once = kernel == stride and dilation == (1, 1) and self.padded == (oh * kh, ow * kw)
        self.is_identity = kernel == (1, 1) and stride == (1, 1) and padding == (0, 0)

    def shifts(self, lines: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """For each kernel element, in reading order, what it sees of the frame; of some lines of positions only."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        start, stop = (0, oh) if lines is None else (lines.start, lines.stop)
        for i in range(self.kernel[0]):
            rows = slice(i * dh + start * sh, i * dh + (stop - 1) * sh + 1, sh)
            for j in range(self.kernel[1]):
                yield rows, slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)

    def view(self, xp: Any, padded: Array, axis: int, lines: slice | None = None) -> Array:
        """`padded` with axes `axis` and `axis + 1`, (H, W), as (OH, OW, KH, KW): what each position sees. A view."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        if lines is not None:
            padded = padded[(slice(None),) * axis + (slice(lines.start * sh, None),)]
            oh = lines.stop - lines.start
        lead, (h, w), rest = padded.strides[:axis], padded.strides[axis : axis + 2], padded.strides[axis + 2 :]
        return xp.lib.stride_tricks.as_strided(
            padded,
            (*padded.shape[:axis], oh, ow, *self.kernel, *padded.shape[axis + 2 :]),
            (*lead, h * sh, w * sw, h * dh, w * dw, *rest),
        )


def pad_image(xp: Any, x: Array, window: Window, value: float) -> Array:
    """x: (N, C, H, W) in a frame of `value`; x itself if the window needs none."""
    if window.padded == window.image:
        return x
    padded = xp.full((*x.shape[:2], *window.padded), value, x.dtype)
    padded[..., window.inside[0], window.inside[1]] = x
    return padded


# Convolution as matrix products over tiles: what each position of the window sees, unfolded a tile at a time.
#
# Unfolding the whole batch would stream kernel-size times the input through memory, twice. A tile, a few samples or a
# few lines of one sample, stays in cache until the product has read it. It is not saved for backward: unfolding it
# again is cheaper than reading back a copy that has left the cache.
#
# There are two layouts. Rows hold what one position sees, with channels last: runs of KW * C elements are copied, and
# the adjoint is added up in runs of OW * C. Columns hold what one kernel element sees: runs of OW, better for few
# channels.


FEW = 12  # channels of a group; with fewer, columns


class Shape(NamedTuple):
    """What a convolution maps: (n, groups * channels, H, W) to (n, groups * filters, OH, OW)."""

    n: int
    groups: int
    channels: int  # of one group
    filters: int  # of one group
    window: Window

    @classmethod
    def of(cls, n: int, filters: tuple[int, ...], groups: int, window: Window) -> Shape:
        """filters: the shape (O, C / groups, *kernel), or of a transposed convolution (C, O / groups, *kernel)"""
        return cls(n, groups, filters[1], filters[0] // groups, window)


class Im2Col:
    """What the layouts share: tiles, and buffers of the dtype that products are added up in.

    correlate: x (n, groups * channels, H, W) to z (n, groups * filters, OH, OW), the convolution.
    adjoint: g of the shape of z to the gradients of x, of the filters, and of the bias if that costs nothing.
    """

    def __init__(self, xp: Any, shape: Shape, dtype: Any) -> None:
        self.xp, self.shape, self.dtype = xp, shape, dtype
        # NumPy does not multiply stacks of float16, and what is added up should be rounded once.
        self.wide = xp.dtype("float32") if dtype.itemsize == 2 else dtype  # of what is multiplied
        oh, ow = shape.window.out
        line = shape.groups * shape.channels * shape.window.elements * ow * self.wide.itemsize
        tile = tile_bytes(xp)
        self.samples = max(1, min(shape.n, tile // max(line * oh, 1)))
        self.lines = oh if self.samples > 1 else max(1, min(oh, tile // max(line, 1)))
        self._buffers: dict[str, Array] = {}

    def tiles(self) -> Iterator[slice]:
        """Samples that are taken together."""
        n = self.shape.n
        return (slice(start, min(start + self.samples, n)) for start in range(0, n, self.samples))

    def blocks(self) -> Iterator[slice]:
        """Lines of positions that are taken together: all of them, unless one sample alone is too large."""
        oh = self.shape.window.out[0]
        return (slice(start, min(start + self.lines, oh)) for start in range(0, oh, self.lines))

    def buffer(self, name: str, *shape: int) -> Array:
        """Scratch of `shape`, zero at first, which the next tile overwrites. The first tile is the largest."""
        size = prod(shape)
        if name not in self._buffers:
            self._buffers[name] = self.xp.zeros(size, self.wide)
        return self._buffers[name][:size].reshape(shape)

    def accumulate(self, dw: Array, part: Array) -> Array:
        """dw + part, in float32 at least."""
        if dw is None:
            return part.astype(self.wide)
        dw += part
        return dw


class Rows(Im2Col):
    """Rows (groups, n * OH * OW, KH * KW * channels) times filters."""

    def correlate(self, x: Array, w: Array, b: Array | None) -> Array:
        xp, (n, groups, channels, filters, window) = self.xp, self.shape
        oh, ow = window.out
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
        xp, (n, groups, channels, filters, window) = self.xp, self.shape
        oh, ow = window.out
        g = g.reshape(n, groups, filters, oh, ow)
        dx: Any = None
        kernel: Any = None
        dw: Any = None
        if w is not None:
            kernel = w.reshape(groups, filters, channels, window.elements).transpose(3, 0, 1, 2)
            kernel = xp.ascontiguousarray(kernel, self.wide)
            dx = xp.empty((n, groups * channels, *window.image), self.dtype)
        images = ((tile, None) for tile in self.tiles()) if x is None else self.images(x)
        for tile, image in images:
            count = tile.stop - tile.start
            if kernel is not None:
                back = self.buffer("back", count, *window.padded, groups * channels)
                back[...] = 0
            for lines, rows in self.rows(image) if image is not None else ((lines, None) for lines in self.blocks()):
                last = self.buffer("g", groups, count, lines.stop - lines.start, ow, filters)
                last[...] = g[tile, :, :, lines].transpose(1, 0, 3, 4, 2)
                last = last.reshape(groups, -1, filters)
                if rows is not None:
                    dw = self.accumulate(dw, xp.matmul(last.swapaxes(-1, -2), rows))
                if kernel is not None:
                    self.col2im(last, kernel, back, lines)
            if dx is not None:
                dx[tile] = back[:, window.inside[0], window.inside[1]].transpose(0, 3, 1, 2)
        if dw is not None:
            dw = dw.reshape(groups * filters, *window.kernel, channels).transpose(0, 3, 1, 2)
            dw = xp.ascontiguousarray(dw, self.dtype)
        return dx, dw, None

    def images(self, x: Array) -> Iterator[tuple[slice, Array]]:
        """Each tile of x with channels last, in its frame: (n, H, W, groups * channels)."""
        window, c = self.shape.window, x.shape[1]
        for tile in self.tiles():
            image = self.buffer("image", tile.stop - tile.start, *window.padded, c)  # what is around stays zero
            image[:, window.inside[0], window.inside[1]] = x[tile].transpose(0, 2, 3, 1)
            yield tile, image

    def rows(self, image: Array) -> Iterator[tuple[slice, Array]]:
        """Each block of lines of an image, unfolded."""
        _, groups, channels, _, window = self.shape
        for lines in self.blocks():
            seen = window.view(self.xp, image, 1, lines)
            rows = self.buffer("rows", groups, *seen.shape[:-1], channels)
            rows[...] = seen.reshape(*seen.shape[:-1], groups, channels).transpose(5, 0, 1, 2, 3, 4, 6)
            yield lines, rows.reshape(groups, -1, window.elements * channels)

    def col2im(self, g: Array, kernel: Array, back: Array, lines: slice) -> None:
        """Adds what each kernel element (KH * KW, groups, filters, channels) makes of g into `back`."""
        _, groups, channels, _, window = self.shape
        # As many as there were rows, which have been read: in their memory it stays one tile that the cache must hold.
        planes = self.buffer("rows", window.elements, groups, g.shape[1], channels)
        self.xp.matmul(g, kernel, out=planes)
        planes = planes.reshape(window.elements, groups, len(back), -1, window.out[1], channels)
        back = back.reshape(*back.shape[:3], groups, channels).transpose(3, 0, 1, 2, 4)
        for plane, (rows, columns) in zip(planes, window.shifts(lines), strict=True):
            back[:, :, rows, columns] += plane


class Columns(Im2Col):
    """Filters times columns (n, groups, channels * KH * KW, OH * OW); a last row of ones lets the bias be a filter."""

    def correlate(self, x: Array, w: Array, b: Array | None) -> Array:
        xp, (n, groups, _, filters, window) = self.xp, self.shape
        oh, ow = window.out
        kernel = w.reshape(groups, filters, -1).astype(self.wide, copy=False)
        ones = False
        if b is not None and not window.is_identity:
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
        xp, (n, groups, channels, filters, window) = self.xp, self.shape
        g = xp.ascontiguousarray(g, self.wide)  # the product of anything else may be slow
        g = g.reshape(n, groups, filters, prod(window.out))
        dx = dw = db = None
        if w is not None:
            dx = self.col2im(g, w.reshape(groups, filters, -1).astype(self.wide, copy=False).swapaxes(-1, -2))
        if x is not None:
            ones = b and not window.is_identity
            for tile, positions, columns in self.columns(x, ones):
                dw = self.accumulate(dw, self.sum_of_products(g[tile, :, :, positions], columns.swapaxes(-1, -2)))
            if dw is not None:
                if ones:
                    db, dw = dw[..., -1].reshape(-1).astype(self.dtype), dw[..., :-1]
                dw = dw.reshape(groups * filters, channels, *window.kernel).astype(self.dtype, copy=False)
        return dx, dw, db

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """a @ b."""
        return self.xp.matmul(a, b, out=out)

    def sum_of_products(self, a: Array, b: Array) -> Array:
        """a @ b, added up over the samples."""
        return self.product(a, b).sum(0, dtype=self.wide)

    def columns(self, x: Array, ones: bool) -> Iterator[tuple[slice, slice, Array]]:
        """Each tile of samples and positions of x, unfolded."""
        xp, (_, groups, channels, _, window) = self.xp, self.shape
        oh, ow = window.out
        if window.is_identity:
            for tile in self.tiles():
                columns = x[tile].reshape(-1, groups, channels, oh * ow)
                yield tile, slice(None), columns.astype(self.wide, copy=False)
            return
        length = channels * window.elements
        for tile in self.tiles():
            image = x[tile]
            count = len(image)
            if window.padded != window.image:
                padded = self.buffer("image", *image.shape[:2], *window.padded)  # what is around stays zero
                padded[:, :, window.inside[0], window.inside[1]] = image
                image = padded
            for lines in self.blocks():
                seen = window.view(xp, image, 2, lines)
                positions = slice(lines.start * ow, lines.stop * ow)
                columns = self.buffer("columns", count, groups, length + ones, positions.stop - positions.start)
                inner = columns[:, :, :length].reshape(count, groups, channels, *window.kernel, -1, ow)
                inner[...] = seen.reshape(count, groups, channels, *seen.shape[2:]).transpose(0, 1, 2, 5, 6, 3, 4)
                if ones:
                    columns[:, :, -1] = 1
                yield tile, positions, columns

    def col2im(self, g: Array, kernel: Array) -> Array:
        """kernel (groups, channels * KH * KW, filters) times g, added up where it was seen."""
        xp, (n, groups, channels, _, window) = self.xp, self.shape
        ow = window.out[1]
        dx = xp.empty((n, groups * channels, *window.image), self.dtype)
        if window.is_identity:
            return self.product(kernel, g).reshape(dx.shape).astype(self.dtype, copy=False)
        product = (
            self.product if kernel.shape[-1] > 1 else xp.multiply
        )  # of a column and a row, which matmul is slow at
        for tile in self.tiles():
            count = tile.stop - tile.start
            back = self.buffer("back", count, groups * channels, *window.padded)
            back[...] = 0
            for lines in self.blocks():
                positions = slice(lines.start * ow, lines.stop * ow)
                columns = self.buffer("spread", count, groups, kernel.shape[1], positions.stop - positions.start)
                product(kernel, g[tile, :, :, positions], out=columns)
                columns = columns.reshape(count, groups * channels, window.elements, -1, ow)
                for element, (rows, across) in enumerate(window.shifts(lines)):
                    back[:, :, rows, across] += columns[:, :, element]
            dx[tile] = back[:, :, window.inside[0], window.inside[1]]
        return dx


@array_function
def im2col_layout(xp: Any, shape: Shape, dtype: Any) -> Any:
    """The layout that suits the shape."""
    return (Columns if shape.channels < FEW or shape.window.is_identity else Rows)(xp, shape, dtype)


# Patches of images as columns, and columns added up into images: each is the other's gradient.


def _unfold(xp: Any, x: Array, window: Window) -> Array:
    seen = window.view(xp, pad_image(xp, x, window, 0), 2).transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(x.shape[0], x.shape[1] * window.elements, window.out[0] * window.out[1])


def _fold(xp: Any, columns: Array, window: Window) -> Array:
    n, channels = columns.shape[0], columns.shape[1] // window.elements
    columns = columns.reshape(n, channels, window.elements, *window.out)
    back = xp.zeros((n, channels, *window.padded), compute_dtype(columns))
    for element, (rows, across) in enumerate(window.shifts()):
        back[..., rows, across] += columns[:, :, element]
    return back[..., window.inside[0], window.inside[1]].astype(columns.dtype)


# z[n,(c,i,j),(p,q)] = x[n,c,p*s+i*d,q*s+j*d] (x padded with zeros);  dx = g added up where it was read
def _im2col(xp: Any, x: Array, window: Window) -> tuple[Array, Any]:
    return _unfold(xp, x, window), window


def _im2col_backward(xp: Any, g: Array, needs: Needs, saved: Saved, window: Any) -> Gradients:
    return (_fold(xp, g, window),)


im2col = Op("im2col", _im2col, _im2col_backward, inputs=("x",))


# z[n,c,p*s+i*d,q*s+j*d] = sum of x[n,(c,i,j),(p,q)];  dx = g where it was added
def _col2im(xp: Any, x: Array, window: Window) -> tuple[Array, Any]:
    return _fold(xp, x, window), window


def _col2im_backward(xp: Any, g: Array, needs: Needs, saved: Saved, window: Any) -> Gradients:
    return (_unfold(xp, g, window),)


col2im = Op("col2im", _col2im, _col2im_backward, inputs=("x",))


# Convolution over images and its transpose; one is the other's gradient.


# z[n,o,p,q] = b[o] + sum_{c,i,j} w[o,c,i,j] * x[n,c,p*s+i*d,q*s+j*d] (x padded with zeros);
# dw[o,c,i,j] = sum_{n,p,q} g[n,o,p,q] * x[n,c,p*s+i*d,q*s+j*d], db = sum g over n, p, q;
# dx[n,c,p*s+i*d,q*s+j*d] += w[o,c,i,j] * g[n,o,p,q]
def _conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    window = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    return im2col_layout(xp, shape, x.dtype).correlate(x, w, b), (shape, w.shape)


def _conv2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (w, x), (shape, filters) = saved, residual
    dx, dw, db = im2col_layout(xp, shape, g.dtype).adjoint(g, w, x, needs[2])
    if needs[1] and dw is None:  # no sample
        dw = xp.zeros(filters, g.dtype)
    return dx, dw, total(g, (0, 2, 3)) if needs[2] and db is None else db


conv2d = Op("conv2d", _conv2d, _conv2d_backward, inputs=("x", "w", "b"), saves={"x": ("w",), "w": ("x",), "b": ()})


# z = the dx of conv2d at g = x, + b;  dx = conv2d(g, w), dw = the dw of conv2d at x = g, g = x, db = sum g over n, p, q
def _conv_transpose2d(
    xp: Any,
    x: Array,
    w: Array,
    b: Array | None,
    size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> tuple[Array, Any]:
    window = Window(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    out = im2col_layout(xp, shape, x.dtype).adjoint(x, w, None, False)[0]
    assert out is not None
    if b is not None:
        out += b[:, None, None]
    return out, (shape, w.shape)


def _conv_transpose2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (w, x), (shape, filters) = saved, residual
    layout = im2col_layout(xp, shape, g.dtype)
    dx = dw = None
    if needs[0]:
        dx = layout.correlate(g, w, None)
    if needs[1]:
        dw = layout.adjoint(x, None, g, False)[1]
        if dw is None:  # no sample
            dw = xp.zeros(filters, g.dtype)
    return dx, dw, total(g, (0, 2, 3)) if needs[2] else None


conv_transpose2d = Op(
    "conv_transpose2d",
    _conv_transpose2d,
    _conv_transpose2d_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
)
