"""Pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, function


def maxima() -> Iterator[Case]:
    x = draw(2, 4, 6, 5)
    for op, more in (("max_pool2d", {}), ("max_pool2d_with_indices", {"return_indices": True})):

        def pool(*how: Any, name: str = "max_pool2d", more: Any = more, **rest: Any) -> Callable[..., Any]:
            run = function(name, *how, **rest, **more)
            return (lambda t, x: run(t, x)[0]) if more else run

        yield Case(op, "plain", pool(2), (x,))
        yield Case(op, "overlapping", pool(3, 1), (x,))
        yield Case(op, "gaps", pool(2, 3), (x,))
        yield Case(op, "padding", pool(3, 2, 1), (x,))
        yield Case(op, "sizes", pool((2, 3), (1, 2), (1, 0)), (x,))
        yield Case(op, "dilation", pool(2, 1, dilation=2), (x,))
        yield Case(op, "ceil padding", pool(3, 2, 1, ceil_mode=True), (x,))
        yield Case(op, "ceil beyond the padding", pool(2, 3, 1, ceil_mode=True), (draw(1, 2, 5, 6),))
        yield Case(op, "one image", pool(2), (draw(2, 4, 4),))
        yield Case(op, "empty", pool(2), (draw(0, 2, 4, 4),))
        yield Case(op, "1-d", pool(3, 2, 1, name="max_pool1d", ceil_mode=True), (draw(2, 3, 8),))
        yield Case(op, "stride of nothing", pool(2, ()), (x,))


def means() -> Iterator[Case]:
    x = draw(2, 3, 6, 5)
    op = "avg_pool2d"
    yield Case(op, "plain", function(op, 2), (x,))
    yield Case(op, "overlapping", function(op, 3, 1), (x,))
    yield Case(op, "padding", function(op, (3, 2), 2, 1), (x,))
    yield Case(op, "padding not counted", function(op, 3, 2, 1, count_include_pad=False), (x,))
    yield Case(op, "ceil", function(op, 3, 2, 1, ceil_mode=True), (x,))
    yield Case(op, "ceil, not counted", function(op, 2, 3, 1, ceil_mode=True, count_include_pad=False), (x,))
    yield Case(op, "divisor", function(op, 2, divisor_override=3), (x,))
    yield Case(op, "one image", function(op, 2), (draw(2, 4, 4),))
    yield Case(op, "empty", function(op, 2), (draw(0, 2, 4, 4),))
    yield Case(op, "stride of nothing", function(op, (2, 3), ()), (x,))
    yield Case(op, "1-d", function("avg_pool1d", 3, 2, 1), (draw(2, 3, 8),))

    op = "adaptive_avg_pool2d"
    yield Case(op, "one", function(op, 1), (x,))
    yield Case(op, "overlapping", function(op, (4, 3)), (x,))
    yield Case(op, "larger", function(op, (7, 8)), (x,))
    yield Case(op, "a side left", function(op, (None, 2)), (x,))
    yield Case(op, "one image", function(op, 2), (draw(2, 4, 5),))
    yield Case(op, "empty", function(op, 2), (draw(0, 2, 4, 4),))
    yield Case(op, "1-d", function("adaptive_avg_pool1d", 3), (draw(2, 3, 8),))


CASES = [*maxima(), *means()]
