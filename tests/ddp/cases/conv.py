"""Convolutions and their transposes, images as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddp
from ddp._tensor.base import apply
from ddp.ops import convolution
from tests.ddp.cases.table import Case, draw, function


def images() -> Iterator[Case]:
    def conv(**how: Any) -> Callable[..., Any]:
        return function("conv2d", **how)

    x = draw(2, 4, 6, 5)
    w = draw(6, 4, 3, 2, seed=1)
    b = draw(6, seed=2)
    yield Case("conv2d", "plain", conv(), (x, w, b))
    yield Case("conv2d", "no bias", conv(), (x, w))
    yield Case("conv2d", "stride", conv(stride=2), (x, w, b))
    yield Case("conv2d", "padding", conv(padding=(1, 2)), (x, w, b))
    yield Case("conv2d", "same", conv(padding="same", dilation=(1, 2)), (x, w, b))
    yield Case("conv2d", "dilation", conv(dilation=(2, 3)), (x, w, b))
    yield Case("conv2d", "all", conv(stride=(2, 1), padding=1, dilation=(1, 2)), (x, w, b))
    yield Case("conv2d", "groups", conv(groups=2, padding=1), (x, draw(6, 2, 3, 2, seed=1), b))
    yield Case("conv2d", "depthwise", conv(groups=4), (x, draw(4, 1, 2, 2, seed=1), draw(4)))
    yield Case("conv2d", "1x1", conv(), (x, draw(3, 4, 1, 1, seed=1), draw(3)))
    yield Case("conv2d", "one image", conv(), (draw(4, 6, 5), w, b))
    yield Case("conv2d", "empty", conv(padding=1), (draw(0, 4, 6, 5), w, b))

    lines = function("conv1d", stride=2, padding=1)
    yield Case("conv2d", "1-d", lines, (draw(2, 3, 7), draw(4, 3, 3, seed=1), draw(4)))

    # Enough channels for the layout with channels last.
    x = draw(3, 12, 4, 3)
    w = draw(2, 12, 2, 2, seed=1)
    yield Case("conv2d", "channels", conv(), (x, w, draw(2)))
    yield Case("conv2d", "channels all", conv(stride=(2, 1), padding=1, dilation=(1, 2)), (x, w))
    yield Case("conv2d", "channels groups", conv(groups=2), (draw(2, 24, 3, 3), draw(4, 12, 2, 2, seed=1), draw(4)))


def transposes() -> Iterator[Case]:
    def back(**how: Any) -> Callable[..., Any]:
        return function("conv_transpose2d", **how)

    name = "conv_transpose2d"
    x = draw(2, 4, 3, 4)
    w = draw(4, 3, 3, 2, seed=1)
    b = draw(3, seed=2)
    yield Case(name, "plain", back(), (x, w, b))
    yield Case(name, "no bias", back(), (x, w))
    yield Case(name, "stride", back(stride=2), (x, w, b))
    yield Case(name, "padding", back(stride=(2, 1), padding=1), (x, w, b))
    yield Case(name, "output padding", back(stride=(3, 2), output_padding=(2, 1)), (x, w, b))
    yield Case(name, "dilation", back(dilation=(1, 2)), (x, w, b))
    yield Case(name, "groups", back(groups=2, stride=2), (x, draw(4, 2, 2, 2, seed=1), draw(4)))
    yield Case(name, "one image", back(), (draw(4, 3, 4), w, b))
    yield Case(name, "empty", back(stride=2), (draw(0, 4, 3, 4), w, b))
    yield Case(name, "channels", back(stride=2, padding=1), (draw(2, 3, 3, 2), draw(3, 12, 3, 3, seed=1), draw(12)))
    lines = function("conv_transpose1d", stride=2, padding=1, output_padding=1)
    yield Case(name, "1-d", lines, (draw(2, 3, 4), draw(3, 2, 3, seed=1), draw(2)))


def columns() -> Iterator[Case]:
    for op, name, x, sizes in [("im2col", "unfold", (2, 3, 5, 4), ()), ("col2im", "fold", (2, 12, 12), ((5, 4),))]:
        yield Case(op, "plain", function(name, *sizes, 2), (draw(*x),))
        yield Case(op, "empty", function(name, *sizes, 2), (draw(0, *x[1:]),))
    how = {"dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
    yield Case("im2col", "all", function("unfold", (3, 2), **how), (draw(2, 2, 5, 4),))
    yield Case("col2im", "all", function("fold", (5, 4), (3, 2), **how), (draw(2, 12, 6),))


def filters() -> Iterator[Case]:
    """The gradient of a convolution's filters, which changes with the images and the gradient of the result."""

    def gradient(t: Any, x: Any, g: Any) -> Any:
        size = (6, x.shape[1] // 2, 3, 2)
        how = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1)}
        if isinstance(x, ddp.Tensor):
            window = convolution.Window(tuple(x.shape[2:]), size[2:], **how)
            return apply(convolution.conv_filters, (x, g), shape=convolution.Shape.of(len(x), size, 2, window))
        w = t.ones(size, dtype=x.dtype).requires_grad_()
        y = t.nn.functional.conv2d(x, w, groups=2, **how)
        nothing = (x.sum() + g.sum()) * 0  # PyTorch has no gradient for what is empty
        return t.autograd.grad(y, w, g, create_graph=True)[0] + nothing

    yield Case("conv_filters", "groups", gradient, (draw(2, 4, 6, 5), draw(2, 6, 3, 6, seed=1)))
    yield Case("conv_filters", "empty", gradient, (draw(0, 4, 6, 5), draw(0, 6, 3, 6)))


CASES = [*images(), *transposes(), *columns(), *filters()]
