"""Reductions, and what runs along one dimension."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, along, draw, draws, over, reduction

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
    for name in ("var", "std"):
        for dim, correction in itertools.product((None, 0, (0, 2), -1), (0, 1, 1.5)):
            run = over(name, dim=dim, correction=correction, keepdim=dim == 0)
            yield Case("var", f"{name} {dim} {correction}", run, draws((2, 3, 4)))
        yield Case("var", f"{name} empty", quietly(over(name, dim=0)), draws((3, 0)))
    for p, dim in itertools.product((0.5, 1, 1.5, 2, 3, -1, INF, -INF), (None, 1, (0, 1))):
        yield Case("vector_norm", f"{p} {dim}", over("norm", p=p, dim=dim, keepdim=dim == 1), draws((2, 3)))
    for label, shape in {"0-d": (), "empty": (0, 3)}.items():
        yield Case("vector_norm", label, over("norm"), draws(shape))


def products() -> Iterator[Case]:
    for shape, how in [
        ((2, 3, 4), {"dim": 0}),
        ((2, 3, 4), {"dim": 1, "keepdim": True}),
        ((2, 3), {}),
        ((), {}),
        ((0, 3), {"dim": 1}),
        ((3, 0), {"dim": 1}),
    ]:
        yield Case("prod", f"{'empty ' * (0 in shape)}{shape} {how}", over("prod", **how), draws(shape))
    for zeros in (1, 2):
        x = draw(3, 4)
        x[0, :zeros] = x[1:, 3] = 0
        for op, how in (("prod", {"dim": 1}), ("prod", {}), ("cumprod", {"dim": 1})):
            yield Case(op, f"{zeros} zeros {how}", over(op, **how), (x,))


ROWS = (("0", 0, (3, 4)), ("-1", -1, (3, 4)), ("empty", 1, (0, 3)))


def running() -> Iterator[Case]:
    for label, dim, shape in (*ROWS, ("0-d", 0, ())):
        for op in ("cumsum", "cumprod"):
            yield Case(op, label, over(op, dim=dim), draws(shape))
    for label, dim, shape in ROWS:
        for name in ("cummax", "cummin"):
            yield Case("running_extreme", f"{name} {label}", values(name, dim=dim), draws(shape))
        for name in ("max", "min", "median"):
            yield Case("select", f"{name} {label}", values(name, dim=dim, keepdim=dim == 0), draws(shape))
    for shape in ((5,), (2, 3), ()):
        yield Case("median", str(shape), over("median"), draws(shape))
    yield Case("median", "ties, and a slice which is empty", lambda t, x: t.median(x.round()[:3]), (draw(5) * 2,))


CASES = [
    *(case for op in ("sum", "nansum", "mean") for case in reduction(op)),
    *(case for op in ("amax", "amin") for case in reduction(op, empty=False)),
    *(case for case in reduction("logsumexp", always_dim=True) if case.label[:8] != "dim=None"),
    *(Case(op, "empty", over(op, dim=1), draws((0, 3))) for op in ("amax", "amin")),
    Case("amax", "ties", lambda t, x: t.amax(t.stack([x, x, x - 1]), dim=0), (draw(3),)),
    Case("logsumexp", "large", lambda t, x: t.logsumexp(x * 400, dim=1), (draw(2, 3),)),
    *(case for op in ("softmax", "log_softmax") for case in along(op)),
    *moments(),
    *products(),
    *running(),
]
