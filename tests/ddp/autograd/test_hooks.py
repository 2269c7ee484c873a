"""Hooks on tensors: what they see, what they may change, and when they run."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, DtypeError, GraphError, ShapeError


def leaf(*values: float) -> ddp.Tensor:
    return ddp.tensor(values, requires_grad=True)


def test_a_leaf_hook_sees_the_sum_and_may_replace_it() -> None:
    x = leaf(1.0, 2.0)
    seen: list[Any] = []
    x.register_hook(lambda g: seen.append(g.tolist()))
    x.register_hook(lambda g: g * 10)
    (x * 2 + x * 3).sum().backward()
    assert seen == [[5.0, 5.0]]
    assert x.grad.tolist() == [50.0, 50.0]


def test_an_inner_hook_changes_what_goes_on() -> None:
    x = leaf(1.0, 2.0)
    y = x * 2
    handle = y.register_hook(lambda g: g + 1)
    z = (y * 3).sum()
    z.backward(retain_graph=True)
    assert x.grad.tolist() == [8.0, 8.0]
    handle.remove()
    handle.remove()
    x.grad = None
    z.backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_hooks_and_autograd_grad() -> None:
    x = leaf(1.0, 2.0)
    y = x * 2
    x.register_hook(lambda g: g * 10)
    y.register_hook(lambda g: g * 7)
    gx, gy = ddp.autograd.grad((y * y).sum(), (x, y))
    assert gy.tolist() == [28.0, 56.0]
    assert gx.tolist() == [560.0, 1120.0]
    assert x.grad is None


def test_what_does_not_fit_is_an_error() -> None:
    for bad, error in ((lambda g: g.sum(), ShapeError), (lambda g: 3.0, DtypeError)):
        x = leaf(1.0, 2.0)
        x.register_hook(bad)
        with pytest.raises(error):
            x.sum().backward()
    with pytest.raises(GraphError):
        ddp.ones(2).register_hook(print)


def test_after_accumulation() -> None:
    x = leaf(1.0)
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda p: seen.append((p is x, p.grad.item())))
    (x * 2 + x).backward()
    (x * 2).backward()
    assert seen == [(True, 3.0), (True, 5.0)]
    with pytest.raises(GraphError):
        (x * 2).register_post_accumulate_grad_hook(print)


def test_retain_grad() -> None:
    x = leaf(1.0, 2.0)
    y = x * 2
    y.retain_grad()
    y.retain_grad()
    assert y.retains_grad
    assert not x.retains_grad
    (y * y).sum().backward()
    assert y.grad.tolist() == [4.0, 8.0]
    with pytest.raises(GraphError):
        ddp.ones(1).retain_grad()


def test_backward_into_chosen_inputs() -> None:
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    y = x * w
    y.sum().backward(inputs=[w], retain_graph=True)
    assert x.grad is None
    assert w.grad.tolist() == [1.0, 2.0]
    ddp.autograd.backward(y.sum(), inputs=w)
    assert w.grad.tolist() == [2.0, 4.0]
    for create_graph in (False, True):
        z = x * 2
        z.retain_grad()
        (z * z).sum().backward(inputs=[z], create_graph=create_graph)
        assert z.grad.tolist() == [4.0, 8.0]
    assert x.grad is None
    with pytest.raises(ArgumentError):
        y.sum().backward(inputs=[])
