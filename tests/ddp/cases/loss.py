"""Losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw, spaced


def losses() -> Iterator[Case]:
    def loss(reduction: str) -> Callable[..., Any]:
        return lambda t, x, y: t.nn.functional.cross_entropy(x, y, reduction=reduction)

    for reduction in ("mean", "sum", "none"):
        yield Case("cross_entropy", reduction, loss(reduction), (draw(4, 3), np.array([0, 2, 2, 1])))
        yield Case("cross_entropy", f"{reduction} 2-d", loss(reduction), (draw(2, 3, 2, 1), np.array([[[0], [2]]] * 2)))
        yield Case("cross_entropy", f"{reduction} one", loss(reduction), (draw(3), np.array(2)))
    yield Case("cross_entropy", "empty", loss("sum"), (draw(0, 3), np.zeros(0, np.int64)))
    yield Case("cross_entropy", "non-contiguous", loss("mean"), (spaced(4, 3), np.array([0, 1, 2, 0])))
    yield Case(
        "cross_entropy",
        "large",
        lambda t, x, y: t.nn.functional.cross_entropy(x * 400, y),
        (draw(4, 3), np.array([0, 2, 2, 1])),
    )


CASES = list(losses())
