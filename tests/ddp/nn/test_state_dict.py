"""State dicts: what is in them, and what loading one refuses before it changes anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import StateDictError
from tests.ddp.nn.networks import Block, Net


class TestState:
    def test_values_share_memory(self) -> None:
        net = Net()
        state = net.state_dict()
        assert "block.cache" not in state
        assert "block.count" in state
        assert not state["tied"].requires_grad
        assert np.shares_memory(state["tied"].array, net.last.weight.array)

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

    def test_keys_are_paths(self) -> None:
        with pytest.raises(StateDictError, match=r"into Net: expected paths as keys, got \[3\]"):
            Net().load_state_dict({3: ddp.ones(1)}, strict=False)

    def test_not_strict(self) -> None:
        net = Block()
        result = net.load_state_dict({"scale": ddp.full((3,), 2.0), "extra": ddp.ones(1)}, strict=False)
        missing = ["mean", "count", "first.weight", "first.bias"]
        assert repr(result) == f"IncompatibleKeys(missing_keys={missing}, unexpected_keys=['extra'])"
        assert net.scale.tolist() == [2.0] * 3

    def test_agrees_with_pytorch_on_order_and_prefix(self, torch: Any) -> None:
        def made(nn: Any) -> Any:
            return nn.Sequential(nn.Linear(1, 2), nn.ModuleDict({"a": nn.BatchNorm1d(2)}), nn.ParameterList())

        ours = made(nn).state_dict(prefix="m.")
        theirs = made(torch.nn).state_dict(prefix="m.")
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
        assert np.shares_memory(net.last.bias.array, state["last.bias"].array)
        assert net.block.mean.dtype == ddp.float64

    def test_assign_leaves_wrapped_parameters(self) -> None:
        net = nn.Linear(1, 1)
        net.weight.leaf.ready_hook = object()
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

        net = nn.Sequential(Counts(), nn.ReLU())
        other = nn.Sequential(Counts(), nn.ReLU())
        net[0].seen = 5
        state = net.state_dict()
        assert state == {"0._extra_state": {"seen": 5}}
        assert other.load_state_dict(state) == ([], [])
        assert other[0].seen == 5
        with pytest.raises(StateDictError, match=r"missing: 0\._extra_state; unexpected: 1\._extra_state"):
            other.load_state_dict({"1._extra_state": {"seen": 6}})
        assert other[0].seen == 5

    @pytest.mark.parametrize("case", ["computes", "takes all", "complains"])
    def test_an_overridden_load_is_that_of_pytorch(self, case: str, torch: Any) -> None:
        def outcome(t: Any) -> Any:
            class Scaled(t.nn.Linear):  # type: ignore[misc,name-defined]  # of two libraries
                def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
                    seen.append((prefix, sorted(state_dict)))
                    if case == "takes all":
                        with t.no_grad():
                            self.weight.copy_(state_dict[prefix + "w"])
                        return
                    state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
                    super()._load_from_state_dict(state_dict, prefix, *rest)
                    if case == "computes":
                        self.weight.data.mul_(2)
                    if case == "complains":
                        rest[-1].append("wrong units")

            seen: list[Any] = []
            net = t.nn.Sequential(t.nn.Linear(1, 1), t.nn.Sequential(Scaled(2, 1, bias=False)))
            state = {key: value.clone() for key, value in net.state_dict().items() if not key.startswith("1")}
            state["1.0.w"] = t.tensor([[2.0, 3.0]])
            try:
                result = tuple(net.load_state_dict(state))
            except (RuntimeError, StateDictError) as error:
                result = ("wrong units" in str(error),)
            return net[1][0].weight.tolist(), result, seen

        assert outcome(ddp) == outcome(torch)

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("keep_vars", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
    def test_tensors_of_pytorch(self, assign: bool, keep_vars: bool, dtype: str, torch: Any) -> None:
        def made(nn: Any) -> Any:
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

        ours = made(nn)
        theirs = made(torch.nn).to(getattr(torch, dtype))
        assert ours.load_state_dict(theirs.state_dict(keep_vars=keep_vars), assign=assign) == ([], [])
        assert theirs[0].weight.untyped_storage().resizable()  # not after its numpy(), and FSDP needs that
        for name, expected in theirs.state_dict().items():
            actual = ours.state_dict()[name]
            assert_array_equal(actual.double().numpy(), expected.double().numpy(), err_msg=name)
            if assign:
                assert str(actual.dtype) == str(expected.dtype).removeprefix("torch.")

    @pytest.mark.parametrize(("value", "kind"), [("text", "str"), ("sparse", "Tensor")])
    def test_what_is_no_tensor(self, value: Any, kind: str, torch: Any) -> None:
        net = nn.Linear(2, 2)
        before = net.bias.tolist()
        weight = torch.eye(2).to_sparse() if value == "sparse" else value
        with pytest.raises(StateDictError, match=f"no tensor: weight is a {kind} in the state dict"):
            net.load_state_dict({"weight": weight, "bias": torch.ones(2)})
        assert net.bias.tolist() == before
