"""A case of the table on one device and on another: what it gives, and how near that is."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import ddp
from tests.ddp.cases.table import Case, draw


class At:
    """`ddp`, whose new tensors are on a device."""

    MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")

    def __init__(self, device: str) -> None:
        self.device_name = device

    def __getattr__(self, name: str) -> Any:
        result = getattr(ddp, name)
        return functools.partial(result, device=self.device_name) if name in self.MAKERS else result


def _inputs(case: Case, dtype: Any, device: str) -> list[Any]:
    xs = []
    for array in case.inputs:
        floating = array.dtype == np.float64
        x = ddp.from_numpy(array).to(dtype) if floating else ddp.from_numpy(array.copy())
        xs.append(x.to(device).detach().requires_grad_(floating))
    return xs


def _weights(x: Any, seed: int) -> Any:
    """Numbers of the shape, dtype and device of x."""
    return ddp.from_numpy(draw(*x.shape, seed=seed)).to(x.device, x.dtype)


def _arrays(*tensors: Any) -> list[Any]:
    return [None if x is None else x.detach().cpu().numpy() for x in tensors]


def results(case: Case, dtype: Any, device: str) -> list[Any]:
    """The value of a case and the gradients of its inputs, as NumPy arrays; None for an input without one."""
    xs = _inputs(case, dtype, device)
    y = case.fn(At(device), *xs)
    assert str(y.device).startswith(device)
    if y.requires_grad:
        y.backward(_weights(y, 9))
    return _arrays(y, *[x.grad for x in xs])


def second_results(case: Case, dtype: Any, device: str) -> list[Any]:
    """The gradients of a case, with a graph, and those of their weighted sum, which are of the gradient of y, too."""
    xs = _inputs(case, dtype, device)
    y = case.fn(At(device), *xs)
    wanted = [x for x in xs if x.requires_grad]
    g = _weights(y, 9).requires_grad_()
    first = ddp.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True)
    value = sum((dx * _weights(dx, i)).sum() for i, dx in enumerate(first) if dx is not None)
    if not getattr(value, "requires_grad", False):
        return _arrays(*first)
    return _arrays(*first, *ddp.autograd.grad(value, [*wanted, g], materialize_grads=True))


def assert_near(one: Any, other: Any, rtol: float, atol: float) -> None:
    """atol: in units of the largest number of `other`, or of 1 if that is less"""
    size = np.abs(other.astype("f8")).max(initial=1, where=np.isfinite(other))
    assert_allclose(one.astype("f8"), other.astype("f8"), rtol=rtol, atol=atol * size)


def assert_agree(got: list[Any], expected: list[Any], rtol: float, atol: float) -> None:
    """Of `results`: the same shapes, dtypes and inputs with gradients, and near numbers."""
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert_near(one, other, rtol, atol)
