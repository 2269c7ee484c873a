"""Elementwise functions against PyTorch: dtypes of results, integers, special values, aliases, numbers as operands."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from tests.ddp._tensor.oracle import agree, both, numbers

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

inf = math.inf
nan = math.nan
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
VALUES = [3, 1, 0, 2, 5]


UNARY = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan atan sinh cosh tanh asinh erf erfc sigmoid lgamma digamma
    reciprocal square floor ceil trunc fix round sign isnan isinf isfinite logical_not arctan arcsinh
    nan_to_num
"""


@pytest.mark.parametrize("name", UNARY.split())
def test_functions_of_every_dtype(name: str) -> None:
    compared = 0
    for dtype in DTYPES:
        x, t = both(VALUES, dtype)
        try:
            expected = getattr(torch, name)(t)
        except RuntimeError:  # bool, for some
            continue
        agree(getattr(ddp, name)(x), expected)
        agree(getattr(x, name)(), expected)
        compared += 1
    assert compared > 0


BINARY = """
    add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 xlogy eq ne lt
    le gt ge greater less_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift
"""


@pytest.mark.parametrize("name", BINARY.split())
def test_pairs_of_dtypes(name: str) -> None:
    for a, b in itertools.product(DTYPES, DTYPES):
        (x, t), (y, u) = both([3, 1, 0, 2], a), both([1, 2, 1, 3], b)
        try:
            expected = getattr(torch, name)(t, u)
        except RuntimeError:
            continue
        result = getattr(ddp, name)(x, y)
        assert f"torch.{result.dtype.name}" == str(expected.dtype), (a, b)
        assert_allclose(numbers(result), numbers(expected), rtol=1e-2, err_msg=f"{a} {b}")


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "lt", "ne"])
def test_numbers(name: str) -> None:
    for dtype, number in itertools.product(DTYPES, (2, 2.5, True)):
        x, t = both(VALUES, dtype)
        try:
            expected = getattr(torch, name)(t, number)
        except RuntimeError:
            continue
        y = getattr(ddp, name)(x, number)
        assert f"torch.{y.dtype.name}" == str(expected.dtype), dtype
        assert_allclose(numbers(y), numbers(expected), rtol=1e-2, err_msg=dtype)


REFLECTED: list[Any] = [
    lambda x: 7 // x,
    lambda x: 7 % x,
    lambda x: 2**x,
]


@pytest.mark.parametrize("fn", REFLECTED)
def test_reflected(fn: Any) -> None:
    for dtype in ("int32", "float32", "float64"):
        x, t = both([1, 2, 3], dtype)
        agree(fn(x), fn(t))


SIGNED = [7.0, -7.0, 7.0, -7.0, 0.0, -0.0, inf, -inf, nan, 1.0, 1.0, -1.0, 0.0]
DIVISORS = [2.0, 2.0, -2.0, -2.0, 2.0, 2.0, 2.0, 2.0, 2.0, inf, 0.0, inf, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name",
    [
        "floor_divide",
        "remainder",
        "fmod",
        "true_divide",
        "pow",
        "atan2",
        "xlogy",
        "fmax",
        "maximum",
        "trunc",
        "numbers",
    ],
)
def test_signs_and_special_values(name: str, dtype: str) -> None:
    def fn(t: Any, x: Any, y: Any) -> Any:
        if name == "trunc":
            return t.div(x, y, rounding_mode="trunc")
        if name == "numbers":
            return t.nan_to_num(x * y, nan=3.0, neginf=-9.0)
        return getattr(t, name)(x, y)

    (x, t), (y, u) = both(SIGNED, dtype), both(DIVISORS, dtype)
    result, expected = fn(ddp, x, y), fn(torch, t, u)
    assert_allclose(result.numpy(), expected.numpy(), rtol=1e-6)
    zero = (result.numpy() == 0) & (x.numpy() != 0)  # of -0.0 PyTorch's remainder is -0.0, Python's 0.0
    assert_array_equal(np.signbit(result.numpy()[zero]), np.signbit(expected.numpy()[zero]))


POINTS = [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 2.5, -0.5, 0.5, 1.5, 1e-30, 80.0]


@pytest.mark.parametrize("name", [*UNARY.split(), "asin", "acos", "acosh", "atanh", "erfinv", "logit", "abs", "frac"])
def test_functions_at_special_values(name: str) -> None:
    x, t = both(POINTS, "float32")
    x.requires_grad_()
    t.requires_grad_()
    y = getattr(ddp, name)(x)
    expected = getattr(torch, name)(t)
    assert_allclose(numbers(y), numbers(expected), rtol=2e-6, atol=1e-30 if name == "erfc" else 1e-7)
    if y.requires_grad and name not in ("erf", "erfc", "round", "logit", "digamma"):
        y.backward(ddp.ones(len(POINTS)))
        expected.backward(torch.ones(len(POINTS)))
        assert_allclose(numbers(x.grad), numbers(t.grad), rtol=3e-6, atol=1e-7)


