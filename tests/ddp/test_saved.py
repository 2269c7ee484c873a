"""What backward reads stays what forward saw: a write in between is refused, or goes past a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.nn import functional as F


def cross_entropy(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    target = ddp.tensor([0, 1, 0])
    return F.cross_entropy(x, target), lambda: target.fill_(2)


def tensor_index(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    rows = ddp.tensor([0, 1, 1])
    return x[rows].sum(), lambda: rows.fill_(2)


def array_index(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    rows = np.array([0, 1, 1])
    return x[0, rows].sum(), lambda: rows.fill(2)


def mask(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    positive = x > 4
    return x[positive].sum(), lambda: positive.fill_(False)


def indices_of_max(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    values, indices = x.max(1, keepdim=True)
    return values.sum(), lambda: indices.fill_(0)


def array_operand(x: ddp.Tensor) -> tuple[ddp.Tensor, Callable[[], Any]]:
    factor = np.full((3, 3), 3, np.float32)
    return (x * factor).sum(), lambda: factor.fill(100)


@pytest.mark.parametrize("made", [cross_entropy, tensor_index, array_index, mask, indices_of_max, array_operand])
def test_a_later_write_does_not_reach_backward(made: Callable[[ddp.Tensor], Any]) -> None:
    grads = []
    for write in (False, True):
        x = ddp.arange(9, dtype=ddp.float32).reshape(3, 3).clone().requires_grad_()
        loss, change = made(x)
        if write:
            change()
        loss.backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_without_a_graph_nothing_is_copied() -> None:
    array = np.ones(2, np.float32)
    x = ddp.ones(2, requires_grad=True)
    with ddp.no_grad():
        assert ddp._tensor.base.copy_if_needed(array, x) is array
    assert ddp._tensor.base.copy_if_needed(array, x.detach(), 2.0) is array
