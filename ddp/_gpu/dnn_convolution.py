"""Convolutions by cuDNN: forward, and the gradients of images and of filters, each a graph of one or two operations.

Images are (N, C, *sizes), filters (O, C/groups, *kernel), with any number of sizes; both lie in memory with channels
last, or in the order of their axes. Groups are told by the numbers of channels alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._gpu import dnn
from ddp._gpu.dnn import Graph, Spec

Array = Any
X, W, Y, B = 1, 2, 3, 4  # the numbers of the tensors


class Steps(NamedTuple):
    """How a filter walks."""

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def _formatted(x: Array, last: bool) -> Spec:
    # An axis of one element has the stride that the format would give it: the library reads the format off the strides.
    shape = tuple(x.shape)
    order = (0, *range(2, x.ndim), 1) if last else tuple(range(x.ndim))
    strides, step = [0] * x.ndim, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return dnn.spec(x, tuple(strides))


def forward(xp: Any, x: Array, w: Array, b: Array | None, y: Array, steps: Steps, last: bool) -> bool:
    """Writes the convolution of x, plus b where it is given, into y; False: cuDNN cannot."""
    image, kernel, out = (_formatted(each, last) for each in (x, w, y))

    def build(graph: Graph) -> None:
        found = graph.raw.conv_fprop(image=graph.input(X, image), weight=graph.input(W, kernel), **_walk(steps))
        if b is not None:
            c = out.shape[1]
            shape = (1, c, *(1,) * (len(out.shape) - 2))
            bias = graph.input(B, Spec(shape, (c, 1, *(c if last else 1,) * (len(shape) - 2)), out.dtype))
            found = graph.raw.bias(input=found, bias=bias)
        graph.output(Y, found, out)

    key = "convolution", image, kernel, steps, last, b is not None
    arrays = {X: x, W: w, Y: y}
    if b is not None:
        arrays[B] = b
    return dnn.ran(xp, key, image.dtype, build, arrays)


def of_image(xp: Any, g: Array, w: Array, dx: Array, steps: Steps, last: bool) -> bool:
    """Writes the gradient of the image into dx, g being that of the result; False: cuDNN cannot."""
    return _gradient(xp, "conv_dgrad", {"loss": (Y, g), "filter": (W, w)}, (X, dx), steps, last)


def of_filters(xp: Any, x: Array, g: Array, dw: Array, steps: Steps, last: bool) -> bool:
    """Writes the gradient of the filters into dw, g being that of the result; False: cuDNN cannot."""
    return _gradient(xp, "conv_wgrad", {"image": (X, x), "loss": (Y, g)}, (W, dw), steps, last)


def _gradient(
    xp: Any, operation: str, given: dict[str, tuple[int, Array]], made: tuple[int, Array], steps: Steps, last: bool
) -> bool:
    """given: the operation's operands by their names, each with its number; made: what is written to."""
    specs = {name: _formatted(array, last) for name, (_, array) in given.items()}
    (number, target), out = made, _formatted(made[1], last)

    def build(graph: Graph) -> None:
        operands = {name: graph.input(given[name][0], spec) for name, spec in specs.items()}
        graph.output(number, getattr(graph.raw, operation)(**operands, **_walk(steps)), out)

    key = operation, *specs.values(), out, steps, last
    return dnn.ran(xp, key, out.dtype, build, {number: target, **dict(given.values())})


def _walk(steps: Steps) -> dict[str, list[int]]:
    """The steps by cuDNN's names."""
    return {name: list(each) for name, each in steps._asdict().items()}
