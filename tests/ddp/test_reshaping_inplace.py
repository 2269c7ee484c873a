"""Tensors that change their own shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.errors import InplaceError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

CALLS: dict[str, Callable[[Any], Any]] = {
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ dim": lambda x: x.squeeze_(1),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "tril_": lambda x: x.tril_(-1),
    "triu_": lambda x: x.triu_(),
}


def values(t: Any, call: Callable[[Any], Any], shape: tuple[int, ...]) -> list[Any]:
    leaf = t.arange(6.0).reshape(shape).requires_grad_()
    plain, x = leaf.detach() * 2, leaf * 2
    assert call(plain) is plain
    assert call(x) is x
    (x * x).sum().backward()
    return [plain.tolist(), x.tolist(), leaf.grad.tolist()]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str) -> None:
    assert values(ddp, CALLS[name], (2, 1, 3)) == values(torch, CALLS[name], (2, 1, 3))


@pytest.mark.parametrize("call", [lambda x: x.t_(), lambda x: x.fill_diagonal_(7)], ids=["t_", "fill_diagonal_"])
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_matrices(call: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    assert values(ddp, call, shape) == values(torch, call, shape)


def test_memory_stays_shared() -> None:
    x = ddp.zeros(2, 1)
    row = x[0]
    x.squeeze_().fill_(1)
    assert row.tolist() == [1]


def test_leaves_keep_their_shape() -> None:
    x = ddp.zeros(2, requires_grad=True)
    with pytest.raises(InplaceError, match=r"unsqueeze_: a tensor of shape \(2,\) that requires grad"):
        x.unsqueeze_(0)
    with ddp.no_grad(), pytest.raises(InplaceError, match="unsqueeze_"):
        x.unsqueeze_(0)


def test_diagonals_of_matrices_alone() -> None:
    with pytest.raises(ShapeError, match=r"fill_diagonal_: expected a matrix, got shape \(2,\)"):
        ddp.zeros(2).fill_diagonal_(1)