def test_error_functions_are_accurate() -> None:
    x = np.linspace(-6, 6, 4001)
    for name, exact, wide, narrow in (("erf", math.erf, 2e-15, 4e-7), ("erfc", math.erfc, 4e-15, 2e-7)):
        for given, rtol in ((x, wide), (x.astype(np.float32), narrow)):
            actual = getattr(ddp, name)(ddp.tensor(given)).numpy()
            assert_allclose(actual, [exact(each) for each in given], rtol=rtol, atol=0)
    inside = x[np.abs(x) < 3]
    assert_allclose(ddp.erfinv(ddp.erf(ddp.tensor(inside))).numpy(), inside, rtol=1e-11)
    far = ddp.tensor([0.0, 5.0, 10.0, 26.0, 28.0, inf, -inf, nan], dtype=ddp.float64)
    assert ddp.erfc(far).tolist()[1:5] == pytest.approx([math.erfc(v) for v in (5, 10, 26, 28)], rel=1e-13)
    edges = ddp.erfinv(ddp.tensor([1.0, -1.0, 1.5, 0.0, 1 - 1e-15], dtype=ddp.float64)).tolist()
    assert edges[:2] == [inf, -inf]
    assert math.isnan(edges[2])
    assert edges[3] == 0
    assert math.erfc(edges[4]) == pytest.approx(1 - (1 - 1e-15), rel=1e-12)


def test_the_gamma_function_is_accurate() -> None:
    mpmath = pytest.importorskip("mpmath", reason="PyTorch brings mpmath")
    near = np.concatenate([1 + np.array([-1e-9, 1e-7, 0.0]), 2 + np.array([1e-9, -1e-7, 0.0])])
    x = np.concatenate([np.geomspace(1e-300, 1e300, 200), np.linspace(0.02, 40, 999), near])
    with mpmath.workdps(30):
        log, first, second = [
            np.array([float(f(float(v))) for v in x])
            for f in (mpmath.loggamma, mpmath.digamma, lambda v: mpmath.psi(1, v))
        ]
    assert_allclose(ddp.lgamma(ddp.tensor(x)).numpy(), log, rtol=1e-14, atol=0)
    assert_allclose(ddp.digamma(ddp.tensor(x)).numpy(), first, rtol=2e-15, atol=2e-15)
    y = ddp.tensor(x, requires_grad=True)
    y.digamma().sum().backward()
    assert_allclose(y.grad.numpy(), second, rtol=2e-15)
    below = torch.tensor(-x[200:-6] - 0.003)
    assert_allclose(ddp.lgamma(ddp.tensor(below.numpy())).numpy(), below.lgamma().numpy(), 4e-14, 4e-14)


def test_clamp_with_tensors() -> None:
    (x, t), (low, u) = both([1.0, 5.0, -3.0], "float32"), both([2.0, 6.0, -5.0], "float32")
    agree(ddp.clamp(x, low), torch.clamp(t, u))
    agree(ddp.clamp(x, max=low), torch.clamp(t, max=u))
    agree(x.clamp(low, low - 1), t.clamp(u, u - 1))
    agree(x.clip(max=low), t.clip(max=u))
    assert ddp.clamp(x, 0.5, low).tolist() == [1.0, 5.0, -5.0]
    (i, j) = both([1, 5, -3], "int64")
    agree(i.clamp(0, 2), j.clamp(0, 2))
    agree(i.clamp(0.5), j.clamp(0.5))
    agree(i.clamp(min=low), j.clamp(min=u))


def test_where() -> None:
    for a, b in itertools.product([1, 1.5, True], [2, 2.5, False]):
        agree(ddp.where(ddp.tensor([True, False]), a, b), torch.where(torch.tensor([True, False]), a, b))
    for dtype in DTYPES:
        x, t = both(VALUES, dtype)
        for number in (2, 1.5):
            agree(ddp.where(x > 1, x, number), torch.where(t > 1, t, number))
            agree(ddp.where(x > 1, number, x), torch.where(t > 1, number, t))
    half = ddp.tensor(1.0, dtype=ddp.float16)
    assert ddp.where(ddp.tensor(True), 1.0, half).dtype == ddp.float16
    result = ddp.where(ddp.tensor([[0, 3], [4, 0]]))
    assert [each.tolist() for each in result] == [[0, 1], [1, 0]]


def test_equality_and_closeness() -> None:
    x = ddp.tensor([1.0, nan, inf, 1e-9])
    assert ddp.equal(x[:1], ddp.ones(1))
    assert not ddp.equal(x, x)  # nan
    assert not ddp.equal(ddp.ones(2), ddp.ones(2, 1))
    y = ddp.tensor([1.000001, nan, inf, 0.0])
    t, u = torch.tensor([1.0, nan, inf, 1e-9]), torch.tensor([1.000001, nan, inf, 0.0])
    for options in ({}, {"equal_nan": True}, {"rtol": 0.0, "atol": 1e-8}):
        assert ddp.isclose(x, y, **options).tolist() == torch.isclose(t, u, **options).tolist()
        assert ddp.allclose(x, y, **options) == torch.allclose(t, u, **options)
    small = ddp.tensor([250, 3], dtype=ddp.uint8)
    assert small.isclose(ddp.tensor([3, 3], dtype=ddp.uint8)).tolist() == [False, True]
    assert ddp.tensor([1.0], dtype=ddp.bfloat16).isclose(1.0).item()


def test_results_are_not_shared_with_integers() -> None:
    x = ddp.tensor([1, 2])
    for y in (x.floor(), x.round(), x.nan_to_num()):
        y[0] = 9
        assert x.tolist() == [1, 2]
