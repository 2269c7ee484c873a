"""assert_close beside PyTorch's: the same pairs are close, and the same are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

INF = math.inf
NAN = math.nan
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], dict[str, Any]]] = {
    **{
        f"{dtype} {error:+.0e}": (
            lambda t, dtype=dtype: t.ones(3).to(getattr(t, dtype)),
            lambda t, dtype=dtype, error=error: (t.ones(3).double() + error).to(getattr(t, dtype)),
            {},
        )
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for error in (1e-8, 1e-6, -1e-5, 5e-5, 1e-3, -1.2e-2, 2e-2)
    },
    "shapes": (lambda t: t.ones(2, 3), lambda t: t.ones(3), {}),
    "dtypes": (lambda t: t.ones(2), lambda t: t.ones(2).double(), {}),
    "dtypes unchecked": (lambda t: t.ones(2), lambda t: t.ones(2).double() + 1e-6, {"check_dtype": False}),
    "integers unchecked": (lambda t: t.ones(2), lambda t: t.ones(2).int(), {"check_dtype": False}),
    "tolerances": (lambda t: t.ones(2), lambda t: t.ones(2) * 1.5, {"rtol": 0, "atol": 0.5}),
    "too small tolerances": (lambda t: t.ones(2), lambda t: t.ones(2) * 1.5, {"rtol": 0, "atol": 0.49}),
    "relative to the second": (lambda t: t.ones(2), lambda t: t.ones(2) * 2, {"rtol": 0.5, "atol": 0}),
    "relative to the first": (lambda t: t.ones(2) * 2, lambda t: t.ones(2), {"rtol": 0.5, "atol": 0}),
    "nan": (lambda t: t.tensor([NAN, 1]), lambda t: t.tensor([NAN, 1]), {}),
    "equal nan": (lambda t: t.tensor([NAN, 1]), lambda t: t.tensor([NAN, 1]), {"equal_nan": True}),
    "infinity": (lambda t: t.tensor([INF, 1]), lambda t: t.tensor([INF, 1]), {}),
    "below infinity": (lambda t: t.tensor([1.0, 1]), lambda t: t.tensor([INF, 1]), {}),
    "signs of infinity": (lambda t: t.tensor([INF, 1]), lambda t: t.tensor([-INF, 1]), {}),
    "large integers": (lambda t: t.tensor([2**60]), lambda t: t.tensor([2**60 + 1]), {}),
    "uint8": (lambda t: t.tensor([1], dtype=t.uint8), lambda t: t.tensor([2], dtype=t.uint8), {"rtol": 0, "atol": 1}),
    "bools": (lambda t: t.tensor([True, False]), lambda t: t.tensor([True, True]), {}),
    "nothing": (lambda t: t.ones(0, 2), lambda t: t.ones(0, 2), {}),
    "a parameter": (lambda t: t.nn.Parameter(t.ones(2)), lambda t: t.ones(2), {}),
    "numbers": (lambda t: 1.0, lambda t: 1.0 + 1e-8, {}),
    "other numbers": (lambda t: 1.0, lambda t: 1.0 + 1e-5, {}),
    "an integer": (lambda t: 1, lambda t: 1.0, {}),
    "arrays": (lambda t: np.ones(2, np.float32), lambda t: np.ones(2, np.float32) * 1.1, {}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_as_pytorch_decides(name: str) -> None:
    actual, expected, options = PAIRS[name]
    results = []
    for t in (ddp, torch):
        try:
            results.append(t.testing.assert_close(actual(t), expected(t), **options))
        except AssertionError:
            results.append("not close")
    assert results[0] == results[1]


def test_what_it_says() -> None:
    x = ddp.arange(6.0).reshape(2, 3)
    y = x.clone()
    y[1, 2], y[0, 1] = 5.5, 1.125
    close = ddp.testing.assert_close
    text = r"2 of 6 elements \(33\.3%\) are not close .* is 0\.5 at \(1, 2\): got 5\.0, expected 5\.5"
    with pytest.raises(AssertionError, match=text):
        close(x, y)
    with pytest.raises(AssertionError, match=r"^step 3: 2 of 6"):
        close(x, y, msg=lambda text: f"step 3: {text}")
    with pytest.raises(AssertionError, match=r"^mine$"):
        close(x, y, msg="mine")
    with pytest.raises(AssertionError, match=r"shape is \(2, 3\), expected \(3,\)"):
        close(x, x[0])
    with pytest.raises(ArgumentError, match="rtol=1, atol=None"):
        close(x, y, rtol=1)
    with pytest.raises(DtypeError, match="got list"):
        close([1], [1])
