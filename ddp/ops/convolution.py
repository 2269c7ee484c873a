"""A window that walks over images: where it stands, and what it sees. Convolution, pooling and patches share it."""

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
    """How a window of `kernel` walks over an image in a frame; every pair is (along H, along W).

    out: how many positions it takes; as many as fit unless given. framed: the size of the image with its padding, and
    with what the window needs beyond it. inside: where the image lies in there. elements: of the kernel. still: whether
    the window sees exactly the image, one element at a time. apart: whether no element is seen from two positions.
    even: whether each is seen from one.
    """

    def __init__(
        self, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Pair | None = None
    ) -> None:
        self.image, self.kernel, self.stride, self.padding, self.dilation = image, kernel, stride, padding, dilation
        (h, w), (kh, kw), (sh, sw), (ph, pw), (dh, dw) = image, kernel, stride, padding, dilation
        self.out = oh, ow = out or (output_size(h, kh, sh, ph, dh), output_size(w, kw, sw, pw, dw))
        self.framed = (
            max(h + 2 * ph, (oh - 1) * sh + dh * (kh - 1) + 1),
            max(w + 2 * pw, (ow - 1) * sw + dw * (kw - 1) + 1),
        )
        self.inside = slice(ph, ph + h), slice(pw, pw + w)
        self.elements = kh * kw
        self.apart = sh > dh * (kh - 1) and sw > dw * (kw - 1)
        self.even = kernel == stride and dilation == (1, 1) and self.framed == (oh * kh, ow * kw)
        self.still = kernel == (1, 1) and stride == (1, 1) and padding == (0, 0)

    def shifts(self, lines: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """For each kernel element, in reading order, what it sees of the frame; of some lines of positions only."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        start, stop = (0, oh) if lines is None else (lines.start, lines.stop)
        for i in range(self.kernel[0]):
            rows = slice(i * dh + start * sh, i * dh + (stop - 1) * sh + 1, sh)
            for j in range(self.kernel[1]):
                yield rows, slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)

    def view(self, xp: Any, framed: Array, axis: int, lines: slice | None = None) -> Array:
        """`framed` with axes `axis` and `axis + 1`, (H, W), as (OH, OW, KH, KW): what each position sees. A view."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        if lines is not None:
            framed = framed[(slice(None),) * axis + (slice(lines.start * sh, None),)]
            oh = lines.stop - lines.start
        lead, (h, w), rest = framed.strides[:axis], framed.strides[axis : axis + 2], framed.strides[axis + 2 :]
        return xp.lib.stride_tricks.as_strided(
            framed,
            (*framed.shape[:axis], oh, ow, *self.kernel, *framed.shape[axis + 2 :]),
            (*lead, h * sh, w * sw, h * dh, w * dw, *rest),
        )


def frame(xp: Any, x: Array, walk: Window, value: float) -> Array:
    """x: (N, C, H, W) in a frame of `value`; x itself if the walk needs none."""
    if walk.framed == walk.image:
        return x
    framed = xp.full((*x.shape[:2], *walk.framed), value, x.dtype)
    framed[..., walk.inside[0], walk.inside[1]] = x
    return framed


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
    walk: Window

    @classmethod
    def of(cls, n: int, filters: tuple[int, ...], groups: int, walk: Window) -> Shape:
        """filters: the shape (O, C / groups, *kernel), or of a transposed convolution (C, O / groups, *kernel)"""
        return cls(n, groups, filters[1], filters[0] // groups, walk)


class Im2Col:
    """What the layouts share: tiles, and buffers of the dtype that products are added up in.

    correlate: x (n, groups * channels, H, W) to z (n, groups * filters, OH, OW), the convolution.
    adjoint: g of the shape of z to the gradients of x, of the filters, and of the bias if that costs nothing.
    """

    def __init__(self, xp: Any, shape: Shape, dtype: Any) -> None:
        self.xp, self.shape, self.dtype = xp, shape, dtype
        self.wide = self.working(dtype)
        oh, ow = shape.walk.out
        line = shape.groups * shape.channels * shape.walk.elements * ow * self.wide.itemsize
        tile = tile_bytes(xp)
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


class Rows(Im2Col):
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


class Columns(Im2Col):
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


@array_function
def im2col_layout(xp: Any, shape: Shape, dtype: Any) -> Any:
    """The layout that suits the shape."""
    return (Columns if shape.channels < FEW or shape.walk.still else Rows)(xp, shape, dtype)


# Patches of images as columns, and columns added up into images: each is the other's gradient.


def _unfold(xp: Any, x: Array, walk: Window) -> Array:
    seen = walk.view(xp, frame(xp, x, walk, 0), 2).transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(x.shape[0], x.shape[1] * walk.elements, walk.out[0] * walk.out[1])


def _fold(xp: Any, columns: Array, walk: Window) -> Array:
    n, channels = columns.shape[0], columns.shape[1] // walk.elements
    columns = columns.reshape(n, channels, walk.elements, *walk.out)
    back = xp.zeros((n, channels, *walk.framed), compute_dtype(columns))
    for element, (rows, across) in enumerate(walk.shifts()):
        back[..., rows, across] += columns[:, :, element]
    return back[..., walk.inside[0], walk.inside[1]].astype(columns.dtype)


# z[n,(c,i,j),(p,q)] = x[n,c,p*s+i*d,q*s+j*d] (x framed with zeros);  dx = g added up where it was read
def _im2col(xp: Any, x: Array, walk: Window) -> tuple[Array, Any]:
    return _unfold(xp, x, walk), walk


def _im2col_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_fold(xp, g, walk),)


im2col = Op("im2col", _im2col, _im2col_backward, inputs=("x",))


# z[n,c,p*s+i*d,q*s+j*d] = sum of x[n,(c,i,j),(p,q)];  dx = g where it was added
def _col2im(xp: Any, x: Array, walk: Window) -> tuple[Array, Any]:
    return _fold(xp, x, walk), walk


def _col2im_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_unfold(xp, g, walk),)


col2im = Op("col2im", _col2im, _col2im_backward, inputs=("x",))


# Convolution over images and its transpose; one is the other's gradient.


# z[n,o,p,q] = b[o] + sum_{c,i,j} w[o,c,i,j] * x[n,c,p*s+i*d,q*s+j*d] (x framed with zeros);
# dw[o,c,i,j] = sum_{n,p,q} g[n,o,p,q] * x[n,c,p*s+i*d,q*s+j*d], db = sum g over n, p, q;
# dx[n,c,p*s+i*d,q*s+j*d] += w[o,c,i,j] * g[n,o,p,q]
def _conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    walk = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
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
    walk = Window(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
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
