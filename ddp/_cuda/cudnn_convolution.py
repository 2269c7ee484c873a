"""Convolutions on a GPU, by cuDNN, or by im2col and a matrix product if cuDNN does not support a case.

Images are (N, C, H, W), filters (O, C/groups, KH, KW), each in C order or with channels last in memory. If the images
or the filters have channels last, so do the result and the gradient of the images: then images are not copied between
layers. An operand in the other format is copied; usually these are the filters, which are small. cuDNN derives the
number of groups from the numbers of channels.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda import cudnn_graph
from ddp._cuda.array_table import address
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec
from ddp.ops.arrays import Array, from_bfloat16, total
from ddp.ops.convolution import Pair, Shape, Window, adjoint, correlate
from ddp.ops.memory_formats import as_format, dense_strides, empty_image, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Saved

# The dtypes that cuDNN is used for. Not float64, because cuDNN is not faster than im2col there.
DTYPES = ("float16", "bfloat16", "float32")

# The alignment of addresses that cuDNN's plans expect, in bytes.
ALIGNMENT = 16

# The uid of the result. The operands have the uids 1 and 2.
_OUT = 3


def _spec(x: Array, channels_last: bool) -> TensorSpec:
    # cuDNN derives the format from the strides, so axes of one element need the strides of the format, too.
    order = (0, *range(2, x.ndim), 1) if channels_last else tuple(range(x.ndim))
    return cudnn_graph.tensor_spec(x, dense_strides(x.shape, order))


def _aligned(xp: Any, x: Array, channels_last: bool) -> Array:
    """x with channels last, or in C order. Copied if it has the other format, or if its address is not aligned."""
    x = as_format(xp, x, channels_last)
    if address(x) % ALIGNMENT == 0:
        return x
    out = empty_image(xp, x.shape, x.dtype, channels_last)
    out[...] = x
    return out


def cudnn_convolution(
    xp: Any, operation: str, window: Window, shape: tuple[int, ...], channels_last: bool, **operands: Array
) -> Array | None:
    """Runs cuDNN's conv_fprop, conv_dgrad or conv_wgrad on two operands.

    shape: of the result; operands: by the names of cuDNN's parameters
    Returns: the result; None if cuDNN is off or lacks support for the case, if dtypes differ, or an operand is empty
    """
    dtypes = {x.dtype for x in operands.values()}
    dtype = dtypes.pop()
    supported = cudnn_graph.settings.enabled and not dtypes and dtype.name in DTYPES
    if not supported or not all(x.size for x in operands.values()):
        return None
    out = empty_image(xp, shape, dtype, channels_last)
    operands = {name: _aligned(xp, x, channels_last) for name, x in operands.items()}
    specs = {name: _spec(x, channels_last) for name, x in operands.items()}
    out_spec = _spec(out, channels_last)
    options = {name: list(getattr(window, name)) for name in ("padding", "stride", "dilation")}

    def build(graph: GraphBuilder) -> None:
        inputs = {name: graph.input(uid, spec) for uid, (name, spec) in enumerate(specs.items(), 1)}
        graph.output(_OUT, getattr(graph.raw, operation)(**inputs, **options), out_spec)

    key = (operation, *specs.values(), out_spec, window.padding, window.stride, window.dilation)
    arrays = {**dict(enumerate(operands.values(), 1)), _OUT: out}
    return out if cudnn_graph.run_graph(xp, key, dtype.name, build, arrays) else None


def _correlate(xp: Any, x: Array, w: Array, shape: Shape, channels_last: bool) -> Array:
    size = (shape.n, shape.groups * shape.filters, *shape.window.out)
    out = cudnn_convolution(xp, "conv_fprop", shape.window, size, channels_last, image=x, weight=w)
    if out is None:
        out = correlate(xp, as_format(xp, x, False), as_format(xp, w, False), None, shape)
        out = as_format(xp, out, channels_last)
    return out


def _image_gradient(xp: Any, g: Array, w: Array, shape: Shape, channels_last: bool) -> Array:
    size = (shape.n, shape.groups * shape.channels, *shape.window.image)
    dx = cudnn_convolution(xp, "conv_dgrad", shape.window, size, channels_last, loss=g, filter=w)
    if dx is None:
        dx = adjoint(xp, as_format(xp, g, False), as_format(xp, w, False), None, shape)[0]
        dx = as_format(xp, dx, channels_last)
    return dx


def _filter_gradient(xp: Any, g: Array, x: Array, shape: Shape, w_shape: tuple[int, ...], channels_last: bool) -> Array:
    dw = cudnn_convolution(xp, "conv_wgrad", shape.window, w_shape, channels_last, image=x, loss=g)
    if dw is None:
        dw = adjoint(xp, as_format(xp, g, False), None, as_format(xp, x, False), shape)[1]
    return dw


def _add_bias(out: Array, b: Array | None) -> Array:
    if b is not None:
        out += b.astype(out.dtype, copy=False)[:, None, None]
    return out


def _channel_sums(xp: Any, g: Array) -> Array:
    """The gradient of the bias. g: (N, C, H, W)."""
    return total(from_bfloat16(xp, g), (0, 2, 3)).astype(g.dtype, copy=False)


def _prepare(
    xp: Any, x: Array, w: Array, groups: int, window: Window, transposed: bool
) -> tuple[Shape, Array, bool, Any]:
    """Returns shapes, filters in the common format, whether this format is channels last, residual for backward."""
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    channels_last = prefers_channels_last(x) or prefers_channels_last(w)
    kernel = as_format(xp, w, channels_last) if w.size else w
    # If the filters were copied, backward uses the copy.
    residual = (shape, w.shape, channels_last, None if kernel is w else kernel, transposed)
    return shape, kernel, channels_last, residual


def conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """See `ddp.ops.convolution.conv2d`. The result has channels last if x or w has."""
    window = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape, kernel, channels_last, residual = _prepare(xp, x, w, groups, window, False)
    return _add_bias(_correlate(xp, x, kernel, shape, channels_last), b), residual


def conv_transpose2d(
    xp: Any, x: Array, w: Array, b: Array | None, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """See `ddp.ops.convolution.conv_transpose2d`. The result has channels last if x or w has."""
    window = Window(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape, kernel, channels_last, residual = _prepare(xp, x, w, groups, window, True)
    return _add_bias(_image_gradient(xp, x, kernel, shape, channels_last), b), residual


def reference_residual(xp: Any, residual: Any) -> Any:
    """The residual of the op's reference."""
    return residual[0]


def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """The gradients of `conv2d` or `conv_transpose2d`. For the latter, x and g exchange their roles."""
    w, x = saved
    shape, w_shape, channels_last, kernel, transposed = residual
    result, image = (x, g) if transposed else (g, x)
    gradient = _correlate if transposed else _image_gradient
    if kernel is None:
        kernel = w
    dx = gradient(xp, g, kernel, shape, channels_last) if needs[0] else None
    dw = _filter_gradient(xp, result, image, shape, w_shape, channels_last) if needs[1] else None
    return dx, dw, _channel_sums(xp, g) if needs[2] else None
