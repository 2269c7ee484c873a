"""Checkpointed regions: the same gradients, less memory, and counts and hooks as without."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.autograd import checkpoint, checkpoint_sequential
from ddp.errors import ArgumentError, GraphError, VersionError
from ddp.nn import functional as F


def net(seed: int = 0) -> nn.Sequential:
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def test_the_same_gradients() -> None:
    x = ddp.randn(5, 4, requires_grad=True)
    results = []
    for run in (lambda m: m(x), lambda m: checkpoint(m, x), lambda m: checkpoint_sequential(m, 2, x)):
        model = net()
        x.grad = None
        y = run(model)
        (y * y).sum().backward()
        results.append((y.tolist(), x.grad.tolist(), grads(model)))
    assert results[0] == results[1] == results[2]


def test_saved_values_are_not_kept() -> None:
    x = ddp.randn(50, 4, requires_grad=True)
    model = net()
    y = checkpoint(model, x)
    nodes = []
    edge = y.edge
    while isinstance(edge, ddp._engine.Node):
        nodes.append(edge)
        edge = edge.edges[0]
    assert len(nodes) == 5
    assert all(node.saved == () and node.residual is None for node in nodes)
    y.sum().backward()


def test_random_numbers_are_drawn_alike() -> None:
    x = ddp.ones(100, requires_grad=True)
    ddp.manual_seed(3)
    y = checkpoint(lambda x: F.dropout(x * 2, 0.5), x)
    after = ddp.rand(1).item()
    y.sum().backward()
    assert_array_equal(x.grad.numpy(), y.detach().numpy())  # both are 4 where it was kept
    ddp.manual_seed(3)
    F.dropout(x, 0.5)
    assert ddp.rand(1).item() == after


def test_the_second_run_happens_once_and_backward_is_not_nested() -> None:
    runs: list[int] = []
    events: list[str] = []
    model = net()

    def region(x: Any) -> Any:
        runs.append(1)
        return model(x)

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    x = ddp.randn(5, 4)
    checkpoint(region, x).sum().backward()
    assert len(runs) == 2
    assert sorted(events) == sorted(name for name, _ in model.named_parameters())


def test_a_second_run_that_differs() -> None:
    ops = iter([lambda x: x * x, lambda x: x.exp()])
    x = ddp.ones(2, requires_grad=True)
    y = checkpoint(lambda x: next(ops)(x), x)
    with pytest.raises(GraphError, match="op 0 was mul, now exp"):
        y.sum().backward()


def test_what_changed_in_between() -> None:
    w = ddp.ones(2, requires_grad=True)
    x = ddp.ones(2)
    y = checkpoint(lambda x: x * w, x)
    x.add_(1)
    with pytest.raises(GraphError, match="changed in place"):
        y.sum().backward()
    y = checkpoint(lambda x: x * w, x.requires_grad_())
    with ddp.no_grad():
        w.add_(1)
    with pytest.raises(VersionError):
        y.sum().backward()


def test_keywords_and_no_grad() -> None:
    x = ddp.ones(2, requires_grad=True)
    y = checkpoint(lambda x, scale: x * scale, x, scale=ddp.full((2,), 3.0), use_reentrant=False)
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    with ddp.no_grad():
        assert not checkpoint(lambda x: x * 2, x).requires_grad
    with pytest.raises(ArgumentError):
        checkpoint_sequential(net(), 9, x)


def test_in_place_inside_the_region() -> None:
    def region(x: ddp.Tensor) -> ddp.Tensor:
        h = x * 1
        h.mul_(x)
        h *= h
        return h * x

    grads = []
    for run in (region, lambda x: checkpoint(region, x)):
        x = ddp.tensor([1.0, 2.0], requires_grad=True)
        run(x).sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1] == [5.0, 80.0]


def test_under_autocast_parameters_cast_for_the_region_are_there_afterwards() -> None:
    layer = ddp.nn.Linear(2, 2)
    grads = []
    for around in (lambda f, x: f(x), checkpoint):
        layer.zero_grad()
        with ddp.amp.autocast("cpu"):
            y = layer(around(lambda x: layer(layer(x)).relu(), ddp.ones(3, 2, requires_grad=True)))
        y.float().sum().backward()
        grads.append(layer.weight.grad.tolist())
    assert grads[0] == grads[1]


@pytest.mark.parametrize("pack", [lambda x: [x], lambda x: (x, True, 3), lambda x: {"x": (x,)}])
def test_tensors_inside_arguments(pack: Any) -> None:
    def region(packed: Any) -> ddp.Tensor:
        x = packed["x"][0] if isinstance(packed, dict) else packed[0]
        h = x + 1
        return h * h

    x = ddp.tensor([1.0, 2.0], requires_grad=True)
    a = x * 1
    checkpoint(region, pack(a)).sum().backward()
    assert x.grad.tolist() == [4.0, 6.0]
    a = x * 1
    y = checkpoint(region, pack(a))
    with ddp.no_grad():
        a.add_(1)
    with pytest.raises(GraphError, match="changed in place"):
        y.sum().backward()
