"""Modules in another dtype or on another device: parameters and buffers stay the same objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import DtypeError, GraphError
from tests.ddp.nn.networks import Net


class TestConversions:
    def test_by_every_name(self) -> None:
        net = nn.BatchNorm1d(2)
        for name in ("half", "bfloat16", "double", "float"):
            assert getattr(net, name)() is net
            expected = {"half": "float16", "double": "float64", "float": "float32"}.get(name, name)
            assert {p.dtype for p in net.parameters()} == {net.running_mean.dtype} == {getattr(ddp, expected)}
            assert net.num_batches_tracked.dtype == ddp.int64
        assert net.type(ddp.float64).weight.dtype == ddp.float64
        assert net.to("cpu", ddp.float32, non_blocking=True).weight.dtype == ddp.float32
        assert net.to(ddp.ones(1, dtype=ddp.float16)).weight.dtype == ddp.float16
        assert net.cpu() is net

    def test_train_of_children_is_called(self) -> None:
        class Frozen(nn.BatchNorm1d):
            def train(self, mode: bool = True) -> Any:
                return super().train(False)

        net = nn.Sequential(Frozen(2), nn.ReLU()).train()
        assert [m.training for m in net.modules()] == [True, False, True]
        with pytest.raises(DtypeError, match="mode is True or False"):
            net.train(1)

    def test_to_keeps_the_objects(self) -> None:
        net = Net()
        before = list(net.parameters())
        net.double()
        assert all(p is q for p, q in zip(before, net.parameters(), strict=True))
        assert {p.dtype for p in net.parameters()} == {ddp.float64}
        assert net.block.mean.dtype == ddp.float64
        assert net.block.count.dtype == ddp.int64
        assert net.last.weight is net.tied
        net(ddp.ones(1, 2, dtype=ddp.float64)).sum().backward()
        assert net.tied.grad.dtype == ddp.float64
        assert net.to("cpu").half().float() is net

    def test_gradients_go_along(self) -> None:
        p = nn.Linear(1, 1)
        p(ddp.ones(1, 1)).sum().backward()
        p.double()
        assert p.weight.grad.dtype == ddp.float64
        assert p.weight.grad.tolist() == [[1.0]]
        p(ddp.ones(1, 1, dtype=ddp.float64)).sum().backward()
        assert p.weight.grad.tolist() == [[2.0]]

    def test_a_watched_parameter_refuses(self) -> None:
        net = nn.Linear(1, 1)
        net.weight.leaf.ready_hook = object()
        with pytest.raises(GraphError, match="before wrapping"):
            net.double()

    def test_modes(self) -> None:
        net = Net()
        assert net.eval() is net
        assert not any(m.training for m in net.modules())
        assert all(m.training for m in net.train().modules())

    def test_freezing(self) -> None:
        net = Net().requires_grad_(False)
        assert not net(ddp.ones(1, 2)).requires_grad
        assert net.requires_grad_()(ddp.ones(1, 2)).requires_grad

    def test_zero_grad(self) -> None:
        net = Net()
        net(ddp.ones(1, 2)).sum().backward()
        net.zero_grad()
        assert [p.grad for p in net.parameters()] == [None] * 5

    def test_zero_grad_that_keeps_zeros(self) -> None:
        net = Net()
        net(ddp.ones(1, 2)).sum().backward()
        first, second = list(net.parameters())[:2]
        grad = first.grad
        second.grad = None
        net.zero_grad(set_to_none=False)
        assert first.grad is grad
        assert not grad.any()
        assert second.grad is None
        net.zero_grad(set_to_none=True)
        assert first.grad is None

    def test_to_changes_nothing_if_it_raises(self) -> None:
        class Watcher:
            def begin(self, leaves: Any) -> None: ...
            def ready(self, leaf: Any) -> None: ...
            def end(self) -> None: ...
            def abandon(self, error: BaseException) -> None: ...

        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        last = list(net.parameters())[-1]
        last.leaf.ready_hook = Watcher()
        arrays = [p.array for p in net.parameters()]
        with pytest.raises(GraphError, match="convert before wrapping"):
            net.double()
        assert all(p.array is array for p, array in zip(net.parameters(), arrays, strict=True))
        assert net.float() is net  # nothing to change, nothing to refuse

    def test_deepcopy(self) -> None:
        net = Net()
        other: Any = copy.deepcopy(net)
        assert other.last.weight is other.tied
        assert other.tied is not net.tied
        assert other.tied.tolist() == net.tied.tolist()

    def test_tied_weights_get_both_gradients(self) -> None:
        layer = nn.Linear(1, 1, bias=False).double()
        with ddp.no_grad():
            layer.weight.fill_(3.0)
        nn.Sequential(layer, layer)(ddp.tensor([[2.0]], dtype=ddp.float64)).backward()
        assert layer.weight.grad.tolist() == [[12.0]]
