"""Convolutions on a GPU: by cuDNN where it takes the case, else by im2col and a matrix product.

Images are (N, C, H, W), filters (O, C/groups, KH, KW); both lie in memory with channels last, or in the order of their
axes. If an image or the filters have channels last, results and gradients do too (filters that do not are copied: they
are small), and no image is laid out anew between one layer and the next. Groups follow from the numbers of channels.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda import cudnn_graph
from ddp._cuda.array_table import address
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec
from ddp.ops.arrays import Array, total, upcast
from ddp.ops.convolution import Pair, Shape, Window, adjoint, correlate
from ddp.ops.memory_formats import as_format, dense_strides, empty_image, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Saved

DTYPES = ("float16", "bfloat16", "float32")  # float64 is nowhere fast, and im2col takes it as well
ALIGNED = 16  # bytes: what the plans of cuDNN's front end are made for
_OUT = 3  # the number of the tensor that is written; the operands are 1 and 2


def _spec(x: Array, last: bool) -> TensorSpec:
    # An axis of one element has the stride that the format would give it: the library reads the format off the strides.
    order = (0, *range(2, x.ndim), 1) if last else tuple(range(x.ndim))
    return cudnn_graph.tensor_spec(x, dense_strides(x.shape, order))


def _aligned(xp: Any, x: Array, last: bool) -> Array:
    """x in the format, at an address that cuDNN's plans take; a view of a batch may begin anywhere."""
    x = as_format(xp, x, last)
    if address(x) % ALIGNED == 0:
        return x
    out = empty_image(xp, x.shape, x.dtype, last)
    out[...] = x
    return out


def cudnn_convolution(
    xp: Any, operation: str, window: Window, shape: tuple[int, ...], last: bool, **operands: Array
) -> Array | None:
    """What cuDNN's operation (conv_fprop, conv_dgrad, conv_wgrad) makes of two operands; None where it takes none.

    shape: of the result; operands: by their names there
    """
    dtypes = {x.dtype for x in operands.values()}
    dtype = dtypes.pop()
    takes = cudnn_graph.settings.enabled and not dtypes and dtype.name in DTYPES
    if not takes or not all(x.size for x in operands.values()):
        return None
    out = empty_image(xp, shape, dtype, last)
    operands = {name: _aligned(xp, x, last) for name, x in operands.items()}
    specs, written = {name: _spec(x, last) for name, x in operands.items()}, _spec(out, last)
    steps = {name: list(getattr(window, name)) for name in ("padding", "stride", "dilation")}

    def build(graph: GraphBuilder) -> None:
        inputs = {name: graph.input(number, spec) for number, (name, spec) in enumerate(specs.items(), 1)}
        graph.output(_OUT, getattr(graph.raw, operation)(**inputs, **steps), written)

    key = operation, *specs.values(), written, window.padding, window.stride, window.dilation
    arrays = {**dict(enumerate(operands.values(), 1)), _OUT: out}
    return out if cudnn_graph.run_graph(xp, key, dtype.name, build, arrays) else None


def _correlated(xp: Any, x: Array, w: Array, shape: Shape, last: bool) -> Array:
    size = shape.n, shape.groups * shape.filters, *shape.window.out
    out = cudnn_convolution(xp, "conv_fprop", shape.window, size, last, image=x, weight=w)
    if out is None:
        out = as_format(xp, correlate(xp, as_format(xp, x, False), as_format(xp, w, False), None, shape), last)
    return out


def _image_gradient(xp: Any, g: Array, w: Array, shape: Shape, last: bool) -> Array:
    size = shape.n, shape.groups * shape.channels, *shape.window.image
    dx = cudnn_convolution(xp, "conv_dgrad", shape.window, size, last, loss=g, filter=w)
    if dx is None:
        dx = as_format(xp, adjoint(xp, as_format(xp, g, False), as_format(xp, w, False), None, shape)[0], last)
    return dx


def _filter_gradient(xp: Any, g: Array, x: Array, shape: Shape, filters: tuple[int, ...], last: bool) -> Array:
    dw = cudnn_convolution(xp, "conv_wgrad", shape.window, filters, last, image=x, loss=g)
    if dw is None:
        dw = adjoint(xp, as_format(xp, g, False), None, as_format(xp, x, False), shape)[1]
    return dw


def _plus(out: Array, b: Array | None) -> Array:
    if b is not None:
        out += b.astype(out.dtype, copy=False)[:, None, None]
    return out


def _channel_sums(g: Array) -> Array:
    """The gradient of the bias. g: (N, C, H, W)."""
    return total(upcast(g), (0, 2, 3)).astype(g.dtype, copy=False)


def _prepared(
    xp: Any, x: Array, w: Array, groups: int, window: Window, transposed: bool
) -> tuple[Shape, Array, bool, Any]:
    """The shapes, the filters as images lie, whether these have channels last, and what backward wants."""
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    last = prefers_channels_last(x) or prefers_channels_last(w)
    kernel = as_format(xp, w, last) if w.size else w
    # Backward takes the filters as they were laid out here, if that took a copy.
    return shape, kernel, last, (shape, w.shape, last, None if kernel is w else kernel, transposed)


def conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """As `ddp.ops.convolution.conv2d`; with channels last where x or w has them."""
    window = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape, kernel, last, residual = _prepared(xp, x, w, groups, window, False)
    return _plus(_correlated(xp, x, kernel, shape, last), b), residual


def conv_transpose2d(
    xp: Any, x: Array, w: Array, b: Array | None, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """As `ddp.ops.convolution.conv_transpose2d`; with channels last where x or w has them."""
    window = Window(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape, kernel, last, residual = _prepared(xp, x, w, groups, window, True)
    return _plus(_image_gradient(xp, x, kernel, shape, last), b), residual


def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """The gradients of both: the image of a transposed convolution is what a plain one writes."""
    (w, x), (shape, filters, last, kernel, transposed) = saved, residual
    written, read, image_gradient = (x, g, _correlated) if transposed else (g, x, _image_gradient)
    dx = image_gradient(xp, g, w if kernel is None else kernel, shape, last) if needs[0] else None
    dw = _filter_gradient(xp, written, read, shape, filters, last) if needs[1] else None
    return dx, dw, _channel_sums(g) if needs[2] else None
