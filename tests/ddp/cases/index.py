"""Indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draws, methods

ALL = slice(None)
MASK = np.array([True, False, True, False])
# What stands between brackets; arrays become tensors.
VIEWS = [1, (1, 2, 3), (-1, ALL, -2), (ALL, slice(1, None), slice(None, None, 2)), (..., 0), (ALL, None, 1)]
INDICES = {
    "list": (ALL, [0, 2, 0]),
    "tensor": np.array([1, 1, 0]),
    "two tensors": (np.array([1, 0, 1]), np.array([2, 0, 2])),
    "all tensors": (np.array([1, 1]), np.array([[0], [2]]), [3, 3]),
    "apart": (np.array([1, 0]), ALL, np.array([3, 3])),
    "after a view": (ALL, slice(1, None), None, [1, 1, -4]),
    "mask and list": ([0, 1], ALL, MASK.tolist()),
    "nothing": (ALL, []),
}


def at(index: Any) -> Callable[..., Any]:
    def tensors(t: Any, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(tensors(t, each) for each in part)
        return t.tensor(part) if isinstance(part, np.ndarray) else part

    return lambda t, x: x[tensors(t, index)]


def indexing() -> Iterator[Case]:
    cube = draws((2, 3, 4))
    for view in VIEWS:
        yield Case("getitem", str(view), at(view), cube)
    yield from methods("getitem", cube, ("narrow", 1, -2, 1), ("select", 2, -1))
    yield Case("getitem", "empty", at((ALL, slice(2, 1))), cube)
    yield Case("getitem", "0-d", at(...), draws(()))
    for label, index in INDICES.items():
        yield Case("index", label, at(index), cube)
    yield Case("index", "mask", lambda t, x: x[x > 0], cube)
    for name, *how in (
        ("index_select", 1, [2, 2, 0]),
        ("masked_select", MASK),
        ("take", [[0, -1], [5, 5]]),
        ("repeat_interleave", [2, 0, 1], 1),
    ):
        [case] = methods("index", cube, (name, *how))
        yield case._replace(label=name)
    # As many rows, and as wide, as it takes to sort and add them pair by pair.
    yield Case("index", "rows", lambda t, x: x[t.arange(90) ** 2 % 7], draws((7, 64)))
    yield Case("index", "empty", at((ALL, [0, 1])), draws((0, 3)))


def gathering() -> Iterator[Case]:
    where = [[0, 2, 1], [2, 2, 0]]
    yield from methods("gather", draws((3, 3)), ("gather", 0, where))
    yield from methods("gather", draws((2, 4)), ("gather", 1, where), ("gather", -1, [[1, 1]]))
    yield from methods(
        "gather",
        draws((2, 3, 4)),
        ("take_along_dim", [[[1], [0]], [[-1], [2]]], 1),
        ("take_along_dim", [[0, 5, 5]]),
    )
    for name, *how in [("sort", 1), ("sort", -1, True), ("topk", 2, 1), ("kthvalue", 2)]:
        values = lambda t, x, name=name, how=how: getattr(x, name)(*how).values  # noqa: E731
        yield Case("gather", f"{name} {how}", values, draws((2, 3, 4)))
    yield from methods("gather", draws(()), ("gather", 0, [0, 0]), ("gather", -1, np.array(0)))
    yield Case("gather", "empty", lambda t, x: x.sort(0).values, draws((2, 0)))
    yield Case("reshape", "sort 0-d", lambda t, x: x.sort().values, draws(()))


CASES = [*indexing(), *gathering()]
