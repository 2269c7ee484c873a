"""Exponentials, logarithms, trigonometry, the error function, and steps."""

from __future__ import annotations

from tests.ddp.cases.table import Case, binary, draw, unary

ELSEWHERE = {"fft", "standard_gamma"}  # see test_fft.py, and the tests of distributions
ANYWHERE = "exp exp2 expm1 sin cos atan sinh cosh tanh asinh sigmoid erf erfc floor ceil trunc round frac sign"
# Where the others are defined.
BETWEEN = {
    "log": (0.1, 2.0),
    "log2": (0.1, 2.0),
    "log10": (0.1, 2.0),
    "log1p": (-0.8, 2.0),
    "sqrt": (0.1, 2.0),
    "rsqrt": (0.1, 2.0),
    "tan": (-1.4, 1.4),
    "asin": (-0.9, 0.9),
    "acos": (-0.9, 0.9),
    "acosh": (1.1, 3.0),
    "atanh": (-0.9, 0.9),
    "erfinv": (-0.95, 0.95),
    "lgamma": (0.1, 9.0),
    "digamma": (10.0, 30.0),  # below, PyTorch's derivative is exact to 1e-9 alone
    "logit": (0.05, 0.95),
}
CASES = [
    *(case for op in ANYWHERE.split() for case in unary(op)),
    *(case for op, bounds in BETWEEN.items() for case in unary(op, *bounds)),
    *unary("lgamma", -0.95, -0.05),
    *unary("logit", -0.2, 1.2, lambda t, x: t.logit(x, eps=0.1)),
    *(case for op in ("atan2", "logaddexp", "hypot") for case in binary(op)),
    *binary("xlogy", lambda t, x, y: t.xlogy(x, y * y + 0.1)),
    Case("sigmoid", "large", lambda t, x: t.sigmoid(x * 300), (draw(5),)),
    Case("xlogy", "number", lambda t, x: t.xlogy(2, x), (draw(3, low=0.2),)),
    Case("round", "decimals", lambda t, x: t.round(x, decimals=1), (draw(7),)),
]
