"""Exponentials, logarithms, trigonometry, the error function, and steps."""

from __future__ import annotations

from tests.ddp.cases.table import Case, binary, draw, unary

ELSEWHERE = {"fft", "standard_gamma"}  # see test_fft.py, and the tests of distributions
CASES = [
    *unary("exp"),
    *unary("exp2"),
    *unary("expm1"),
    *unary("log", low=0.1),
    *unary("log2", low=0.1),
    *unary("log10", low=0.1),
    *unary("log1p", low=-0.8),
    *unary("sqrt", low=0.1),
    *unary("rsqrt", low=0.1),
    *unary("sin"),
    *unary("cos"),
    *unary("tan", low=-1.4, high=1.4),
    *unary("asin", low=-0.9, high=0.9),
    *unary("acos", low=-0.9, high=0.9),
    *unary("atan"),
    *unary("sinh"),
    *unary("cosh"),
    *unary("tanh"),
    *unary("asinh"),
    *unary("acosh", low=1.1, high=3.0),
    *unary("atanh", low=-0.9, high=0.9),
    *unary("sigmoid"),
    Case("sigmoid", "large", lambda t, x: t.sigmoid(x * 300), (draw(5),)),
    *unary("erf"),
    *unary("erfc"),
    *unary("erfinv", low=-0.95, high=0.95),
    *unary("lgamma", low=0.1, high=9.0),
    *unary("lgamma", low=-0.95, high=-0.05),
    *unary("digamma", low=10.0, high=30.0),  # below, PyTorch's derivative is exact to 1e-9 alone
    *unary("logit", low=0.05, high=0.95),
    *unary("logit", low=-0.2, high=1.2, fn=lambda t, x: t.logit(x, eps=0.1)),
    *binary("atan2", lambda t, y, x: t.atan2(y, x)),
    *binary("logaddexp", lambda t, x, y: t.logaddexp(x, y)),
    *binary("hypot", lambda t, x, y: t.hypot(x, y)),
    *binary("xlogy", lambda t, x, y: t.xlogy(x, y * y + 0.1)),
    Case("xlogy", "number", lambda t, x: t.xlogy(2, x), (draw(3, low=0.2),)),
    *unary("floor"),
    *unary("ceil"),
    *unary("trunc"),
    *unary("round"),
    Case("round", "decimals", lambda t, x: t.round(x, decimals=1), (draw(7),)),
    *unary("frac"),
    *unary("sign"),
]
