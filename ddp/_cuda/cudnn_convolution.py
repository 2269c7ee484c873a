"""Convolutions by cuDNN: forward, and the gradients of images and of filters, each a graph of one or two operations.

Images are (N, C, *sizes), filters (O, C/groups, *kernel), with any number of sizes; both lie in memory with channels
last, or in the order of their axes. Groups are told by the numbers of channels alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._cuda import cudnn_graph
from ddp._cuda.array_table import address
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec
from ddp.ops.convolution import Pair, Shape, Window, im2col_layout
from ddp.ops.memory_formats import as_format, empty_image, prefers_channels_last
from ddp.ops.op import Array, Gradients, Needs, Saved, total, upcast

X, W, Y, B = 1, 2, 3, 4  # the numbers of the tensors


class ConvolutionSteps(NamedTuple):
    """How a filter walks."""

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def _formatted(x: Array, last: bool) -> TensorSpec:
    # An axis of one element has the stride that the format would give it: the library reads the format off the strides.
    shape = tuple(x.shape)
    order = (0, *range(2, x.ndim), 1) if last else tuple(range(x.ndim))
    strides, step = [0] * x.ndim, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return cudnn_graph.tensor_spec(x, tuple(strides))


def forward_graph(xp: Any, x: Array, w: Array, b: Array | None, y: Array, steps: ConvolutionSteps, last: bool) -> bool:
    """Writes the convolution of x, plus b where it is given, into y; False: cuDNN cannot."""
    image, kernel, out = (_formatted(each, last) for each in (x, w, y))

    def build(graph: GraphBuilder) -> None:
        found = graph.raw.conv_fprop(image=graph.input(X, image), weight=graph.input(W, kernel), **_walk(steps))
        if b is not None:
            c = out.shape[1]
            shape = (1, c, *(1,) * (len(out.shape) - 2))
            bias = graph.input(B, TensorSpec(shape, (c, 1, *(c if last else 1,) * (len(shape) - 2)), out.dtype))
            found = graph.raw.bias(input=found, bias=bias)
        graph.output(Y, found, out)

    key = "convolution", image, kernel, steps, last, b is not None
    arrays = {X: x, W: w, Y: y}
    if b is not None:
        arrays[B] = b
    return cudnn_graph.run_graph(xp, key, image.dtype, build, arrays)


def image_gradient_graph(xp: Any, g: Array, w: Array, dx: Array, steps: ConvolutionSteps, last: bool) -> bool:
    """Writes the gradient of the image into dx, g being that of the result; False: cuDNN cannot."""
    return _gradient(xp, "conv_dgrad", {"loss": (Y, g), "filter": (W, w)}, (X, dx), steps, last)


def filter_gradient_graph(xp: Any, x: Array, g: Array, dw: Array, steps: ConvolutionSteps, last: bool) -> bool:
    """Writes the gradient of the filters into dw, g being that of the result; False: cuDNN cannot."""
    return _gradient(xp, "conv_wgrad", {"image": (X, x), "loss": (Y, g)}, (W, dw), steps, last)


def _gradient(
    xp: Any,
    operation: str,
    given: dict[str, tuple[int, Array]],
    made: tuple[int, Array],
    steps: ConvolutionSteps,
    last: bool,
) -> bool:
    """given: the operation's operands by their names, each with its number; made: what is written to."""
    specs = {name: _formatted(array, last) for name, (_, array) in given.items()}
    (number, target), out = made, _formatted(made[1], last)

    def build(graph: GraphBuilder) -> None:
        operands = {name: graph.input(given[name][0], spec) for name, spec in specs.items()}
        graph.output(number, getattr(graph.raw, operation)(**operands, **_walk(steps)), out)

    key = operation, *specs.values(), out, steps, last
    return cudnn_graph.run_graph(xp, key, out.dtype, build, {number: target, **dict(given.values())})


def _walk(steps: ConvolutionSteps) -> dict[str, list[int]]:
    """The steps by cuDNN's names."""
    return {name: list(each) for name, each in steps._asdict().items()}


