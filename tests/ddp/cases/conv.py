"""Convolutions and their transposes, images as columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ddp
from ddp._tensor.base import apply
from ddp.ops import convolution
from tests.ddp.cases.table import Case, draw, draws, function

IMAGES = (2, 4, 6, 5)
FILTERS = (6, 4, 3, 2)
BIAS = (6,)
# Enough channels for the layout with channels last.
CHANNELS = ((3, 12, 4, 3), (2, 12, 2, 2))
ALL = {"stride": (2, 1), "padding": 1, "dilation": (1, 2)}
# A function, options, and shapes of the images, the filters and the bias.
CONVOLUTIONS: list[tuple[Any, ...]] = [
    ("conv2d", {}, (IMAGES, FILTERS, BIAS)),
    ("conv2d", {}, (IMAGES, FILTERS)),
    ("conv2d", {"stride": 2}, (IMAGES, FILTERS, BIAS)),
    ("conv2d", {"padding": (1, 2)}, (IMAGES, FILTERS, BIAS)),
    ("conv2d", {"padding": "same", "dilation": (1, 2)}, (IMAGES, FILTERS, BIAS)),
    ("conv2d", ALL, (IMAGES, FILTERS, BIAS)),
    ("conv2d", {"groups": 2, "padding": 1}, (IMAGES, (6, 2, 3, 2), BIAS)),
    ("conv2d", {"groups": 4}, (IMAGES, (4, 1, 2, 2), (4,))),
    ("conv2d", {}, (IMAGES, (3, 4, 1, 1), (3,))),
    ("conv2d", {}, ((4, 6, 5), FILTERS, BIAS)),
    ("conv2d", {"padding": 1}, ((0, 4, 6, 5), FILTERS, BIAS)),
    ("conv2d", {}, (*CHANNELS, (2,))),
    ("conv2d", ALL, CHANNELS),
    ("conv2d", {"groups": 2}, ((2, 24, 3, 3), (4, 12, 2, 2), (4,))),
    ("conv1d", {"stride": 2, "padding": 1}, ((2, 3, 7), (4, 3, 3), (4,))),
]
BACK = (2, 4, 3, 4)
TRANSPOSED = (4, 3, 3, 2)
TRANSPOSES: list[tuple[Any, ...]] = [
    ("conv_transpose2d", {}, (BACK, TRANSPOSED, (3,))),
    ("conv_transpose2d", {}, (BACK, TRANSPOSED)),
    ("conv_transpose2d", {"stride": (2, 1), "padding": 1}, (BACK, TRANSPOSED, (3,))),
    ("conv_transpose2d", {"stride": (3, 2), "output_padding": (2, 1)}, (BACK, TRANSPOSED, (3,))),
    ("conv_transpose2d", {"dilation": (1, 2)}, (BACK, TRANSPOSED, (3,))),
    ("conv_transpose2d", {"groups": 2, "stride": 2}, (BACK, (4, 2, 2, 2), (4,))),
    ("conv_transpose2d", {}, ((4, 3, 4), TRANSPOSED, (3,))),
    ("conv_transpose2d", {"stride": 2}, ((0, 4, 3, 4), TRANSPOSED, (3,))),
    ("conv_transpose2d", {"stride": 2, "padding": 1}, ((2, 3, 3, 2), (3, 12, 3, 3), (12,))),
    ("conv_transpose1d", {"stride": 2, "padding": 1, "output_padding": 1}, ((2, 3, 4), (3, 2, 3), (2,))),
]


def convolutions() -> Iterator[Case]:
    for name, options, shapes in CONVOLUTIONS + TRANSPOSES:
        label = f"{'empty ' * (0 in shapes[0])}{options} {shapes}"
        yield Case(name.replace("1d", "2d"), label, function(name, **options), draws(*shapes))


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


CASES = [*convolutions(), *columns(), *filters()]
