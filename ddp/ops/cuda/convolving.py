"""Convolutions on a GPU: by cuDNN where it is there and takes the case, else by unfolding and the GEMM door.

Images may lie with channels last; then so do filters (a copy is made of those that do not: they are small), results
and gradients, and no image is laid out anew between one layer and the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp.ops._op import Array, Gradients, Needs, Saved, total, widen
from ddp.ops.cuda.tables import address
from ddp.ops.formats import image, laid, prefers_channels_last
from ddp.ops.unfolded import Shape, unfolded
from ddp.ops.windows import Pair, Walk

if TYPE_CHECKING:
    from ddp._gpu import dnn_convolution as dnn
else:
    dnn = None  # imported with the first convolution on a GPU

DTYPES = ("float16", "bfloat16", "float32")  # float64 is nowhere fast, and unfolding takes it as well

ALIGNED = 16  # bytes: what the plans of cuDNN's front end are made for


def _dnn_takes(x: Array, w: Array) -> bool:
    global dnn
    if dnn is None:
        from ddp._gpu import dnn_convolution as dnn
    return x.dtype.name in DTYPES and x.dtype == w.dtype and x.size > 0 and w.size > 0


def conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """As `conv._conv2d`; with channels last where x or w has them."""
    walk = Walk(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
    last = prefers_channels_last(x) or prefers_channels_last(w)
    kernel = _kernel(xp, w, last)
    # Backward takes the filters as they were laid out here, if that took a copy.
    return _correlated(xp, x, kernel, b, shape, last), (shape, w.shape, last, None if kernel is w else kernel)


def _kernel(xp: Any, w: Array, last: bool) -> Array:
    """The filters as images lie."""
    return laid(xp, w, last) if w.size else w


def _shown(xp: Any, x: Array, last: bool) -> Array:
    """x as images lie, at an address that cuDNN's plans take; a view of a batch may begin anywhere."""
    x = laid(xp, x, last)
    if address(x) % ALIGNED == 0:
        return x
    out = image(xp, x.shape, x.dtype, last)
    out[...] = x
    return out


def _correlated(xp: Any, x: Array, w: Array, b: Array | None, shape: Shape, last: bool) -> Array:
    if _dnn_takes(x, w):
        walk = shape.walk
        steps = dnn.Steps(walk.padding, walk.stride, walk.dilation)
        x, w = _shown(xp, x, last), _shown(xp, w, last)
        out = image(xp, (shape.n, shape.groups * shape.filters, *walk.out), x.dtype, last)
        bias = None if b is None else xp.ascontiguousarray(b, x.dtype)
        if bias is not None and address(bias) % ALIGNED:
            bias = bias.copy()
        if dnn.forward(xp, x, w, bias, out, steps, last):
            return out
        if bias is not None and dnn.forward(xp, x, w, None, out, steps, last):
            out += bias[:, None, None]
            return out
    return laid(xp, unfolded(xp, shape, x.dtype).correlate(laid(xp, x, False), laid(xp, w, False), b), last)


def _of_image(xp: Any, g: Array, w: Array, shape: Shape, last: bool) -> Array:
    if _dnn_takes(g, w):
        walk = shape.walk
        g, w = _shown(xp, g, last), _shown(xp, w, last)
        dx = image(xp, (shape.n, shape.groups * shape.channels, *walk.image), g.dtype, last)
        if dnn.of_image(xp, g, w, dx, dnn.Steps(walk.padding, walk.stride, walk.dilation), last):
            return dx
    dx = unfolded(xp, shape, g.dtype).adjoint(laid(xp, g, False), laid(xp, w, False), None, False)[0]
    return laid(xp, dx, last)


def _of_filters(xp: Any, g: Array, x: Array, shape: Shape, filters: tuple[int, ...], last: bool) -> Array:
    if _dnn_takes(g, x):
        walk = shape.walk
        g, x = _shown(xp, g, last), _shown(xp, x, last)
        dw = image(xp, filters, g.dtype, last)
        if dnn.of_filters(xp, x, g, dw, dnn.Steps(walk.padding, walk.stride, walk.dilation), last):
            return dw
    dw = unfolded(xp, shape, g.dtype).adjoint(laid(xp, g, False), None, laid(xp, x, False), False)[1]
    return xp.zeros(filters, g.dtype) if dw is None else dw  # None: no sample


def _channel_sums(g: Array) -> Array:
    """The gradient of the bias. g: (N, C, H, W)."""
    return total(widen(g), (0, 2, 3)).astype(g.dtype, copy=False)


def conv2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """As `conv._conv2d_backward`."""
    (w, x), (shape, filters, last, kernel) = saved, residual
    dx = _of_image(xp, g, w if kernel is None else kernel, shape, last) if needs[0] else None
    dw = _of_filters(xp, g, x, shape, filters, last) if needs[1] else None
    return dx, dw, _channel_sums(g) if needs[2] else None


def conv_transpose2d(
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
    """As `conv._conv_transpose2d`; with channels last where x or w has them."""
    walk = Walk(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
    last = prefers_channels_last(x) or prefers_channels_last(w)
    kernel = _kernel(xp, w, last)
    out = _of_image(xp, x, kernel, shape, last)
    if b is not None:
        out += b.astype(out.dtype, copy=False)[:, None, None]
    return out, (shape, w.shape, last, None if kernel is w else kernel)


def conv_transpose2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """As `conv._conv_transpose2d_backward`."""
    (w, x), (shape, filters, last, kernel) = saved, residual
    dx = _correlated(xp, g, w if kernel is None else kernel, None, shape, last) if needs[0] else None
    dw = _of_filters(xp, x, g, shape, filters, last) if needs[1] else None
    return dx, dw, _channel_sums(g) if needs[2] else None
