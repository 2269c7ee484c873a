"""Arithmetic and choices, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddp
from ddp._tensor.base import apply
from ddp.ops import elementwise
from tests.ddp.cases.table import Case, binary, draw, unary


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


CASES = [
    *unary("flat", fn=_flat),
    *binary("add", lambda t, x, y: t.add(x, y, alpha=-1.5)),
    *binary("sub", lambda t, x, y: x.sub(y, alpha=2)),
    *binary("mul", lambda t, x, y: x * y),
    *binary("div", lambda t, x, y: x / y, low=-1.5, high=-0.5),
    *binary("div_rounded", lambda t, x, y: t.div(x, y, rounding_mode="trunc"), low=0.3),
    *binary("div_rounded", lambda t, x, y: x.div(y, rounding_mode="floor") * 1, low=0.3),
    *binary("remainder", lambda t, x, y: x % y, low=-1.5, high=-0.5),
    *binary("fmod", lambda t, x, y: t.fmod(x, y), low=-1.5, high=-0.5),
    *binary("pow", lambda t, x, y: x**y, low=0.3),
    *binary("maximum", lambda t, x, y: t.maximum(x, y)),
    *binary("minimum", lambda t, x, y: t.minimum(x, y)),
    *binary("fmax", lambda t, x, y: t.fmax(x, y)),
    *binary("fmin", lambda t, x, y: x.fmin(y)),
    *(case for case in binary("where", lambda t, x, y: t.where(t.tensor(True), x, y * 1))),
    Case("where", "mask", lambda t, c, x, y: t.where(c, x, y), (draw(2, 1, 3) > 0, draw(4, 1), draw(3, seed=1))),
    Case("where", "number", lambda t, x: t.where(x > 0, x, 3.0), (draw(2, 3),)),
    Case("where", "method", lambda t, x: x.where(x < 0, x * 2), (draw(2, 3),)),
    Case("maximum", "equal", lambda t, x: t.maximum(x * 2, x + x), (draw(3),)),
    Case("minimum", "equal", lambda t, x: t.minimum(x * 2, x + x), (draw(3),)),
    *(
        Case(op, f"number {label}", fn, (draw(2, 3, low=0.5),))
        for op, label, fn in [
            ("add", "right", lambda t, x: x + 2),
            ("add", "left", lambda t, x: 2.5 + x),
            ("add", "alpha", lambda t, x: x.add(2, alpha=3)),
            ("sub", "left", lambda t, x: 2 - x),
            ("sub", "rsub", lambda t, x: t.rsub(x, 2, alpha=3)),
            ("mul", "right", lambda t, x: x * 3.0),
            ("div", "right", lambda t, x: x / 4),
            ("div", "left", lambda t, x: 4 / x),
            ("remainder", "right", lambda t, x: x % 0.75),
            ("fmod", "right", lambda t, x: x.fmod(-0.75)),
            ("pow", "square", lambda t, x: x**2),
            ("pow", "cube", lambda t, x: x**3),
            ("pow", "root", lambda t, x: x**0.5),
            ("pow", "inverse", lambda t, x: x**-1.0),
            ("pow", "zero", lambda t, x: x**0 * x),
            ("pow", "base", lambda t, x: 2.0**x),
        ]
    ),
    *unary("neg", fn=lambda t, x: -x),
    *unary("abs"),
    *unary("reciprocal", low=0.2),
    *unary("square"),
    *_three("addcmul", lambda t, x, y, z: t.addcmul(x, y, z, value=0.5)),
    *_three("addcdiv", lambda t, x, y, z: x.addcdiv(y, z, value=-2), low=0.4),
    *_three("lerp", lambda t, x, y, w: t.lerp(x, y, w)),
    *binary("lerp", lambda t, x, y: x.lerp(y, 0.3)),
    *unary("clone", fn=lambda t, x: x.clone()),
    *unary("cast", fn=lambda t, x: x.float().double() if x.dtype == t.float32 else x.to(t.float64).half().double() * 0),
    *unary("clamp", fn=lambda t, x: t.clamp(x, -0.7, 1.1)),
    *unary("clamp", fn=lambda t, x: x.clamp(min=0.2)),
    *_three("clamp_between", lambda t, x, low, high: x.clamp(low, high)),
    *binary("clamp_between", lambda t, x, low: t.clamp(x, min=low)),
    *unary("nan_to_num"),
]
