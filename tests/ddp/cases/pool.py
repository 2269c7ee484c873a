"""Pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.ddp.cases.table import Case, draws, function

IMAGES = (2, 4, 6, 5)
MAXIMA: list[tuple[Any, ...]] = [
    ("plain", IMAGES, (2,), {}),
    ("overlapping", IMAGES, (3, 1), {}),
    ("gaps", IMAGES, (2, 3), {}),
    ("padding", IMAGES, (3, 2, 1), {}),
    ("sizes", IMAGES, ((2, 3), (1, 2), (1, 0)), {}),
    ("dilation", IMAGES, (2, 1), {"dilation": 2}),
    ("ceil padding", IMAGES, (3, 2, 1), {"ceil_mode": True}),
    ("ceil beyond the padding", (1, 2, 5, 6), (2, 3, 1), {"ceil_mode": True}),
    ("one image", (2, 4, 4), (2,), {}),
    ("empty", (0, 2, 4, 4), (2,), {}),
    ("stride of nothing", IMAGES, (2, ()), {}),
]
MEANS: list[tuple[Any, ...]] = [
    ("avg", "plain", IMAGES, (2,), {}),
    ("avg", "overlapping", IMAGES, (3, 1), {}),
    ("avg", "padding", IMAGES, ((3, 2), 2, 1), {}),
    ("avg", "padding not counted", IMAGES, (3, 2, 1), {"count_include_pad": False}),
    ("avg", "ceil", IMAGES, (3, 2, 1), {"ceil_mode": True}),
    ("avg", "ceil, not counted", IMAGES, (2, 3, 1), {"ceil_mode": True, "count_include_pad": False}),
    ("avg", "divisor", IMAGES, (2,), {"divisor_override": 3}),
    ("avg", "one image", (2, 4, 4), (2,), {}),
    ("avg", "empty", (0, 2, 4, 4), (2,), {}),
    ("avg", "stride of nothing", IMAGES, ((2, 3), ()), {}),
    ("adaptive_avg", "one", IMAGES, (1,), {}),
    ("adaptive_avg", "overlapping", IMAGES, ((4, 3),), {}),
    ("adaptive_avg", "larger", IMAGES, ((7, 8),), {}),
    ("adaptive_avg", "a side left", IMAGES, ((None, 2),), {}),
    ("adaptive_avg", "one image", (2, 4, 5), (2,), {}),
    ("adaptive_avg", "empty", (0, 2, 4, 4), (2,), {}),
]


def maxima() -> Iterator[Case]:
    for label, shape, how, options in MAXIMA:
        yield Case("max_pool2d", label, function("max_pool2d", *how, **options), draws(shape))
        found = function("max_pool2d", *how, return_indices=True, **options)
        yield Case("max_pool2d_with_indices", label, lambda t, x, found=found: found(t, x)[0], draws(shape))


def means() -> Iterator[Case]:
    for kind, label, shape, how, options in MEANS:
        op = f"{kind}_pool2d"
        yield Case(op, label, function(op, *how, **options), draws(shape))


def lines() -> Iterator[Case]:
    for kind, how in {"max": (3, 2, 1), "avg": (3, 2, 1), "adaptive_avg": (3,)}.items():
        yield Case(f"{kind}_pool2d", "1-d", function(f"{kind}_pool1d", *how), draws((2, 3, 8)))


CASES = [*maxima(), *means(), *lines()]
