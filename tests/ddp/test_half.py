"""Sums of float16: 5000 ones must make 5000, as in float32, and not stand still at 2048."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.nn import functional as F

N = 5000


def ones(*shape: int, dtype: Any, grad: bool = False) -> ddp.Tensor:
    return ddp.ones(*shape, dtype=dtype, requires_grad=grad)


def sum_and_mean(dtype: Any) -> Any:
    x = ones(N, 2, dtype=dtype)
    return [x.sum(0), x.mean(0)]


def broadcast(dtype: Any) -> Any:
    x, y = ones(2, dtype=dtype, grad=True), ones(1, 2, dtype=dtype, grad=True)
    ((ones(N, 2, dtype=dtype) + x) * y).backward(ones(N, 2, dtype=dtype))
    return [x.grad, y.grad]


def matmul(dtype: Any) -> Any:
    x = ones(2, 2, dtype=dtype, grad=True)
    (ones(N, 1, 2, dtype=dtype) @ x).backward(ones(N, 1, 2, dtype=dtype))
    return [x.grad]


def linear(dtype: Any) -> Any:
    w, b = ones(3, 2, dtype=dtype, grad=True), ones(3, dtype=dtype, grad=True)
    F.linear(ones(N, 2, dtype=dtype), w, b).backward(ones(N, 3, dtype=dtype))
    return [w.grad, b.grad]


def conv2d(dtype: Any) -> Any:
    w, b = ones(2, 1, 1, 1, dtype=dtype, grad=True), ones(2, dtype=dtype, grad=True)
    F.conv2d(ones(N, 1, 2, 1, dtype=dtype), w, b).backward(ones(N, 2, 2, 1, dtype=dtype))
    return [w.grad, b.grad]


def log_softmax(dtype: Any) -> Any:
    x = ones(N, 2, dtype=dtype, grad=True)
    y = x.log_softmax(0)
    y.backward(ones(N, 2, dtype=dtype))
    return [y, x.grad + 1]  # beside 1: g and its sum cancel, up to the rounding of y


def cross_entropy_of_many_samples(dtype: Any) -> Any:
    x, target = ones(N, 2, dtype=dtype), ddp.zeros(N, dtype=ddp.int64)
    return [F.cross_entropy(x, target, reduction="sum"), F.cross_entropy(x, target)]


@pytest.mark.parametrize(
    "sums", [sum_and_mean, broadcast, matmul, linear, conv2d, log_softmax, cross_entropy_of_many_samples]
)
def test_as_in_float32(sums: Callable[[Any], Any]) -> None:
    for half, single in zip(sums(ddp.float16), sums(ddp.float32), strict=True):
        assert half is not None
        assert single is not None
        assert half.dtype == ddp.float16
        # Four units in the last place of float16, its smallest number beside zero.
        np.testing.assert_allclose(half.detach().numpy(), single.detach().numpy(), 4e-3, 1e-6)


def test_a_number_beside_float16_counts_in_float32() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    results = []
    for t in (ddp, torch):
        x = t.tensor([0.5, 3.0, 1000.0], dtype=t.float16, requires_grad=True)
        y = [x * 65536, 65536.0 * x, x * 1e-8, x / 65536, x / 1e-5, 70000 / x]
        (x * 100000.0 / 100000.0).sum().backward()
        results.append(([each.tolist() for each in y], x.grad.tolist()))
    assert results[0][0] == results[1][0]
