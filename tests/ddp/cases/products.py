"""Matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, spaced


def products() -> Iterator[Case]:
    for a, b in [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((3,), (5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((0, 3), (3, 4)),
        ((2, 0), (0, 4)),
        ((0, 2, 3), (3, 4)),
    ]:
        label = f"{'empty ' * (0 in a)}{a} @ {b}"
        yield Case("matmul", label, lambda t, x, y: x @ y, (draw(*a), draw(*b, seed=1)))
    yield Case("matmul", "non-contiguous", lambda t, x, y: t.matmul(x, y), (spaced(2, 3), spaced(3, 4)))

    def linear(t: Any, *inputs: Any) -> Any:
        return t.nn.functional.linear(*inputs)

    yield Case("linear", "bias", linear, (draw(5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no bias", linear, (draw(5, 3), draw(4, 3, seed=1)))
    yield Case("linear", "vector", linear, (draw(3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "batches", linear, (draw(2, 5, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "empty", linear, (draw(0, 3), draw(4, 3, seed=1), draw(4, seed=2)))
    yield Case("linear", "no features", linear, (draw(2, 0), draw(4, 0), draw(4, seed=2)))
    yield Case("linear", "non-contiguous", linear, (spaced(5, 3), spaced(4, 3, seed=1), draw(4, seed=2)))


CASES = list(products())
