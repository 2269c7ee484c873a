"""What all optimizers share: groups, closures, hooks, state dicts, refusals; and that a model learns."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.optim.optimizer import groups_by_name
from tests.ddp.optim.wide_state import WideState, kinds

ALL = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Lion", "NAdam", "RAdam"]


def leaf(*shape: int) -> Any:
    return ddp.ones(*shape, requires_grad=True)


@pytest.mark.parametrize("name", [name for name in ALL if name != "Lion"])  # which PyTorch has not
def test_arguments_are_pytorchs(name: str, torch: Any) -> None:
    ours = inspect.signature(getattr(ddp.optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_without_a_gradient_is_not_touched(name: str) -> None:
    used, unused = leaf(2), leaf(2)
    memory = used.array
    optimizer = getattr(ddp.optim, name)([used, unused], lr=0.1, weight_decay=0.5)
    used.grad = ddp.full((2,), 3.0)
    optimizer.step()
    assert used.grad.tolist() == [3.0, 3.0]
    used.grad = None
    before = used.tolist()
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() == before != [1.0, 1.0]
    assert used.array is memory
    assert used.version.count == 1
    assert unused.version.count == 0
    assert (unused in optimizer.state) == (name == "Adagrad")


def test_groups() -> None:
    a, b = leaf(1), leaf(1)
    optimizer = ddp.optim.SGD([{"params": [a], "lr": 1.0}, {"params": b}], lr=0.25)
    (a + b).backward()
    optimizer.step()
    assert (a.item(), b.item()) == (0.0, 0.75)
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    assert b.item() == 0.25
    c = leaf(1)
    c.grad = ddp.ones(1)
    optimizer.add_param_group({"params": (p for p in [c]), "lr": 0.125})
    optimizer.step()
    assert c.item() == 0.875
    assert repr(optimizer).startswith("SGD (\nParameter Group 0\n    dampening: 0")


def test_settings_may_be_tensors_of_one_element() -> None:
    p = leaf(1)
    p.grad = ddp.ones(1)
    lr = ddp.tensor(0.5)
    optimizer = ddp.optim.SGD([p], lr=lr)
    optimizer.step()
    lr.fill_(0.25)
    optimizer.step()
    assert p.item() == 0.25


def test_named_parameters() -> None:
    net = ddp.nn.Linear(2, 3)
    optimizer = ddp.optim.Adam(net.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    with pytest.raises(ArgumentError, match="some parameters have names"):
        optimizer.add_param_group({"params": [leaf(1)]})
    with pytest.raises(ArgumentError, match="some parameters have names"):
        ddp.optim.Adam([("a", leaf(1)), leaf(1)])


def test_closure() -> None:
    p = leaf(2)
    optimizer = ddp.optim.SGD([p], lr=0.5)

    def closure() -> Any:
        assert ddp.is_grad_enabled()
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with ddp.no_grad():
        assert optimizer.step(closure).item() == 2.0
        assert not ddp.is_grad_enabled()
    assert p.tolist() == [0.0, 0.0]
    assert optimizer.step() is None


def test_hooks() -> None:
    p = leaf(1)
    p.grad = ddp.ones(1)
    optimizer = ddp.optim.SGD([p], lr=0.5)
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append((o, args, kwargs, p.item())))
    after = optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((o, args, kwargs, p.item())))
    optimizer.step()
    assert seen == [(optimizer, (), {}, 1.0), (optimizer, (), {}, 0.5)]
    before.remove()
    after.remove()
    optimizer.step()
    assert len(seen) == 2
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((lambda: "loss",), {}))
    assert optimizer.step() == "loss"
    optimizer.register_step_pre_hook(lambda o, args, kwargs: 3)
    with pytest.raises(DtypeError, match=r"expected None or \(args, kwargs\), got int"):
        optimizer.step()


def test_a_step_that_extends_another_is_one_step() -> None:
    class Counting(ddp.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = leaf(1)
    p.grad = ddp.ones(1)
    optimizer = Counting([p], lr=0.5)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(p.item()))
    optimizer.step()
    assert seen == [1.0]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert seen == [1.0, 0.5, 0.5]


def saved_and_loaded(state_dict: Any, folder: Path) -> Any:
    ddp.save(state_dict, folder / "state.safetensors")
    return ddp.load(folder / "state.safetensors")


@pytest.mark.parametrize("carry", [lambda state, folder: state, saved_and_loaded], ids=["at once", "by a file"])
@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16, ddp.float16])
def test_state_keeps_its_dtype(dtype: Any, carry: Any, tmp_path: Path) -> None:
    params = [ddp.full((3,), 0.7, dtype=dtype, requires_grad=True) for _ in range(2)]
    first, second = (WideState([p]) for p in params)
    for step in range(4):
        for p in params:
            p.grad = ddp.full((3,), 0.1 + step, dtype=dtype)
        first.step()
        if step < 2:
            with ddp.no_grad():
                params[1].copy_(params[0])
            second.load_state_dict(carry(first.state_dict(), tmp_path))
        else:
            second.step()
        assert kinds(second.state[params[1]]) == kinds(first.state[params[0]])
    assert params[1].tolist() == params[0].tolist()


def test_state_beside_the_parameters_is_copied() -> None:
    first, second = ddp.optim.SGD([leaf(1)]), ddp.optim.SGD([leaf(1)])
    first.state["all"] = {"sum": ddp.zeros(2, dtype=ddp.float64)}
    second.load_state_dict(first.state_dict())
    second.state["all"]["sum"] += 1
    assert (first.state["all"]["sum"].tolist(), second.state["all"]["sum"].dtype) == ([0, 0], ddp.float64)


def test_state_of_pytorch_as_arrays() -> None:
    p, q = leaf(2), leaf(2)
    p.grad, q.grad = ddp.ones(2), ddp.ones(2)
    first, second = ddp.optim.Adam([p]), ddp.optim.Adam([q])
    first.step()
    state = first.state_dict()
    state["state"][0] = {name: value.numpy().copy() for name, value in state["state"][0].items()}
    second.load_state_dict(state)
    with ddp.no_grad():
        q.copy_(p)
    for optimizer in (first, second, first, second):
        optimizer.step()
    assert q.tolist() == p.tolist()
    assert {type(value) for value in second.state[q].values()} == {ddp.Tensor}


@pytest.mark.parametrize(
    ("own", "saved", "order"),
    [
        ([["a", "b"], []], [["a", "b"], []], [(0, [0, 1]), (1, [])]),
        ([["b", "a"], ["c"]], [["c"], ["module.a", "module.b"]], [(1, [1, 0]), (0, [0])]),
        ([["net.module.b", "net.module.a"]], [["net.a", "net.b"]], [(0, [1, 0])]),
        ([["w", "w"]], [["w", "w"]], [(0, [0, 1])]),
        ([["w", "w", "b"]], [["w", "b", "w"]], None),
        ([["w", "b"], ["w", "b"]], [["b", "w"], ["b", "w"]], None),
        ([["module.a", "a"]], [["a", "module.a"]], None),
        ([["module.a"], ["b"]], [["a"], ["b"]], [(0, [0]), (1, [0])]),
        ([["a"], ["b"]], [["a", "b"]], None),
        ([["a"]], [["a"], ["b"]], None),
        ([["a"]], [["b"]], None),
    ],
)
def test_parameters_are_matched_by_name(own: Any, saved: Any, order: Any) -> None:
    groups = [{"lr": number, "params": range(len(names)), "param_names": names} for number, names in enumerate(saved)]
    matched = groups_by_name(own, groups)
    assert (matched and [(group["lr"], list(group["params"])) for group in matched]) == order
    assert matched is None or own == saved or [group["param_names"] for group in matched] == own


def test_a_state_dict_in_another_order_is_loaded_by_name() -> None:
    def make(*groups: str) -> tuple[dict[str, Any], Any]:
        params = {name: leaf(2) for names in groups for name in names}
        named = [
            {"params": [(f"net.{name}", params[name]) for name in names], "lr": 0.1 * len(names)} for names in groups
        ]
        return params, ddp.optim.SGD(named, momentum=0.9)

    params, optimizer = make("abc", "d")
    for number, p in enumerate(params.values()):
        p.grad = ddp.full((2,), float(number))
    optimizer.step()
    others, other = make("d", "cab")
    other.load_state_dict(optimizer.state_dict())
    by_name = {name: other.state[p]["momentum_buffer"].tolist() for name, p in others.items()}
    assert by_name == {"d": [3, 3], "c": [2, 2], "a": [0, 0], "b": [1, 1]}
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1 * 3]
    assert [group["param_names"] for group in other.param_groups] == [["net.d"], ["net.c", "net.a", "net.b"]]

    renamed = other.state_dict()
    renamed["param_groups"][0]["param_names"] = ["net.e"]
    with pytest.raises(
        StateDictError, match=r"groups of \[\['net.e'\], .*expected \[\['net.d'\], .*delete 'param_names'"
    ):
        other.load_state_dict(renamed)
    for group in renamed["param_groups"]:
        del group["param_names"]
    others["d"].grad = ddp.zeros(2)
    other.load_state_dict(renamed)  # without names on both sides, by order
    assert other.state[others["c"]]["momentum_buffer"].tolist() == [2, 2]


def test_settings_that_cannot_be_read_change_nothing(torch: Any) -> None:
    optimizer = ddp.optim.SGD([{"params": [leaf(1)]}, {"params": [leaf(1)]}], lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.2
    state["param_groups"][1]["lr"] = torch.ones((), dtype=torch.float8_e4m3fn)
    with pytest.raises(DtypeError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_loading_copies_and_the_step_casts() -> None:
    a = leaf(2)
    b = ddp.ones(2, dtype=ddp.float64, requires_grad=True)
    first, second = ddp.optim.Adam([a], lr=0.1), ddp.optim.Adam([b], lr=9.0)
    a.grad, b.grad = ddp.ones(2), ddp.ones(2, dtype=ddp.float64)
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    assert second.state[b]["exp_avg"].dtype == ddp.float32
    assert second.state[b]["step"].dtype == ddp.float32
    second.step()
    assert second.state[b]["exp_avg"].dtype == ddp.float64
    assert (first.state[a]["step"].item(), second.state[b]["step"].item()) == (1.0, 2.0)
    assert_allclose(first.state[a]["exp_avg"].array, 0.1)


def test_adamw_stays_adamw_after_a_state_dict_of_adam() -> None:
    optimizer = ddp.optim.AdamW([leaf(1)])
    optimizer.load_state_dict(ddp.optim.Adam([leaf(1)]).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"]


WRONG: dict[type[Exception], Any] = {
    ArgumentError: {
        "no parameter": lambda p: ddp.optim.SGD([]),
        "named twice": lambda p: ddp.optim.SGD([p, p]),
        "not a leaf": lambda p: ddp.optim.SGD([p * 2]),
        "SGD: lr is at least 0, got -1": lambda p: ddp.optim.SGD([p], lr=-1),
        "SGD: momentum is at least 0, got None": lambda p: ddp.optim.SGD([p], momentum=None),
        r"of shape \(2,\)": lambda p: ddp.optim.SGD([p], lr=ddp.ones(2)),
        "nesterov": lambda p: ddp.optim.SGD([p], nesterov=True),
        "differentiable": lambda p: ddp.optim.SGD([p], differentiable=True),
        "betas are in": lambda p: ddp.optim.Adam([p], betas=(0.9, 1.0)),
        "Lion: betas are in": lambda p: ddp.optim.Lion([p], betas=(-0.1, 0.9)),
        "rho": lambda p: ddp.optim.Adadelta([p], rho=1.5),
    },
    DtypeError: {
        "a set of parameters has no order": lambda p: ddp.optim.SGD([{"params": {p}}]),
        "not int": lambda p: ddp.optim.SGD([3]),
    },
    StateDictError: {
        r"groups of \[2\] parameters, expected \[1\]": lambda p: ddp.optim.SGD([p]).load_state_dict(
            ddp.optim.SGD([leaf(1), leaf(1)]).state_dict()
        ),
        r"'param_groups', got \['lr'\]": lambda p: ddp.optim.SGD([p]).load_state_dict({"lr": 1}),
        "'param_groups', got None": lambda p: ddp.optim.SGD([p]).load_state_dict(None),
        "as a dict of dicts, got {0: 3}": lambda p: ddp.optim.SGD([p]).load_state_dict(
            {"state": {0: 3}, "param_groups": [{"params": [0]}]}
        ),
        r"a list of 'params', got \[{'lr': 1}\]": lambda p: ddp.optim.SGD([p]).load_state_dict(
            {"state": {}, "param_groups": [{"lr": 1}]}
        ),
        r"a list of 'params', got \[{'params': \[\[0\]\]}\]": lambda p: ddp.optim.SGD([p]).load_state_dict(
            {"state": {}, "param_groups": [{"params": [[0]]}]}
        ),
    },
}


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [(wrong, kind, message) for kind, rows in WRONG.items() for message, wrong in rows.items()],
)
def test_wrong_use(wrong: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        wrong(leaf(1))


def test_zero_grad_empties_or_keeps_zeros() -> None:
    params = [leaf(2), leaf(3)]
    optimizer = ddp.optim.SGD(params, lr=0.1)
    for p in params:
        p.grad = ddp.ones(*p.shape)
    grads = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert not any(g.tolist()[0] for g in grads)
    optimizer.zero_grad(set_to_none=True)
    assert [p.grad for p in params] == [None] * 2
