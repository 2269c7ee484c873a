"""Elementwise arithmetic and mathematics."""

from __future__ import annotations

from tests.ddp.cases.table import Case, binary, draw, unary

CASES = [
    *binary("add", lambda t, x, y: x + y),
    *binary("sub", lambda t, x, y: x - y),
    *binary("mul", lambda t, x, y: x * y),
    *binary("div", lambda t, x, y: x / y, low=-1.5, high=-0.5),
    *binary("pow", lambda t, x, y: x**y, low=0.3),
    *binary("maximum", lambda t, x, y: t.maximum(x, y)),
    *binary("minimum", lambda t, x, y: t.minimum(x, y)),
    *(case for case in binary("where", lambda t, x, y: t.where(t.tensor(True), x, y * 1))),
    Case("where", "mask", lambda t, c, x, y: t.where(c, x, y), (draw(2, 1, 3) > 0, draw(4, 1), draw(3, seed=1))),
    Case("where", "number", lambda t, x: t.where(x > 0, x, 3.0), (draw(2, 3),)),
    Case("maximum", "equal", lambda t, x: t.maximum(x * 2, x + x), (draw(3),)),
    Case("minimum", "equal", lambda t, x: t.minimum(x * 2, x + x), (draw(3),)),
    *(
        Case(op, f"number {label}", fn, (draw(2, 3, low=0.5),))
        for op, label, fn in [
            ("add", "right", lambda t, x: x + 2),
            ("add", "left", lambda t, x: 2.5 + x),
            ("sub", "right", lambda t, x: x - 2),
            ("sub", "left", lambda t, x: 2 - x),
            ("mul", "right", lambda t, x: x * 3.0),
            ("mul", "left", lambda t, x: 3 * x),
            ("div", "right", lambda t, x: x / 4),
            ("div", "left", lambda t, x: 4 / x),
            ("pow", "square", lambda t, x: x**2),
            ("pow", "root", lambda t, x: x**0.5),
            ("pow", "inverse", lambda t, x: x**-1.0),
            ("pow", "zero", lambda t, x: x**0 * x),
            ("pow", "base", lambda t, x: 2.0**x),
        ]
    ),
    *unary("neg", fn=lambda t, x: -x),
    *unary("exp"),
    *unary("log", low=0.1),
    *unary("sqrt", low=0.1),
    *unary("abs"),
    *unary("relu"),
    *unary("tanh"),
    *unary("sigmoid"),
    *unary("clone", fn=lambda t, x: x.clone()),
    *unary("cast", fn=lambda t, x: x.float().double() if x.dtype == t.float32 else x.to(t.float64).half().double() * 0),
    *unary("clamp", fn=lambda t, x: t.clamp(x, -0.7, 1.1)),
    *unary("clamp", fn=lambda t, x: x.clamp(min=0.2)),
    Case("sigmoid", "large", lambda t, x: t.sigmoid(x * 300), (draw(5),)),
]
