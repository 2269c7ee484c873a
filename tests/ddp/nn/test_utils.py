"""Clipping of gradients and vectors of parameters, against PyTorch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
from ddp import nn
from ddp._layout import FlatBuckets, lay_out
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import utils

SHAPES = [(3, 4), (5,), (), (2, 0)]


def parameters(t: Any, scale: float = 1.0) -> list[Any]:
    """Parameters of t with gradients; the last has none."""
    results = []
    for i, shape in enumerate(SHAPES):
        p = t.nn.Parameter(t.zeros(shape))
        p.grad = t.tensor(np.random.default_rng(i).standard_normal(shape).astype(np.float32) * scale)
        results.append(p)
    return [*results, t.nn.Parameter(t.zeros(2))]


def gradients(params: list[Any]) -> list[Any]:
    return [None if p.grad is None else p.grad.numpy() for p in params]


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100])
def test_clip_grad_norm(norm_type: Any, max_norm: float, torch: Any) -> None:
    ours, theirs = parameters(ddp), parameters(torch)
    if float(norm_type) == math.inf:  # PyTorch refuses an empty one
        del ours[3], theirs[3]
    total = utils.clip_grad_norm_(ours, max_norm, norm_type, foreach=True)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert total.shape == ()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        if b is None:
            assert a is None
        else:
            assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_what_is_not_finite(bad: float) -> None:
    p, q = nn.Parameter(ddp.zeros(2)), nn.Parameter(ddp.zeros(1))
    p.grad = ddp.tensor([3.0, bad])
    q.grad = ddp.ones(1)
    with pytest.raises(RuntimeError, match="gradients cannot be clipped"):
        utils.clip_grad_norm_([p, q], 1.0, error_if_nonfinite=True)
    assert q.grad.item() == 1.0
    assert not math.isfinite(utils.clip_grad_norm_([p, q], 1.0).item())
    assert math.isnan(q.grad.item()) if math.isnan(bad) else q.grad.item() == 0


@pytest.mark.parametrize("norm_type", [0, 0.0, -math.inf, math.nan])
def test_there_is_no_such_norm(norm_type: float) -> None:
    p = nn.Parameter(ddp.zeros(2))
    p.grad = ddp.tensor([3.0, 4.0])
    for params in (p, []):
        with pytest.raises(ArgumentError, match=f"norm_type={norm_type}: .* expected inf, or a number other than 0"):
            utils.clip_grad_norm_(params, 1.0, norm_type)
    with pytest.raises(ArgumentError, match="norm_type"):
        utils.get_total_norm(p.grad, norm_type)
    assert p.grad.tolist() == [3, 4]


def test_an_iterator_without_parameters_warns() -> None:
    net = nn.Linear(2, 2)
    generator = net.parameters()
    assert len(list(generator)) == 2
    frozen = filter(lambda p: p.requires_grad, ())
    for params in (generator, frozen):
        for clip in (
            lambda params: utils.clip_grad_norm_(params, 1.0),
            lambda params: utils.clip_grad_value_(params, 1.0),
            lambda params: utils.clip_grads_with_norm_(params, 1.0, ddp.ones(())),
        ):
            with pytest.warns(UserWarning, match="an iterator that gives no parameter") as warned:
                clip(params)
            assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert utils.clip_grad_norm_([], 1.0).item() == 0
        assert utils.clip_grad_norm_(net.parameters(), 1.0).item() == 0
        assert utils.get_total_norm(iter(())).item() == 0


def test_clip_in_flat_buckets() -> None:
    params = [nn.Parameter(ddp.zeros(3, 2)), nn.Parameter(ddp.zeros(4))]
    buckets = FlatBuckets(lay_out([[1, 0]], [(3, 2), (4,)], [np.dtype("float32")] * 2), np.zeros)
    for p, view in zip(params, buckets.views, strict=True):
        p.leaf.grad_buffer.bind(view)
        p.grad = ddp.ones(p.shape)
    assert utils.clip_grad_norm_(params, 1.0).item() == pytest.approx(math.sqrt(10))
    assert buckets.buffers[0].sum() == pytest.approx(math.sqrt(10))
    assert all(np.shares_memory(p.grad.numpy(), buckets.buffers[0]) for p in params)


def test_clip_grad_value(torch: Any) -> None:
    ours, theirs = parameters(ddp), parameters(torch)
    assert utils.clip_grad_value_(ours, 0.5) is None
    torch.nn.utils.clip_grad_value_(theirs, 0.5)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        assert_array_equal(a, b)


def test_get_total_norm_and_clip_by_it() -> None:
    p = nn.Parameter(ddp.zeros(2))
    p.grad = ddp.tensor([3.0, 4.0])
    total = utils.get_total_norm([p.grad])
    assert total.item() == 5.0
    utils.clip_grads_with_norm_(p, 2.5, total)
    assert p.grad.tolist() == pytest.approx([1.5, 2.0])
    with pytest.raises(ArgumentError, match=r"order 2\.0 is inf"):
        utils.get_total_norm([ddp.tensor([math.inf])], error_if_nonfinite=True)


def test_vectors() -> None:
    net = nn.Linear(2, 3)
    vector = utils.parameters_to_vector(net.parameters())
    assert vector.shape == (9,)
    (vector * ddp.arange(9.0)).sum().backward()
    assert net.bias.grad.tolist() == [6.0, 7.0, 8.0]
    utils.vector_to_parameters(ddp.arange(9.0), net.parameters())
    assert net.weight.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert net.bias.tolist() == [6.0, 7.0, 8.0]
    with pytest.raises(ShapeError, match=r"shape \(8,\) for 9 elements"):
        utils.vector_to_parameters(ddp.arange(8.0), net.parameters())
