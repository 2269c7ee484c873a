"""Backward over streams through what is no plain op: functions of one's own, several results, recomputation, casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp.autograd import Function, checkpoint
from tests.gpu import simulated

in_any_order = pytest.mark.parametrize("gpu", simulated(8), indirect=True)


class Scaled(Function):
    """x * w, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


def by_function(x: Any, w: Any) -> Any:
    return Scaled.apply(x, w).exp()


def by_parts(x: Any, w: Any) -> Any:
    a, b = (x * w).split(2, 1)
    values, _ = ddp.stack([a, b]).max(0)
    return values * a


def recomputed(x: Any, w: Any) -> Any:
    return checkpoint(lambda x: (x * w).exp() * w, x)


def cast(x: Any, w: Any) -> Any:
    return (x.to(ddp.float64) * w.to(ddp.float64)).exp().to(ddp.float32)


def by_the_cpu(x: Any, w: Any) -> Any:
    return (x.cpu() * w.cpu()).exp().to(x.device) * w


PARTS = [by_function, by_parts, recomputed, cast, by_the_cpu]


def gradients(device: str, part: Any, inside: Any) -> list[Any]:
    dice = np.random.default_rng(3)
    x, w = (ddp.from_numpy(dice.standard_normal((5, 4)).astype("f4") / 2).to(device).requires_grad_() for _ in range(2))
    for _ in range(2):
        before = x * 2
        y = inside(lambda: part(before, w))  # noqa: B023  # called at once
        (y.sum() + (before * w).sum()).backward()
    return [x.grad * 1, w.grad * 1]


@in_any_order
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_gradients(gpu: Any, part: Any) -> None:
    s = ddp.cuda.Stream()

    def inside(call: Any) -> Any:
        s.wait_stream(ddp.cuda.current_stream())
        with ddp.cuda.stream(s):
            y = call()
        ddp.cuda.current_stream().wait_stream(s)
        return y

    found = gradients("cuda", part, inside)
    ddp.cuda.synchronize()
    for one, other in zip(found, gradients("cpu", part, lambda call: call()), strict=True):
        np.testing.assert_allclose(one.cpu().numpy(), other.numpy(), rtol=2e-5, atol=1e-6)
