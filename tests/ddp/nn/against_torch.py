"""A layer beside PyTorch's with the same weights: values, and the gradients of input and parameters, agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn


def compare(
    ours: Any, theirs: Any, array: np.ndarray[Any, Any], *more: Any, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """`array` becomes the input, in its dtype; `more` are further arguments of both."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    x, expected_x = ddp.tensor(array, requires_grad=True), torch.tensor(array, requires_grad=True)
    # Not the leaves themselves: a layer may write into its input.
    y, expected = ours(x * 1, *more), theirs(expected_x * 1, *more)
    np.testing.assert_allclose(y.detach().numpy(), expected.detach().numpy(), rtol, atol)
    g = np.random.default_rng(1).standard_normal(y.shape).astype(array.dtype)
    y.backward(ddp.tensor(g))
    expected.backward(torch.tensor(g))
    np.testing.assert_allclose(x.grad.numpy(), expected_x.grad.numpy(), rtol, atol)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol, atol)


def check_layer(name: str, args: Any, options: Any, shape: tuple[int, ...]) -> None:
    """The layer prints, remembers and computes as PyTorch's, in float64."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours, theirs = getattr(nn, name)(*args, **options).double(), getattr(torch.nn, name)(*args, **options).double()
    assert repr(ours) == repr(theirs)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    compare(ours, theirs, numbers(*shape))


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)
