"""Containers: lists and dicts of modules and of parameters, beside PyTorch's; and the layers that change shapes."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, RangeError, warn_once
from tests.ddp.nn.against_torch import check_refusals, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")


def ran(t: Any, edit: Callable[[Any, Any], Any]) -> str:
    """What `edit(nn, t)` leaves, as text in our words."""
    return repr(edit(t.nn, t)).replace("torch.", "ddp.").replace("FloatTensor", "float32")


def edits() -> dict[str, Callable[[Any, Any], Any]]:
    def listed(kind: str, change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def run(nn: Any, t: Any) -> Any:
            layers = [nn.Linear(1, 2), nn.ReLU(), nn.Tanh()]
            box = nn.Sequential(*layers) if kind == "Sequential" else nn.ModuleList(layers)
            return change(box, nn) or box

        return run

    def deleted(x: Any, nn: Any) -> None:
        del x[1]

    def replaced(x: Any, nn: Any) -> None:
        x[-1] = nn.Sigmoid()

    def added(x: Any, nn: Any) -> Any:
        x += [nn.Sigmoid()] if isinstance(x, nn.ModuleList) else nn.Sequential(nn.Sigmoid())
        return x

    changes = {
        "as made": lambda x, nn: None,
        "append": lambda x, nn: x.append(nn.Sigmoid()),
        "extend": lambda x, nn: x.extend([nn.Sigmoid(), nn.ReLU()]),
        "insert": lambda x, nn: (x.insert(1, nn.Sigmoid()), x)[1],
        "pop": lambda x, nn: (x.pop(1), x)[1],
        "slice": lambda x, nn: x[1:],
        "add": lambda x, nn: x + type(x)(*([[nn.ReLU()]] if isinstance(x, nn.ModuleList) else [nn.ReLU()])),
        "delete": deleted,
        "replace": replaced,
        "add in place": added,
    }
    by_name = {
        f"{kind} {name}": listed(kind, f) for kind in ("Sequential", "ModuleList") for name, f in changes.items()
    }
    return {
        **by_name,
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


EDITS = edits()


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_reads_as_in_pytorch(edit: Callable[[Any, Any], Any]) -> None:
    assert ran(ddp, edit) == ran(torch, edit)


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


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: nn.Sequential(nn.ReLU())[1], RangeError, "Sequential of 1 entries has no entry 1"),
    (lambda: nn.ModuleList([3]), DtypeError, "expected a Module, got int"),
    (lambda: nn.ModuleList().extend(nn.ReLU()), DtypeError, "expected a sequence"),
    (lambda: nn.ModuleDict({"keys": nn.ReLU()}), ArgumentError, "'keys' exists already"),
    (lambda: nn.ParameterList([3]), DtypeError, "got int"),
    (lambda: nn.ParameterList()[0], RangeError, "no entry 0"),
]


def test_refusals() -> None:
    check_refusals(*REFUSED)


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
