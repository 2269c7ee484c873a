"""Arithmetic and choices, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddp
from ddp._tensor.base import apply
from ddp.ops import elementwise
from tests.ddp.cases.table import Case, binary, draw, draws, unary


def _three(op: str, fn: Callable[..., Any], low: float = -2.0) -> Iterator[Case]:
    """Cases of an op of three inputs that broadcast, and have no number in common."""
    for label, shapes in [
        ("same", ((3, 4), (3, 4), (3, 4))),
        ("broadcast", ((2, 3, 4), (3, 1), (1, 4))),
        ("0-d", ((), (), ())),
        ("empty", ((0, 3), (3,), (1, 3))),
    ]:
        yield Case(op, label, fn, tuple(draw(*shape, seed=i, low=low + 0.07 * i) for i, shape in enumerate(shapes)))


def _flat(t: Any, x: Any) -> Any:
    """The slope of x.relu()."""
    if isinstance(x, ddp.Tensor):
        return apply(elementwise.flat, ((x > 0).to(x.dtype), x))
    return (x > 0).to(x.dtype) + x * 0


def _with_numbers() -> Iterator[Case]:
    for op, fns in {
        "add": [lambda t, x: 2.5 + x, lambda t, x: x.add(2, alpha=3)],
        "sub": [lambda t, x: 2 - x, lambda t, x: t.rsub(x, 2, alpha=3)],
        "mul": [lambda t, x: x * 3.0],
        "div": [lambda t, x: x / 4, lambda t, x: 4 / x],
        "remainder": [lambda t, x: x % 0.75],
        "fmod": [lambda t, x: x.fmod(-0.75)],
        "pow": [lambda t, x: 2.0**x, *(lambda t, x, p=p: x**p * x for p in (0, 0.5, 2, 3, -1.0))],
        "where": [lambda t, x: t.where(x > 1, x, 3.0), lambda t, x: x.where(x < 1, x * 2)],
        "maximum": [lambda t, x: t.maximum(x * 2, x + x)],
        "minimum": [lambda t, x: t.minimum(x * 2, x + x)],
    }.items():
        for number, fn in enumerate(fns):
            yield Case(op, f"one {number}", fn, (draw(2, 3, low=0.5),))


CASES = [
    *unary("flat", fn=_flat),
    *binary("add", lambda t, x, y: t.add(x, y, alpha=-1.5)),
    *binary("sub", lambda t, x, y: x.sub(y, alpha=2)),
    *(case for op in ("mul", "maximum", "minimum", "fmax", "fmin") for case in binary(op)),
    *binary("div", low=-1.5, high=-0.5),
    *binary("div_rounded", lambda t, x, y: t.div(x, y, rounding_mode="trunc"), low=0.3),
    *binary("div_rounded", lambda t, x, y: x.div(y, rounding_mode="floor") * 1, low=0.3),
    *(case for op in ("remainder", "fmod") for case in binary(op, low=-1.5, high=-0.5)),
    *binary("pow", low=0.3),
    *binary("where", lambda t, x, y: t.where(t.tensor(True), x, y * 1)),
    Case("where", "mask", lambda t, c, x, y: t.where(c, x, y), (draw(2, 1, 3) > 0, *draws((4, 1), (3,)))),
    *_with_numbers(),
    *(case for op in ("neg", "abs", "square", "clone", "nan_to_num") for case in unary(op)),
    *unary("reciprocal", low=0.2),
    *_three("addcmul", lambda t, x, y, z: t.addcmul(x, y, z, value=0.5)),
    *_three("addcdiv", lambda t, x, y, z: x.addcdiv(y, z, value=-2), low=0.4),
    *_three("lerp", lambda t, x, y, w: t.lerp(x, y, w)),
    *binary("lerp", lambda t, x, y: x.lerp(y, 0.3)),
    *unary("cast", fn=lambda t, x: x.float().double() if x.dtype == t.float32 else x.to(t.float64).half().double() * 0),
    *unary("clamp", fn=lambda t, x: t.clamp(x, -0.7, 1.1)),
    *unary("clamp", fn=lambda t, x: x.clamp(min=0.2)),
    *_three("clamp_between", lambda t, x, low, high: x.clamp(low, high)),
    *binary("clamp_between", lambda t, x, low: t.clamp(x, min=low)),
]
