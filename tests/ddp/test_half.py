"""Sums of float16: 5000 ones must make 5000, as in float32, and not stand still at 2048."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.nn import functional as F

N = 5000


def of_classes(reduction: str) -> Callable[..., Any]:
    return lambda x: F.cross_entropy(x, ddp.zeros(N, dtype=ddp.int64), reduction=reduction)


# Functions of ones, and the shapes of these.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "sum": (lambda x: x.sum(0), [(N, 2)]),
    "mean": (lambda x: x.mean(0), [(N, 2)]),
    "broadcast": (lambda x, y, z: (x + y) * z, [(N, 2), (2,), (1, 2)]),
    "matmul": (lambda x, y: x @ y, [(N, 1, 2), (2, 2)]),
    "linear": (F.linear, [(N, 2), (3, 2), (3,)]),
    "conv2d": (F.conv2d, [(N, 1, 2, 1), (2, 1, 1, 1), (2,)]),
    "log_softmax": (lambda x: x.log_softmax(0), [(N, 2)]),
    "sum of cross entropies": (of_classes("sum"), [(N, 2)]),
    "mean of cross entropies": (of_classes("mean"), [(N, 2)]),
}


@pytest.mark.parametrize(("fn", "shapes"), CASES.values(), ids=CASES)
def test_as_in_float32(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    results = []
    for dtype in (ddp.float16, ddp.float32):
        xs = [ddp.ones(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
        y = fn(*xs)
        y.backward(ddp.ones_like(y))
        results.append([y.detach(), *[x.grad for x in xs]])
    for half, single in zip(*results, strict=True):
        assert half.dtype == ddp.float16
        # Four units in the last place of float16: of 1 where g and its sum cancel, else beside its smallest number.
        cancels = fn is CASES["log_softmax"][0]
        assert_allclose(half.numpy(), single.numpy(), 4e-3, 4e-3 if cancels else 1e-6)


def test_a_number_beside_float16_counts_in_float32(torch: Any) -> None:
    results = []
    for t in (ddp, torch):
        x = t.tensor([0.5, 3.0, 1000.0], dtype=t.float16, requires_grad=True)
        y = [x * 65536, 65536.0 * x, x * 1e-8, x / 65536, x / 1e-5, 70000 / x]
        (x * 100000.0 / 100000.0).sum().backward()
        results.append(([each.tolist() for each in y], x.grad.tolist()))
    assert results[0][0] == results[1][0]
