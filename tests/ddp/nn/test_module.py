"""Module: registration, walks, state dicts, modes and conversions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, GraphError, StateDictError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.scale = nn.Parameter(ddp.ones(3))
        self.register_buffer("mean", ddp.zeros(3))
        self.register_buffer("cache", ddp.zeros(1), persistent=False)
        self.register_buffer("count", ddp.tensor(0))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.first(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.tied = nn.Parameter(ddp.randn(3, 3))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.last(self.drop(self.block(x)))


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

    def test_apply_goes_children_first(self) -> None:
        seen: list[str] = []
        Net().apply(lambda m: seen.append(type(m).__name__))
        assert seen == ["Linear", "Block", "Dropout", "Linear", "Net"]

    def test_paths_lead_to_parts(self) -> None:
        net = Net()
        assert net.get_submodule("") is net
        assert net.get_submodule("block.first") is net.block.first
        assert net.get_parameter("block.first.bias") is net.block.first.bias
        assert net.get_buffer("block.mean") is net.block.mean
        for call, text in (
            (lambda: net.get_submodule("block.second.x"), "no module 'block.second.x': 'second' is not there"),
            (lambda: net.get_parameter("block.mean"), "no parameter 'block.mean'"),
            (lambda: net.get_buffer("tied"), "no buffer 'tied'"),
        ):
            with pytest.raises(AttributeError, match=text):
                call()

    def test_a_memo_is_left_out(self) -> None:
        net = Net()
        memo: set[Any] = {net.block}
        assert [name for name, _ in net.named_modules(memo, prefix="m")] == ["m", "m.drop", "m.last"]
        assert memo == set(net.modules()) - {net.block.first}


class TestAttributes:
    def test_dir_lists_parts(self) -> None:
        names = dir(Net())
        assert {"block", "tied", "drop", "forward", "training"} <= set(names)
        assert "0" not in dir(nn.Sequential(nn.ReLU()))

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
                with pytest.raises(ArgumentError, match=f"'{name}' is there already"):
                    register(name, value)  # type: ignore[operator]
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

    def test_a_buffer_stays_a_buffer(self) -> None:
        net = Block()
        net.mean = ddp.ones(3)
        assert net.state_dict()["mean"].tolist() == [1.0] * 3

    def test_refusals(self) -> None:
        net = Block()
        with pytest.raises(DtypeError, match="'scale' is a parameter"):
            net.scale = ddp.ones(3)
        with pytest.raises(DtypeError, match="'mean' is a buffer"):
            net.mean = 3
        with pytest.raises(DtypeError, match="'first' is a module"):
            net.first = 3
        with pytest.raises(AttributeError, match="Block has no attribute 'absent'"):
            _ = net.absent
        with pytest.raises(ArgumentError, match="holds a dot"):
            net.add_module("a.b", nn.ReLU())
        for register in (net.register_parameter, net.register_buffer, net.add_module):
            with pytest.raises(DtypeError, match="got int"):
                register("name", 3)  # type: ignore[operator]
        with pytest.raises(NotImplementedError, match="Module defines no forward"):
            nn.Module()(1)

    def test_init_must_come_first(self) -> None:
        class Early(nn.Module):
            def __init__(self) -> None:
                self.part = nn.ReLU()

        with pytest.raises(AttributeError, match=r"Early: call super\(\).__init__\(\)"):
            Early()

    def test_a_parameter_shares_its_data(self) -> None:
        data = ddp.ones(2)
        p = nn.Parameter(data)
        data.fill_(3)
        assert p.tolist() == [3.0, 3.0]
        assert p.requires_grad
        assert not nn.Parameter(ddp.tensor([1]), requires_grad=False).requires_grad
        with pytest.raises(DtypeError, match="int64"):
            nn.Parameter(ddp.tensor([1]))


class TestState:
    def test_values_share_memory(self) -> None:
        net = Net()
        state = net.state_dict()
        assert "block.cache" not in state
        assert "block.count" in state
        assert not state["tied"].requires_grad
        assert np.shares_memory(state["tied"]._array, net.last.weight._array)

    def test_round_trip(self) -> None:
        a, b = Net(), Net()
        assert b.load_state_dict(a.state_dict()) == ([], [])
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            np.testing.assert_array_equal(p._array, q._array, err_msg=name)
            assert not np.shares_memory(p._array, q._array)

    def test_every_problem_in_one_error(self) -> None:
        net = Net()
        before = net.block.scale.tolist()
        state = {**net.state_dict(), "extra": ddp.ones(1), "last.bias": ddp.ones(4), "block.scale": ddp.zeros(3)}
        del state["tied"], state["block.mean"]
        with pytest.raises(StateDictError) as caught:
            net.load_state_dict(state)
        assert str(caught.value) == (
            "load_state_dict into Net: missing: tied, block.mean; unexpected: extra; "
            "size mismatch: last.bias is (4,) in the state dict, (3,) in the module"
        )
        assert net.block.scale.tolist() == before

    def test_not_strict(self) -> None:
        net = Block()
        result = net.load_state_dict({"scale": ddp.full((3,), 2.0), "extra": ddp.ones(1)}, strict=False)
        assert result.missing_keys == ["mean", "count", "first.weight", "first.bias"]
        assert result.unexpected_keys == ["extra"]
        assert net.scale.tolist() == [2.0] * 3

    def test_dtypes_are_cast(self) -> None:
        net = nn.Linear(2, 1)
        net.load_state_dict({"weight": ddp.ones(1, 2, dtype=ddp.float64), "bias": ddp.ones(1, dtype=ddp.float64)})
        assert net.weight.dtype == ddp.float32
        assert net.weight.tolist() == [[1.0, 1.0]]

    def test_agrees_with_pytorch_on_order_and_prefix(self) -> None:
        torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

        def made(nn: Any) -> Any:
            return nn.Sequential(nn.Linear(1, 2), nn.ModuleDict({"a": nn.BatchNorm1d(2)}), nn.ParameterList())

        ours, theirs = made(nn).state_dict(prefix="m."), made(torch.nn).state_dict(prefix="m.")
        assert list(ours) == list(theirs)

    def test_destination_and_keep_vars(self) -> None:
        net = Block()
        box: dict[str, Any] = {"before": 1}
        assert net.state_dict(destination=box, prefix="x.", keep_vars=True) is box
        assert list(box) == ["before", "x.scale", "x.mean", "x.count", "x.first.weight", "x.first.bias"]
        assert box["x.scale"] is net.scale

    def test_assign(self) -> None:
        net = Net()
        state = {key: ddp.ones(*value.shape, dtype=ddp.float64) for key, value in net.state_dict().items()}
        frozen = net.block.scale.requires_grad_(False)
        net.load_state_dict(state, assign=True)
        assert net.block.scale is not frozen
        assert not net.block.scale.requires_grad
        assert net.last.bias.requires_grad
        assert isinstance(net.last.bias, nn.Parameter)
        assert np.shares_memory(net.last.bias._array, state["last.bias"]._array)
        assert net.block.mean.dtype == ddp.float64

    def test_assign_leaves_wrapped_parameters(self) -> None:
        net = nn.Linear(1, 1)
        net.weight._leaf.watcher = object()  # type: ignore[assignment]
        with pytest.raises(StateDictError, match="assign: weight is wrapped"):
            net.load_state_dict(net.state_dict(), assign=True)
        net.load_state_dict(net.state_dict())

    def test_extra_state(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.seen = 0

            def get_extra_state(self) -> Any:
                return {"seen": self.seen}

            def set_extra_state(self, state: Any) -> None:
                self.seen = state["seen"]

        net, other = nn.Sequential(Counts(), nn.ReLU()), nn.Sequential(Counts(), nn.ReLU())
        net[0].seen = 5
        state = net.state_dict()
        assert state == {"0._extra_state": {"seen": 5}}
        assert other.load_state_dict(state) == ([], [])
        assert other[0].seen == 5
        with pytest.raises(StateDictError, match=r"missing: 0\._extra_state; unexpected: 1\._extra_state"):
            other.load_state_dict({"1._extra_state": {"seen": 6}})
        assert other[0].seen == 5

    def test_what_is_no_tensor(self) -> None:
        net = nn.Linear(1, 1)
        with pytest.raises(StateDictError, match="no tensor: weight is a str"):
            net.load_state_dict({"weight": "text", "bias": ddp.ones(1)})

    def test_result_reads_as_in_pytorch(self) -> None:
        net = nn.Linear(1, 1)
        assert repr(net.load_state_dict(net.state_dict())) == "<All keys matched successfully>"
        text = repr(net.load_state_dict({}, strict=False))
        assert text == "Incompatible(missing_keys=['weight', 'bias'], unexpected_keys=[])"


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
            net.train(1)  # type: ignore[arg-type]

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
        net.weight._leaf.watcher = object()  # type: ignore[assignment]
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
        last._leaf.watcher = Watcher()
        arrays = [p._array for p in net.parameters()]
        with pytest.raises(GraphError, match="convert before wrapping"):
            net.double()
        assert all(p._array is array for p, array in zip(net.parameters(), arrays, strict=True))
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


def test_repr() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), nn.Dropout()
    )
    assert repr(net) == (
        "Sequential(\n"
        "  (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)\n"
        "  (1): Sequential(\n"
        "    (0): Flatten(start_dim=1, end_dim=-1)\n"
        "    (1): Linear(in_features=4, out_features=2, bias=True)\n"
        "  )\n"
        "  (2): Dropout(p=0.5, inplace=False)\n"
        ")"
    )


def test_repr_with_parameters_of_its_own() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    def text(nn: Any) -> str:
        class Named(nn.Module):  # type: ignore[misc]
            def __init__(self, head: str, *parts: Any) -> None:
                super().__init__()
                self.head = head
                for i, part in enumerate(parts):
                    self.add_module(f"part{i}", part)

            def extra_repr(self) -> str:
                return self.head

        net = Named("one line", Named("a\nb"), Named("", None, nn.ReLU()), Named("size=3"), Named("x\ny", nn.ReLU()))
        return repr(net)

    assert text(nn) == text(torch.nn)


@pytest.mark.parametrize("given", [np.ones((1, 2), np.float32), [1.0, 2.0], None], ids=["ndarray", "list", "None"])
def test_what_is_no_tensor_is_named(given: Any) -> None:
    for layer in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(DtypeError, match=rf"Linear: expected tensors, got {type(given).__name__}; as_tensor"):
            layer(given)
    with pytest.raises(DtypeError, match="expected tensors" if given is not None else "expected"):
        nn.ReLU()(given)


def test_arrays_alone_are_no_operands() -> None:
    with pytest.raises(DtypeError, match="max_pool2d: expected a tensor, got ndarray"):
        nn.MaxPool2d(2)(np.ones((1, 1, 2, 2)))


def test_attributes_that_are_not_there_are_the_users() -> None:
    class Broken(nn.Module):
        def forward(self, x: Any) -> Any:
            return self.layer(x)

    with pytest.raises(AttributeError, match="'layer'"):
        Broken()(ddp.ones(2))
