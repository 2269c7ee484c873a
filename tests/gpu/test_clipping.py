"""Clipping on a GPU: a launch for the norm, a launch to scale, the CPU's numbers, and no wait."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError
from ddp.nn import utils
from ddp.ops.arrays import BFLOAT16
from tests.gpu import on_both

SHAPES = [(6, 5), (7,), (), (0, 3), (40, 3), (2, 2, 3)]
ROUNDING: dict[Any, float] = {np.float16: 2e-3, BFLOAT16: 1e-2, np.float32: 1e-6, np.float64: 1e-12}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp._cuda.array_table.CHUNK", 16)


def parameters(device: str, *dtypes: Any) -> list[Any]:
    random = np.random.default_rng(0)
    params = []
    for i, shape in enumerate(SHAPES):
        dtype = dtypes[i % len(dtypes)]
        p = ddp.zeros(shape, dtype=np.dtype(dtype), device=device, requires_grad=True)
        g = ddp.from_numpy(np.asarray(random.standard_normal(shape)).astype(dtype)).to(device)
        p.grad = None if i == 1 else g
        params.append(p)
    return params


def grads(params: list[Any]) -> list[Any]:
    return [None if p.grad is None else p.grad.cpu().numpy().astype("f8") for p in params]


def assert_close(actual: list[Any], expected: list[Any], rounding: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_allclose(one, other, rtol=rounding, atol=rounding / 10)


@on_both
@pytest.mark.parametrize("dtypes", [*[(d,) for d in ROUNDING], (np.float16, BFLOAT16, np.float32), tuple(ROUNDING)])
@pytest.mark.parametrize("order", [1, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("bound", [0.5, 1e4])
def test_the_norm_is_that_of_the_cpu(order: float, bound: float, dtypes: Any, gpu: Any) -> None:
    ours, expected = parameters("cuda", *dtypes), parameters("cpu", *dtypes)
    total = utils.clip_grad_norm_(ours, bound, order)
    theirs = utils.clip_grad_norm_(expected, bound, order)
    rounding = max(ROUNDING[d] for d in dtypes)
    assert (total.dtype, total.shape, total.device.type) == (theirs.dtype, (), "cuda")
    assert total.item() == pytest.approx(theirs.item(), rel=rounding)
    assert_close(grads(ours), grads(expected), rounding)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite(bad: float, gpu: Any) -> None:
    params = parameters("cuda", np.float32)
    params[4].grad[3, 1] = bad
    before = grads(params)
    with pytest.raises(ArgumentError, match="gradients cannot be clipped"):
        utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert_close(grads(params), before, 0)
    for order in (2, math.inf):
        assert not math.isfinite(utils.get_total_norm([p.grad for p in params if p.grad is not None], order).item())
    utils.clip_grad_norm_(params, 1.0)
    assert np.isnan(grads(params)[4]).any()


@on_both
@pytest.mark.parametrize("dtypes", [(np.float16,), (BFLOAT16,), (np.float32,), (np.float16, BFLOAT16, np.float32)])
def test_values_are_held_within_bounds(dtypes: Any, gpu: Any) -> None:
    ours, expected = parameters("cuda", *dtypes), parameters("cpu", *dtypes)
    with gpu.no_waits():
        utils.clip_grad_value_(ours, 0.25)
    utils.clip_grad_value_(expected, 0.25)
    assert [p.grad is None or p.grad.dtype == p.dtype for p in ours] == [True] * len(ours)
    assert_close(grads(ours), grads(expected), 0)


def test_gradients_that_lie_with_gaps_or_turned(gpu: Any) -> None:
    ps = [ddp.zeros(6, 4, device="cuda", requires_grad=True) for _ in range(2)]
    g = ddp.from_numpy(np.arange(24, dtype=np.float32).reshape(6, 4)).cuda()
    ps[0].leaf.grad_buffer.bind(g.t().clone().t().array)
    ps[1].leaf.grad_buffer.bind(ddp.zeros(6, 8, device="cuda")[:, ::2].array)
    for p in ps:
        p.grad = g
    norm = math.sqrt(2 * np.square(np.arange(24.0)).sum())
    assert utils.clip_grad_norm_(ps, 1.0).item() == pytest.approx(norm, rel=1e-6)
    for p in ps:
        assert_close(grads([p]), [np.arange(24.0).reshape(6, 4) / norm], 1e-5)
