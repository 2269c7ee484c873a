"""Reductions, and what runs along one dimension."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, along, draw, over, reduction

INF = float("inf")


def values(op: str, **options: Any) -> Callable[..., Any]:
    return lambda t, x: getattr(t, op)(x, **options)[0]


def quietly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch warns of variances of nothing."""

    def run(t: Any, x: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(t, x)

    return run


def moments() -> Iterator[Case]:
    for name, op in (("var", "var"), ("std", "var")):
        for dim in (None, 0, (0, 2), -1):
            for correction in (0, 1, 1.5):
                options = {"dim": dim, "correction": correction, "keepdim": dim == 0}
                yield Case(op, f"{dim} {correction}", over(name, **options), (draw(2, 3, 4),))
        yield Case(op, "empty", quietly(over(name, dim=0)), (draw(3, 0),))
    for p in (0.5, 1, 1.5, 2, 3, -1, INF, -INF):
        for dim in (None, 1, (0, 1)):
            options = {"p": p, "dim": dim, "keepdim": dim == 1}
            yield Case("vector_norm", f"{p} {dim}", over("norm", **options), (draw(2, 3),))
    yield Case("vector_norm", "0-d", over("norm"), (draw(),))
    yield Case("vector_norm", "empty", over("norm"), (draw(0, 3),))


def products() -> Iterator[Case]:
    for dim in (0, 1, -1):
        yield Case("prod", f"{dim}", over("prod", dim=dim, keepdim=dim == 1), (draw(2, 3, 4),))
    yield Case("prod", "all", over("prod"), (draw(2, 3),))
    yield Case("prod", "0-d", over("prod"), (draw(),))
    yield Case("prod", "empty", over("prod", dim=1), (draw(0, 3),))
    yield Case("prod", "empty along", over("prod", dim=1), (draw(3, 0),))
    for zeros in (1, 2):
        x = draw(3, 4)
        x[0, :zeros] = x[1:, 3] = 0
        yield Case("prod", f"{zeros} zeros", over("prod", dim=1), (x,))
        yield Case("prod", f"{zeros} zeros of all", over("prod"), (x,))
        yield Case("cumprod", f"{zeros} zeros", over("cumprod", dim=1), (x,))


def running() -> Iterator[Case]:
    for op in ("cumsum", "cumprod"):
        for dim in (0, -1):
            yield Case(op, f"{dim}", over(op, dim=dim), (draw(3, 4),))
        yield Case(op, "0-d", over(op, dim=0), (draw(),))
        yield Case(op, "empty", over(op, dim=1), (draw(0, 3),))
    for name in ("cummax", "cummin"):
        for dim in (0, -1):
            yield Case("running_extreme", f"{name} {dim}", values(name, dim=dim), (draw(3, 4),))
        yield Case("running_extreme", f"{name} empty", values(name, dim=1), (draw(0, 3),))


def picked() -> Iterator[Case]:
    for name in ("max", "min", "median"):
        for dim in (0, -1):
            yield Case("select", f"{name} {dim}", values(name, dim=dim, keepdim=dim == 0), (draw(4, 5),))
        yield Case("select", f"{name} empty", values(name, dim=1), (draw(0, 3),))
    for shape in ((5,), (2, 3), ()):
        yield Case("median", str(shape), lambda t, x: t.median(x), (draw(*shape),))
    yield Case("median", "ties, and a slice which is empty", lambda t, x: t.median(x.round()[:3]), (draw(5) * 2,))


def missing(*shape: int) -> np.ndarray[Any, Any]:
    x = draw(*shape)
    x[0] = np.nan
    return x


CASES = [
    *reduction("sum"),
    *reduction("nansum"),
    *reduction("mean"),
    *reduction("amax", empty=False),
    *reduction("amin", empty=False),
    *(case for case in reduction("logsumexp", always_dim=True) if case.label[:8] != "dim=None"),
    Case("amax", "empty", over("amax", dim=1), (draw(0, 3),)),
    Case("amin", "empty", over("amin", dim=1), (draw(0, 3),)),
    Case("amax", "ties", lambda t, x: t.amax(t.stack([x, x, x - 1]), dim=0), (draw(3),)),
    Case("sum", "all at once", lambda t, x: x.sum(), (draw(2, 3),)),
    Case("logsumexp", "large", lambda t, x: t.logsumexp(x * 400, dim=1), (draw(2, 3),)),
    *along("softmax"),
    *along("log_softmax"),
    Case("softmax", "middle", over("softmax", dim=1), (draw(2, 3, 4),)),
    Case("log_softmax", "middle", over("log_softmax", dim=1), (draw(2, 3, 4),)),
    *moments(),
    *products(),
    *running(),
    *picked(),
]
