"""Convolution by im2col and matrix products, and the sliding window that pooling and patches share with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddp.ops.arrays import Array, array_function, compute_dtype, total, upcast
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.products import product

Pair = tuple[int, int]
Index = tuple[Any, ...]


def output_size(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False) -> int:
    """The number of positions of a window along an axis of length `n`; not positive if no position fits.

    ceil: the last position may reach beyond the padding, if it starts within the image or the padding before it.
    """
    last = n + 2 * padding - dilation * (kernel - 1) - 1
    out = (last + stride - 1 if ceil else last) // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= n + padding else out


class Window:
    """A window of `kernel` that slides over an image; pairs are (along H, along W).

    out: the number of positions; None: as many as fit. elements: the number of elements of the kernel. is_identity:
    position i reads element i of the image and no other, and there are as many positions as elements.
    """

    def __init__(
        self, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Pair | None = None
    ) -> None:
        self.image = image
        self.kernel = kernel
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        (h, w) = image
        (kh, kw) = kernel
        (sh, sw) = stride
        (ph, pw) = padding
        (dh, dw) = dilation
        self.out = out or (output_size(h, kh, sh, ph, dh), output_size(w, kw, sw, pw, dw))
        self.elements = kh * kw
        # The image of a transposed convolution may be larger than the part of it that the positions read.
        whole = tuple(self.out) == tuple(image)
        self.is_identity = whole and kernel == (1, 1) and stride == (1, 1) and padding == (0, 0)

    def along(self, axis: int, positions: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """Yields two slices per kernel element along `axis`: one of the positions, one of the image.

        The first selects the positions at which the kernel element is inside the image, the second the pixels that it
        reads there. positions: if given, the slices are of these only, and the first counts from `positions.start`.
        """
        first, last = (0, self.out[axis]) if positions is None else (positions.start, positions.stop)
        step = self.stride[axis]
        for element in range(self.kernel[axis]):
            offset = element * self.dilation[axis] - self.padding[axis]
            start = max(first, -(offset // step))
            stop = max(start, min(last, (self.image[axis] - 1 - offset) // step + 1))
            pixel = start * step + offset
            yield slice(start - first, stop - first), slice(pixel, pixel + (stop - start) * step, step)

    def shifts(self, lines: slice | None = None) -> Iterator[tuple[Index, Index]]:
        """Yields two indices per kernel element: positions in (..., lines, OW), and their pixels in (..., H, W)."""
        for (p, rows), (q, columns) in itertools.product(self.along(0, lines), self.along(1)):
            yield (..., p, q), (..., rows, columns)


# im2col makes a column of the pixels that each position of the window reads. col2im adds each column to these pixels.
# Each of the two is the gradient of the other.


@array_function
def im2col_lines(xp: Any, x: Array, window: Window, lines: slice) -> Array:
    """Copies the pixels of x (N, C, H, W) that each kernel element reads, at the positions in the rows `lines`.

    Returns (C, KH * KW, N, lines, OW), with zeros for elements in the padding.
    """
    columns = xp.zeros((x.shape[1], window.elements, len(x), lines.stop - lines.start, window.out[1]), x.dtype)
    for element, (position, pixels) in enumerate(window.shifts(lines)):
        columns[:, element][position] = x[pixels].swapaxes(0, 1)
    return columns


@array_function
def col2im_lines(xp: Any, columns: Array, window: Window, lines: slice, x: Array) -> None:
    """Adds columns to x where `im2col_lines` reads them."""
    for element, (position, pixels) in enumerate(window.shifts(lines)):
        x[pixels] += columns[:, element][position].swapaxes(0, 1)


@array_function
def patches(xp: Any, x: Array, window: Window) -> Array:
    """Copies the pixels of x (N, C, H, W) that each position reads. Returns (N, C * KH * KW, OH * OW)."""
    columns = im2col_lines(xp, x, window, slice(0, window.out[0])).transpose(2, 0, 1, 3, 4)
    return columns.reshape(len(x), x.shape[1] * window.elements, window.out[0] * window.out[1])


@array_function
def image_of_patches(xp: Any, columns: Array, window: Window) -> Array:
    """The gradient of `patches`: adds each column to the pixels that it was read from. Returns (N, C, H, W)."""
    n = len(columns)
    channels = columns.shape[1] // window.elements
    parts = columns.reshape(n, channels, window.elements, *window.out).transpose(1, 2, 0, 3, 4)
    x = xp.zeros((n, channels, *window.image), compute_dtype(columns.dtype))
    col2im_lines(xp, parts, window, slice(0, window.out[0]), x)
    return x.astype(columns.dtype, copy=False)


# z[n,(c,i,j),(p,q)] = x[n,c,p*s+i*d,q*s+j*d] (x padded with zeros);  dx = col2im(g)
def _im2col(xp: Any, x: Array, window: Window) -> tuple[Array, Any]:
    return patches(xp, x, window=window), window


def _im2col_backward(xp: Any, g: Array, needs: Needs, saved: Saved, window: Any) -> Gradients:
    return (image_of_patches(xp, g, window=window),)


im2col = Op("im2col", _im2col, _im2col_backward, inputs=("x",))


# z[n,c,p*s+i*d,q*s+j*d] = sum of x[n,(c,i,j),(p,q)];  dx = im2col(g)
def _col2im(xp: Any, x: Array, window: Window) -> tuple[Array, Any]:
    return image_of_patches(xp, x, window=window), window


def _col2im_backward(xp: Any, g: Array, needs: Needs, saved: Saved, window: Any) -> Gradients:
    return (patches(xp, g, window=window),)


col2im = Op("col2im", _col2im, _col2im_backward, inputs=("x",))


# Convolution as products of filters and columns, for a tile of the positions at a time. The columns of a tile stay in
# cache until the product has read them. They are not saved for backward: copying them from the image again is cheaper
# than reading them from memory.


# A tile is sized for at least this many positions. With fewer, reading the filters would take most of the time.
MIN_POSITIONS = 512


@array_function
def tile_bytes(xp: Any) -> int:
    """Bytes of the columns and the results of a tile: most of an L2 cache. A GPU gets larger tiles."""
    return 512 << 10


class Shape(NamedTuple):
    """The sizes of a convolution from (n, groups * channels, H, W) to (n, groups * filters, OH, OW)."""

    n: int
    groups: int
    channels: int  # of one group
    filters: int  # of one group
    window: Window

    @classmethod
    def of(cls, n: int, filters: tuple[int, ...], groups: int, window: Window) -> Shape:
        """Makes the sizes. filters: shape (O, C / groups, *kernel), or (C, O / groups, *kernel) if transposed."""
        return cls(n, groups, filters[1], filters[0] // groups, window)

    @property
    def length(self) -> int:
        """The length of a column."""
        return self.channels * self.window.elements

    def tiles(self, xp: Any, itemsize: int) -> Iterator[tuple[slice, slice]]:
        """Yields tiles as (samples, lines of positions): some samples with all lines, or some lines of one sample."""
        oh, ow = self.window.out
        positions = max(MIN_POSITIONS, tile_bytes(xp) // (self.groups * (self.length + self.filters) * itemsize + 1))
        samples = max(1, positions // (oh * ow))
        lines = oh if self.window.is_identity else max(1, positions // ow)
        for start, line in itertools.product(range(0, self.n, samples), range(0, oh, lines)):
            yield slice(start, min(start + samples, self.n)), slice(line, min(line + lines, oh))


def _positions(x: Array, groups: int, lines: slice) -> Array:
    """Reshapes the rows `lines` of x (N, groups * channels, OH, OW) to (groups, channels, N * lines * OW).

    The result is a view if N is 1, unless x has 16-bit floats, which become float32.
    """
    x = upcast(x.reshape(len(x), groups, x.shape[1] // groups, *x.shape[2:])[:, :, :, lines])
    return x.transpose(1, 2, 0, 3, 4).reshape(groups, x.shape[2], -1)


def _columns(xp: Any, x: Array, shape: Shape, lines: slice) -> Array:
    """The columns of the positions in the rows `lines`: (groups, channels * KH * KW, N * lines * OW)."""
    if shape.window.is_identity:
        return _positions(x, shape.groups, lines)
    x = upcast(x)  # NumPy has no fast product of float16
    return im2col_lines(xp, x, shape.window, lines).reshape(shape.groups, shape.length, -1)


@array_function
def correlate(xp: Any, x: Array, w: Array, b: Array | None, shape: Shape) -> Array:
    """The convolution of x by the filters w, plus b: (N, O, OH, OW)."""
    n, groups, _, filters, window = shape
    kernel = upcast(w.reshape(groups, filters, shape.length))
    out = xp.empty((n, groups, filters, *window.out), kernel.dtype)
    for tile, lines in shape.tiles(xp, kernel.itemsize):
        columns = _columns(xp, x[tile], shape, lines)
        z = out[tile, :, :, lines]
        if len(z) == 1:
            product(xp, kernel, columns, z.reshape(groups, filters, -1))
        else:
            z[...] = (
                product(xp, kernel, columns).reshape(groups, filters, len(z), *z.shape[3:]).transpose(2, 0, 1, 3, 4)
            )
        if b is not None:
            z += b.reshape(groups, filters, 1, 1)
    return out.reshape(n, groups * filters, *window.out).astype(x.dtype, copy=False)


@array_function
def adjoint(xp: Any, g: Array, w: Array | None, x: Array | None, shape: Shape) -> tuple[Array | None, Array | None]:
    """Returns the gradients of the image (None without w) and filters (None without x). g: the result's gradient."""
    n, groups, channels, filters, window = shape
    dx: Any = None
    dw: Any = None
    kernel: Any = None
    if w is not None:
        kernel = upcast(w.reshape(groups, filters, shape.length).swapaxes(1, 2))
        if window.is_identity:
            dx = correlate(xp, g, kernel, None, Shape(n, groups, filters, channels, window))
            kernel = None
        else:
            dx = xp.zeros((n, groups * channels, *window.image), kernel.dtype)
    if x is not None:
        dw = xp.zeros((groups, filters, shape.length), compute_dtype(x.dtype))
    for tile, lines in shape.tiles(xp, g.itemsize) if kernel is not None or x is not None else ():
        last = _positions(g[tile], groups, lines)
        if kernel is not None:
            # With one filter this is a product of a column and a row, which is slow in NumPy.
            columns = product(xp, kernel, last) if filters > 1 else kernel * last
            columns = columns.reshape(groups * channels, window.elements, -1, lines.stop - lines.start, window.out[1])
            col2im_lines(xp, columns, window, lines, dx[tile])
        if x is not None:
            dw += product(xp, last, _columns(xp, x[tile], shape, lines).swapaxes(1, 2))
    if dw is not None:
        dw = dw.reshape(groups * filters, channels, *window.kernel).astype(g.dtype, copy=False)
    return None if dx is None else dx.astype(g.dtype, copy=False), dw


