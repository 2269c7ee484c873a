"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, spaced


def images() -> Iterator[Case]:
    def conv(**how: Any) -> Callable[..., Any]:
        return lambda t, *inputs: t.nn.functional.conv2d(*inputs, **how)

    x, w, b = draw(2, 4, 6, 5), draw(6, 4, 3, 2, seed=1), draw(6, seed=2)
    yield Case("conv2d", "plain", conv(), (x, w, b))
    yield Case("conv2d", "no bias", conv(), (x, w))
    yield Case("conv2d", "stride", conv(stride=2), (x, w, b))
    yield Case("conv2d", "stride leaves a rest", conv(stride=(3, 2)), (x, w, b))
    yield Case("conv2d", "padding", conv(padding=(1, 2)), (x, w, b))
    yield Case("conv2d", "dilation", conv(dilation=(2, 3)), (x, w, b))
    yield Case("conv2d", "all", conv(stride=(2, 1), padding=1, dilation=(1, 2)), (x, w, b))
    yield Case("conv2d", "groups", conv(groups=2, padding=1), (x, draw(6, 2, 3, 2, seed=1), b))
    yield Case("conv2d", "depthwise", conv(groups=4), (x, draw(4, 1, 2, 2, seed=1), draw(4)))
    yield Case("conv2d", "1x1", conv(), (x, draw(3, 4, 1, 1, seed=1), draw(3)))
    yield Case("conv2d", "one image", conv(), (draw(4, 6, 5), w, b))
    yield Case("conv2d", "empty", conv(padding=1), (draw(0, 4, 6, 5), w, b))
    yield Case("conv2d", "non-contiguous", conv(padding=1), (spaced(2, 4, 6, 5), spaced(6, 4, 3, 2), b))

    def pool(*how: Any, **more: Any) -> Callable[..., Any]:
        return lambda t, x: t.nn.functional.max_pool2d(x, *how, **more)

    yield Case("max_pool2d", "plain", pool(2), (x,))
    yield Case("max_pool2d", "overlapping", pool(3, 1), (x,))
    yield Case("max_pool2d", "padding", pool(3, 2, 1), (x,))
    yield Case("max_pool2d", "sizes", pool((2, 3), (1, 2), (1, 0)), (x,))
    yield Case("max_pool2d", "dilation", pool(2, 1, dilation=2), (x,))
    yield Case("max_pool2d", "one image", pool(2), (draw(2, 4, 4),))
    yield Case("max_pool2d", "empty", pool(2), (draw(0, 2, 4, 4),))
    yield Case("max_pool2d", "non-contiguous", pool(2), (spaced(2, 4, 6, 5),))


CASES = list(images())