# Convolutions on a GPU: by cuDNN where it is there and takes the case, else by im2col and a matrix product.
#
# Images may lie with channels last; then so do filters (a copy is made of those that do not: they are small), results
# and gradients, and no image is laid out anew between one layer and the next.


DTYPES = ("float16", "bfloat16", "float32")  # float64 is nowhere fast, and unfolding takes it as well

ALIGNED = 16  # bytes: what the plans of cuDNN's front end are made for


def _dnn_takes(x: Array, w: Array) -> bool:
    return x.dtype.name in DTYPES and x.dtype == w.dtype and x.size > 0 and w.size > 0


def conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    """As `conv._conv2d`; with channels last where x or w has them."""
    window = Window(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, window)
    last = prefers_channels_last(x) or prefers_channels_last(w)
    kernel = _kernel(xp, w, last)
    # Backward takes the filters as they were laid out here, if that took a copy.
    return _correlated(xp, x, kernel, b, shape, last), (shape, w.shape, last, None if kernel is w else kernel)


def _kernel(xp: Any, w: Array, last: bool) -> Array:
    """The filters as images lie."""
    return as_format(xp, w, last) if w.size else w


def _shown(xp: Any, x: Array, last: bool) -> Array:
    """x as images lie, at an address that cuDNN's plans take; a view of a batch may begin anywhere."""
    x = as_format(xp, x, last)
    if address(x) % ALIGNED == 0:
        return x
    out = empty_image(xp, x.shape, x.dtype, last)
    out[...] = x
    return out


def _correlated(xp: Any, x: Array, w: Array, b: Array | None, shape: Shape, last: bool) -> Array:
    if _dnn_takes(x, w):
        window = shape.window
        steps = ConvolutionSteps(window.padding, window.stride, window.dilation)
        x, w = _shown(xp, x, last), _shown(xp, w, last)
        out = empty_image(xp, (shape.n, shape.groups * shape.filters, *window.out), x.dtype, last)
        bias = None if b is None else xp.ascontiguousarray(b, x.dtype)
        if bias is not None and address(bias) % ALIGNED:
            bias = bias.copy()
        if forward_graph(xp, x, w, bias, out, steps, last):
            return out
        if bias is not None and forward_graph(xp, x, w, None, out, steps, last):
            out += bias[:, None, None]
            return out
    return as_format(
        xp, im2col_layout(xp, shape, x.dtype).correlate(as_format(xp, x, False), as_format(xp, w, False), b), last
    )


def _of_image(xp: Any, g: Array, w: Array, shape: Shape, last: bool) -> Array:
    if _dnn_takes(g, w):
        window = shape.window
        g, w = _shown(xp, g, last), _shown(xp, w, last)
        dx = empty_image(xp, (shape.n, shape.groups * shape.channels, *window.image), g.dtype, last)
        if image_gradient_graph(xp, g, w, dx, ConvolutionSteps(window.padding, window.stride, window.dilation), last):
            return dx
    dx = im2col_layout(xp, shape, g.dtype).adjoint(as_format(xp, g, False), as_format(xp, w, False), None, False)[0]
    return as_format(xp, dx, last)


def _of_filters(xp: Any, g: Array, x: Array, shape: Shape, filters: tuple[int, ...], last: bool) -> Array:
    if _dnn_takes(g, x):
        window = shape.window
        g, x = _shown(xp, g, last), _shown(xp, x, last)
        dw = empty_image(xp, filters, g.dtype, last)
        if filter_gradient_graph(xp, x, g, dw, ConvolutionSteps(window.padding, window.stride, window.dilation), last):
            return dw
    dw = im2col_layout(xp, shape, g.dtype).adjoint(as_format(xp, g, False), None, as_format(xp, x, False), False)[1]
    return xp.zeros(filters, g.dtype) if dw is None else dw  # None: no sample


def _channel_sums(g: Array) -> Array:
    """The gradient of the bias. g: (N, C, H, W)."""
    return total(upcast(g), (0, 2, 3)).astype(g.dtype, copy=False)


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
    window = Window(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape = Shape.of(x.shape[0], w.shape, groups, window)
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