# Convolution of images, and its transpose: each is the gradient of the other.


# z[n,o,p,q] = b[o] + sum_{c,i,j} w[o,c,i,j] * x[n,c,p*s+i*d,q*s+j*d] (x padded with zeros);
# dw[o,c,i,j] = sum_{n,p,q} g[n,o,p,q] * x[n,c,p*s+i*d,q*s+j*d], db = sum g over n, p, q;
# dx[n,c,p*s+i*d,q*s+j*d] += w[o,c,i,j] * g[n,o,p,q]
def _conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    window = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    return correlate(xp, x, w, b, shape), shape


def _conv2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    w, x = saved
    dx, dw = adjoint(xp, g, w, x, shape)
    return dx, dw, total(g, (0, 2, 3)) if needs[2] else None


conv2d = Op("conv2d", _conv2d, _conv2d_backward, inputs=("x", "w", "b"), saves={"x": ("w",), "w": ("x",), "b": ()})


# z = b + dx of conv2d with x in place of g;  dx = conv2d(g, w), dw = dw of conv2d with x and g exchanged,
# db = sum g over n, p, q
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
    out, _ = adjoint(xp, x, w, None, shape)
    assert out is not None
    if b is not None:
        out += b[:, None, None]
    return out, shape


def _conv_transpose2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    w, x = saved
    dx = None if w is None else correlate(xp, g, w, None, shape)
    dw = None if x is None else adjoint(xp, x, None, g, shape)[1]
    return dx, dw, total(g, (0, 2, 3)) if needs[2] else None


conv_transpose2d = Op(
    "conv_transpose2d",
    _conv_transpose2d,
    _conv_transpose2d_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
)


# z = dw of conv2d for its x and g;  with e the gradient of z: dx = dx of conv2d with w = e, dg = conv2d(x, e)
def _conv_filters(xp: Any, x: Array, g: Array, shape: Shape) -> tuple[Array, Any]:
    return adjoint(xp, g, None, x, shape)[1], shape


def _conv_filters_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    result_grad, x = saved
    dx = adjoint(xp, result_grad, g, None, shape)[0] if needs[0] else None
    return dx, correlate(xp, x, g, None, shape) if needs[1] else None


conv_filters = Op(
    "conv_filters", _conv_filters, _conv_filters_backward, inputs=("x", "g"), saves={"x": ("g",), "g": ("x",)}
)
