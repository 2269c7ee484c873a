"""SGD against PyTorch, and the rules that all optimizers share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, StateDictError


def model() -> nn.Sequential:
    ddp.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def step(net: nn.Module, optimizer: ddp.optim.Optimizer, seed: int = 0) -> float:
    random = np.random.default_rng(seed)
    optimizer.zero_grad()
    x = random.standard_normal((6, 4)).astype(next(net.parameters()).dtype)
    loss = nn.CrossEntropyLoss()(net(ddp.tensor(x)), ddp.tensor(random.integers(0, 3, 6)))
    loss.backward()
    optimizer.step()
    return float(loss)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ],
    ids=str,
)
def test_ten_steps_agree_with_pytorch(options: dict[str, Any], dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    ours = model().to(dtype)
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(
        getattr(torch, dtype)
    )
    theirs.load_state_dict({key: torch.tensor(value.numpy()) for key, value in ours.state_dict().items()})
    optimizer = ddp.optim.SGD(ours.parameters(), lr=0.1, **options)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    for seed in range(10):
        loss = step(ours, optimizer, seed)
        random = np.random.default_rng(seed)
        reference.zero_grad()
        x = torch.tensor(random.standard_normal((6, 4)).astype(dtype))
        expected = torch.nn.CrossEntropyLoss()(theirs(x), torch.tensor(random.integers(0, 3, 6)))
        expected.backward()
        reference.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5 if dtype == "float32" else 1e-12)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-14}
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p._array, q.detach().numpy(), **tolerance)


def test_a_parameter_without_a_gradient_is_not_touched() -> None:
    used, unused = ddp.ones(2, requires_grad=True), ddp.ones(2, requires_grad=True)
    optimizer = ddp.optim.SGD([used, unused], lr=0.1, momentum=0.9, weight_decay=0.5)
    used.sum().backward()
    optimizer.step()
    used.grad = None
    before = used.tolist()
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() == before
    assert unused not in optimizer.state


def test_gradients_are_only_read() -> None:
    p = ddp.ones(2, requires_grad=True)
    p.grad = ddp.full((2,), 3.0)
    for options in ({}, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}, {"weight_decay": 0.1}):
        optimizer = ddp.optim.SGD([p], lr=0.1, **options)
        optimizer.step()
        optimizer.step()
        assert p.grad.tolist() == [3.0, 3.0]


def test_update_is_in_place_and_counts_as_a_write() -> None:
    p = ddp.ones(2, requires_grad=True)
    array = p._array
    p.sum().backward()
    ddp.optim.SGD([p], lr=0.5).step()
    assert p._array is array
    assert p._version.count == 1
    assert p.tolist() == [0.5, 0.5]


def test_groups() -> None:
    a, b = ddp.ones(1, requires_grad=True), ddp.ones(1, requires_grad=True)
    optimizer = ddp.optim.SGD([{"params": [a], "lr": 1.0}, {"params": b}], lr=0.25)
    (a + b).backward()
    optimizer.step()
    assert (a.item(), b.item()) == (0.0, 0.75)
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    assert b.item() == 0.25
    assert repr(optimizer).startswith("SGD(lr=1.0, momentum=0.0")


def test_state_goes_over() -> None:
    first = model()
    optimizer = ddp.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    step(first, optimizer)
    second = model()
    second.load_state_dict(first.state_dict())
    other = ddp.optim.SGD(second.parameters(), lr=99.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    for seed in range(3):
        step(first, optimizer, seed)
        step(second, other, seed)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        np.testing.assert_array_equal(p._array, q._array)


def test_state_dict_numbers_parameters() -> None:
    net = model()
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step(net, optimizer)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert sorted(state["state"]) == [0, 1, 2, 3]
    assert state["state"][0]["momentum_buffer"].shape == (8, 4)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda p: ddp.optim.SGD([]), ArgumentError, "no parameter"),
        (lambda p: ddp.optim.SGD([p, p]), ArgumentError, "named twice"),
        (lambda p: ddp.optim.SGD([3]), DtypeError, "not int"),
        (lambda p: ddp.optim.SGD([p * 2]), ArgumentError, "not a leaf"),
        (lambda p: ddp.optim.SGD([p], lr=-1), ArgumentError, "lr"),
        (lambda p: ddp.optim.SGD([p], nesterov=True), ArgumentError, "nesterov"),
        (
            lambda p: ddp.optim.SGD([p]).load_state_dict(ddp.optim.SGD(model().parameters()).state_dict()),
            StateDictError,
            r"groups of \[4\] parameters, expected \[1\]",
        ),
        (lambda p: ddp.optim.Optimizer([p], {}).step(), NotImplementedError, "defines no step"),
    ],
)
def test_wrong_use(wrong: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong(ddp.ones(1, requires_grad=True))


def test_zero_grad_empties_or_keeps_zeros() -> None:
    net = model()
    optimizer = ddp.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    grads = [p.grad for p in net.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))
    assert not any(g.any() for g in grads if g is not None)
    optimizer.zero_grad(set_to_none=True)
    assert [p.grad for p in net.parameters()] == [None] * 4
