"""Module: registration, walks, modes, and what it prints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, GraphError
from tests.ddp.nn.against_torch import check_refusals
from tests.ddp.nn.networks import Block, Net

pytest.importorskip("torch", reason="PyTorch is the oracle here")


class TestWalks:
    def test_names(self) -> None:
        net = Net()
        names = ["tied", "block.scale", "block.first.weight", "block.first.bias", "last.bias"]
        assert [name for name, _ in net.named_parameters()] == names
        assert len(list(net.parameters())) == 5
        every = {name for name, _ in net.named_parameters(remove_duplicate=False)}
        assert every == {*names, "last.weight"}
        assert [name for name, _ in net.named_parameters(prefix="m", recurse=False)] == ["m.tied"]
        assert [name for name, _ in net.named_buffers()] == ["block.mean", "block.cache", "block.count"]
        assert [name for name, _ in net.named_modules()] == ["", "block", "block.first", "drop", "last"]
        assert [name for name, _ in net.named_children()] == ["block", "drop", "last"]
        assert [type(m).__name__ for m in net.children()] == ["Block", "Dropout", "Linear"]

    def test_a_shared_module_is_walked_once(self) -> None:
        layer = nn.Linear(2, 2)
        net = nn.Sequential(layer, nn.ReLU(), layer)
        assert len(list(net.modules())) == 3
        assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias"]
        assert [name for name in net.state_dict() if name.endswith("bias")] == ["0.bias", "2.bias"]

    def test_paths_lead_to_parts(self) -> None:
        net = Net()
        assert net.get_submodule("") is net
        assert net.get_submodule("block.first") is net.block.first
        assert net.get_parameter("block.first.bias") is net.block.first.bias
        assert net.get_buffer("block.mean") is net.block.mean
        second = "no module 'block.second.x': 'second' is not there"
        check_refusals(
            {
                AttributeError: {
                    second: lambda: net.get_submodule("block.second.x"),
                    "no parameter 'block.mean'": lambda: net.get_parameter("block.mean"),
                    "no buffer 'tied'": lambda: net.get_buffer("tied"),
                },
            }
        )


class TestAttributes:
    def test_buffers_by_assignment(self) -> None:
        net = nn.Module()
        net.kept = nn.Buffer(ddp.ones(2))
        net.lost = nn.Buffer(ddp.ones(1), persistent=False)
        assert [name for name, _ in net.named_buffers()] == ["kept", "lost"]
        assert list(net.state_dict()) == ["kept"]
        assert list(copy.deepcopy(net).state_dict()) == ["kept"]
        net.lost = nn.Buffer(ddp.ones(1))
        assert list(net.state_dict()) == ["kept", "lost"]
        assert not net.kept.requires_grad
        net.kept = None
        assert list(net.state_dict()) == ["lost"]
        del net.lost
        assert list(net.buffers()) == []

    def test_a_name_is_taken_once(self) -> None:
        net = Block()
        net.plain = 1
        for register, value in (
            (net.register_parameter, nn.Parameter(ddp.ones(1))),
            (net.register_buffer, ddp.ones(1)),
            (net.register_module, nn.ReLU()),
        ):
            for name in ("plain", "forward"):
                with pytest.raises(ArgumentError, match=f"'{name}' exists already"):
                    register(name, value)
        net.register_buffer("mean", ddp.ones(3))
        assert net.mean.tolist() == [1.0] * 3

    def test_assignment_registers_and_replaces(self) -> None:
        net = nn.Module()
        net.part = nn.ReLU()
        net.part = nn.Parameter(ddp.ones(1))
        assert (list(net._modules), list(net._parameters)) == ([], ["part"])
        net.part = None
        assert net.part is None
        assert list(net.parameters()) == []
        net.plain = 5
        net.plain = nn.ReLU()
        assert list(net._modules) == ["plain"]
        del net.plain
        assert not hasattr(net, "plain")

    def test_refusals(self) -> None:
        net: Any = Block()
        check_refusals(
            {
                DtypeError: {
                    "'scale' is a parameter": lambda: setattr(net, "scale", ddp.ones(3)),
                    "expected a Parameter, got int": lambda: net.register_parameter("name", 3),
                },
                AttributeError: {"Block has no attribute 'absent'": lambda: net.absent},
                ArgumentError: {"holds a dot": lambda: net.add_module("a.b", nn.ReLU())},
                NotImplementedError: {"Module defines no forward": lambda: nn.Module()(1)},
            }
        )
        net.mean = ddp.ones(3)
        assert net.state_dict()["mean"].tolist() == [1.0] * 3

    def test_init_must_come_first(self) -> None:
        class Early(nn.Module):
            def __init__(self) -> None:
                self.part = nn.ReLU()

        with pytest.raises(AttributeError, match=r"Early: call super\(\).__init__\(\)"):
            Early()

    def test_keywords_of_a_class_are_those_that_it_declares(self) -> None:
        class Tagged:
            mode: Any

            def __init_subclass__(cls, mode: Any = None, **others: Any) -> None:
                cls.mode = mode
                super().__init_subclass__(**others)

        class Narrow(nn.Linear, Tagged, mode="ours", shown="in_features="):
            pass

        assert Narrow.mode == "ours"
        assert repr(Narrow(2, 3)) == "Narrow(in_features=2)"
        with pytest.raises(TypeError):
            type("Wrong", (nn.Linear,), {}, colour="red")

    def test_a_parameter_shares_its_data(self) -> None:
        data = ddp.ones(2)
        p = nn.Parameter(data)
        data.fill_(3)
        assert p.tolist() == [3.0, 3.0]
        assert p.requires_grad
        assert not nn.Parameter(ddp.tensor([1]), requires_grad=False).requires_grad
        with pytest.raises(DtypeError, match="int64"):
            nn.Parameter(ddp.tensor([1]))


@pytest.mark.parametrize("given", [np.ones((1, 2), np.float32), [1.0, 2.0], None], ids=["ndarray", "list", "None"])
def test_what_is_no_tensor_is_named(given: Any) -> None:
    for layer in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(DtypeError, match=rf"Linear: expected tensors, got {type(given).__name__}; as_tensor"):
            layer(given)
    with pytest.raises(DtypeError, match="expected tensors" if given is not None else "expected"):
        nn.ReLU()(given)


class TestConversions:
    def test_by_every_name(self) -> None:
        tied: Any = Net()
        before = list(tied.parameters())
        assert all(p is q for p, q in zip(before, tied.double().parameters(), strict=True))
        assert tied.last.weight is tied.tied
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
        for convert in (net.to, net.type, lambda dtype: net.to(ddp.ones(1, dtype=dtype))):
            with pytest.raises(DtypeError, match="BatchNorm1d: expected a floating dtype, got int64"):
                convert(ddp.int64)

    def test_gradients_go_along(self) -> None:
        p = nn.Linear(1, 1)
        p(ddp.ones(1, 1)).sum().backward()
        p.double()
        assert p.weight.grad.dtype == ddp.float64
        assert p.weight.grad.tolist() == [[1.0]]
        p(ddp.ones(1, 1, dtype=ddp.float64)).sum().backward()
        assert p.weight.grad.tolist() == [[2.0]]

    def test_modes(self) -> None:
        net = Net()
        assert net.eval() is net
        assert not any(m.training for m in net.modules())
        assert all(m.training for m in net.train().modules())

    def test_to_changes_nothing_if_it_raises(self) -> None:
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        list(net.parameters())[-1].leaf.ready_hook = object()
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
