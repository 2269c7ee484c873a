"""Containers: lists and dicts of modules and of parameters, beside PyTorch's; and the layers that change shapes."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import OrderedDict
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, RangeError, warn_once
from tests.ddp.nn.against_torch import check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")


# What is done to a container of three: `new` is a list of a module, and `box` a container of it.
CHANGES: dict[str, Any] = {
    "as made": lambda x, new, box: x,
    "append": lambda x, new, box: x.append(new[0]),
    "extend": lambda x, new, box: x.extend(new),
    "insert": lambda x, new, box: x.insert(1, new[0]),
    "pop": lambda x, new, box: x.pop(1),
    "slice": lambda x, new, box: x[1:],
    "add": lambda x, new, box: x + box,
    "add in place": lambda x, new, box: operator.iadd(x, box),
    "delete": lambda x, new, box: operator.delitem(x, 1),
    "replace": lambda x, new, box: operator.setitem(x, -1, new[0]),
}
MADE: dict[str, Any] = {
    "Sequential by name": lambda nn, t: nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.Tanh()))[0:1],
    "ModuleList folded": lambda nn, t: nn.ModuleList(
        [nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]
    ),
    "ModuleDict": lambda nn, t: nn.ModuleDict(modules={"a": nn.ReLU(), "b": nn.Linear(1, 1)}),
    "ParameterList": lambda nn, t: nn.ParameterList([nn.Parameter(t.ones(2, 3)), t.ones(1)]),
    "ParameterList added to": lambda nn, t: nn.ParameterList([t.ones(2)]).append(t.ones(3)).extend([t.ones(4)]),
    "ParameterDict": lambda nn, t: nn.ParameterDict(parameters={"a": t.ones(2), "b": nn.Parameter(t.ones(3))}),
    "ParameterDict or": lambda nn, t: nn.ParameterDict({"a": t.ones(2)}) | nn.ParameterDict({"b": t.ones(3)}),
    "Unflatten": lambda nn, t: nn.Unflatten(1, (2, 3)),
}


@pytest.mark.parametrize("kind", ["Sequential", "ModuleList"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_read_as_in_pytorch(change: Any, kind: str) -> None:
    def changed(nn: Any) -> str:
        def box(*modules: Any) -> Any:
            return nn.Sequential(*modules) if kind == "Sequential" else nn.ModuleList(modules)

        x = box(nn.Linear(1, 2), nn.ReLU(), nn.Tanh())
        result = change(x, [nn.Sigmoid()], box(nn.Sigmoid()))
        return repr(result if isinstance(result, type(x)) else x)

    assert changed(nn) == changed(torch.nn)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_reads_as_in_pytorch(make: Any) -> None:
    theirs = repr(make(torch.nn, torch)).replace("torch.", "ddp.").replace("FloatTensor", "float32")
    assert repr(make(nn, ddp)) == theirs


def test_state_dict_paths_follow_positions() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    del net[0]
    assert list(net.state_dict()) == ["1.weight", "1.bias"]
    assert list(nn.ParameterList([ddp.ones(1), ddp.ones(1)]).state_dict()) == ["0", "1"]


def test_sequential_runs_in_order() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, -1)), nn.Identity())
    assert net(ddp.ones(3, 2, 2, 2)).shape == (3, 2, 4)
    assert nn.Sequential()(5) == 5


def test_module_dict_is_a_dict() -> None:
    box = nn.ModuleDict({"a": nn.ReLU()})
    box["b"] = nn.Tanh()
    assert "b" in box
    assert (len(box), list(box), list(box.keys())) == (2, ["a", "b"], ["a", "b"])
    assert [type(module).__name__ for module in box.values()] == ["ReLU", "Tanh"]
    assert isinstance(box.pop("a"), nn.ReLU)
    assert dict(box.items()) == {"b": box["b"]}
    del box["b"]
    box.update(modules={"c": nn.ReLU()})
    for name in ("get", "popitem", "setdefault"):  # methods of a dict that PyTorch's does not have
        box[name] = nn.ReLU()
    box.clear()
    assert len(box) == 0
    with pytest.raises(KeyError):
        box["a"]


def test_parameter_dict_is_a_dict() -> None:
    box = nn.ParameterDict()
    box["a"] = ddp.ones(2)
    assert isinstance(box["a"], nn.Parameter)
    assert box.setdefault("a") is box["a"]
    assert isinstance(box.setdefault("b", ddp.ones(1)), nn.Parameter)
    box.update(parameters={"b": box["b"]})
    assert list(reversed(box)) == ["b", "a"]
    assert box.get("x") is None
    assert list(box.copy().keys()) == ["a", "b"]
    assert box.copy()["a"] is box["a"]
    assert [p.shape for p in box.parameters()] == [(2,), (1,)]
    assert box.popitem()[0] == "b"
    box |= nn.ParameterDict({"c": ddp.ones(3)})
    assert box.pop("c").shape == (3,)
    del box["a"]
    assert len(box) == 0
    assert "a" not in box


def test_parameter_list_trains_what_it_holds() -> None:
    box = nn.ParameterList([ddp.ones(1)])
    box[0] = ddp.full((1,), 2.0)
    box += [ddp.ones(1)]
    assert [p.requires_grad for p in box.parameters()] == [True, True]
    (box[-1] * box[0]).sum().backward()
    assert [p.grad.item() for p in box] == [1.0, 2.0]


def test_copies_and_pickles() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.BatchNorm1d(2)}), nn.ParameterList([ddp.ones(1)]))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert repr(other) == repr(net)
        assert other[0].weight is not net[0].weight
        for key, value in net.state_dict().items():
            assert other.state_dict()[key].tolist() == value.tolist()
        assert all(p.requires_grad for p in other.parameters())


REFUSED: dict[type[Exception], Any] = {
    RangeError: {
        "Sequential of 1 entries has no entry 1": lambda: nn.Sequential(nn.ReLU())[1],
        "no entry 0": lambda: nn.ParameterList()[0],
    },
    DtypeError: {
        "expected a Module, got int": lambda: nn.ModuleList([3]),
        "expected a sequence": lambda: nn.ModuleList().extend(nn.ReLU()),
        "got int": lambda: nn.ParameterList([3]),
    },
    ArgumentError: {"'keys' exists already": lambda: nn.ModuleDict({"keys": nn.ReLU()})},
}


def test_refusals() -> None:
    check_refusals(REFUSED)


def test_data_parallel_of_one_process() -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"one device.*ddp\.DataParallel.*ddp-launch"):
        ours = nn.DataParallel(nn.Linear(2, 3), device_ids=[0, 1], output_device=0)
    theirs = torch.nn.DataParallel(torch.nn.Linear(2, 3))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["module.weight", "module.bias"]
    x = ddp.ones(4, 2)
    assert ours(input=x).tolist() == ours.module(x).tolist()
    ours.load_state_dict({f"module.{name}": value for name, value in nn.Linear(2, 3).state_dict().items()})
    assert copy.deepcopy(ours).module.weight.tolist() == ours.module.weight.tolist()
    assert isinstance(ours, ddp.nn.parallel.DataParallel)  # type: ignore[attr-defined]
    assert not isinstance(ours, ddp.nn.parallel.DistributedDataParallel)  # type: ignore[attr-defined]
