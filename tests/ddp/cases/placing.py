"""Writing by index: copies, and in place on the result of an op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw, draws, method

X = (3, 4)
V = (2, 4)
INDEX = [[0, 2, 1, 1], [2, 0, 2, 0]]
AGAIN = [[0, 1, 1, 2], [0, 1, 0, 0]]  # places that are named twice
COLUMNS = [True, False, True, False]
MASK = (draw(*X) > 0).tolist()

# An op, shapes of a tensor and of the values that are written to it, a method and what it takes before the values.
WRITES: list[tuple[Any, ...]] = [
    ("scatter", X, V, "scatter", 0, INDEX),
    ("scatter", X, V, "scatter_", 0, INDEX),
    ("scatter", X, (2, 1), "scatter", 1, [[3], [0]]),
    ("scatter", X, None, "scatter", 1, [[0, 3]], 5.0),
    ("scatter", (3,), (), "scatter", 0, np.array(0)),
    ("scatter", (), (1,), "scatter", 0, [0]),
    ("scatter_add", X, V, "scatter_add", 0, AGAIN),
    ("scatter_add", X, V, "scatter_add_", 1, AGAIN),
    ("scatter_add", (3,), (), "scatter_add", 0, np.array(0)),
    ("scatter_add", (), (1,), "scatter_add", 0, [0]),
    ("index_add", X, V, "index_add", 0, [1, 1]),
    ("index_add", X, V, "index_add_", 0, [1, 1]),
    ("index_add", X, (3, 3), "index_add", 1, [3, 0, 3]),
    ("index_add", (0, 3), (0, 2), "index_add", 1, [0, 0]),
    ("setitem", X, V, "index_copy", 0, [2, 0]),
    ("setitem", X, (), "index_fill", 1, [0, 2]),
    ("setitem", X, None, "index_fill", 1, [0, -1], 2.5),
    ("setitem", X, V, "masked_scatter", [[True], [False], [True]]),
    ("setitem", (), (2,), "masked_scatter", np.array(True)),
    ("masked_fill", X, None, "masked_fill", MASK, -1.5),
    ("masked_fill", X, (), "masked_fill", MASK),
    ("masked_fill", X, (), "masked_fill", [[[True]], [[False]]]),
    ("masked_fill", X, (), "masked_fill_", COLUMNS),
    ("masked_fill", (0, 3), (), "masked_fill", [True]),
    ("masked_fill", (), None, "masked_fill", np.array(True), 1.0),
]
# A shape of values, and the index that they are written to.
SETS: list[tuple[Any, ...]] = [
    ((4,), 1),
    ((2,), (slice(None), slice(1, 3))),
    (V, ([2, 0],)),
    ((2,), (0, [3, 1])),
    ((0, 4), (slice(0, 0),)),
]


def placing() -> Iterator[Case]:
    for op, shape, values, name, *how in WRITES:
        label = f"{'empty ' * (0 in shape)}{'0-d ' * (not shape)}{name} {values} {how}"
        yield Case(op, label, method(name, *how), draws(shape) if values is None else draws(shape, values))
    for name in ("scatter", "scatter_add"):
        nothing = lambda t, x, name=name: getattr(x, name)(0, t.zeros(0, 3, dtype=t.int64), x)  # noqa: E731
        yield Case(name, "empty", nothing, draws((0, 3)))
    yield Case("index_add", "alpha", lambda t, x, v: x.index_add(0, t.tensor([2, 0]), v, alpha=3), draws(X, V))
    for values, index in SETS:
        write = lambda t, x, v, index=index: _set(x * 2, index, v)  # noqa: E731
        yield Case("setitem", f"{'empty ' * (0 in values)}{index}", write, draws(X, values))
    yield Case("setitem", "0-d", lambda t, x, v: _set(x * 2, (...,), v), draws((), ()))
    yield Case("setitem", "number", lambda t, x, v: _set(x * 2, (0,), 3.0) * v, draws(X, (4,)))
    yield Case("setitem", "mask", lambda t, x, v: _set(x * 2, (x > 0,), v), draws(X, ()))
    to_constant = lambda t, x, v: _set(t.zeros(3, 4, dtype=x.dtype), 1, v) * x  # noqa: E731
    yield Case("setitem", "to a constant", to_constant, draws(X, (4,)))
    yield Case("setitem", "index_put", lambda t, x, v: t.index_put(x, (t.tensor([0, 2]),), v), draws(X, V))
    for label, values, at in (
        ("put", V, lambda t, x: (t.tensor([1, 1]),)),
        ("put broadcast", (2, 1), lambda t, x: (t.tensor([[1], [1]]), t.tensor([0, 2]))),
        ("mask", (), lambda t, x: (x > 0,)),
    ):
        add = lambda t, x, v, at=at: x.index_put(at(t, x), v, accumulate=True)  # noqa: E731
        yield Case("index_add", label, add, draws(X, values))


def _set(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


CASES = list(placing())
