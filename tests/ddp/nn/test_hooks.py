"""Hooks of modules: what they see, what they replace, and that they can be taken back."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import ArgumentError, DtypeError, ShapeError


class Two(nn.Module):
    """Two inputs, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(ddp.tensor([3.0]))

    def forward(self, x: Any, y: Any, *, sign: int = 1) -> Any:
        return x * self.scale * sign, x * y


class TestForward:
    def test_what_they_see_and_replace(self) -> None:
        net = nn.Identity()
        net.register_forward_pre_hook(lambda module, args: args[0] + 1)
        net.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
        handle = net.register_forward_hook(lambda module, args, out: [args[0].item(), out.item()])
        assert net(ddp.tensor(1.0)) == [20.0, 20.0]
        handle.remove()
        handle.remove()
        assert net(ddp.tensor(1.0)).item() == 20.0

    def test_order(self) -> None:
        seen: list[str] = []
        net = nn.Identity()
        for name, first in (("a", False), ("b", False), ("c", True)):
            net.register_forward_pre_hook(lambda m, args, name=name: seen.append(f"before {name}"), prepend=first)
            net.register_forward_hook(lambda m, args, out, name=name: seen.append(f"after {name}"), prepend=first)
        net(1)
        assert seen == ["before c", "before a", "before b", "after c", "after a", "after b"]

    def test_with_kwargs(self) -> None:
        seen: list[Any] = []
        net = Two()
        net.register_forward_pre_hook(lambda m, args, kwargs: (args, {"sign": -kwargs["sign"]}), with_kwargs=True)
        net.register_forward_hook(lambda m, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
        assert net(ddp.ones(1), ddp.ones(1), sign=1)[0].item() == -3.0
        assert seen == [{"sign": -1}]
        net.register_forward_pre_hook(lambda m, args, kwargs: 5, with_kwargs=True)
        with pytest.raises(DtypeError, match=r"expected None or \(args, kwargs\)"):
            net(ddp.ones(1), ddp.ones(1), sign=1)

    def test_always_call(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: Any) -> Any:
                raise ValueError("inside")

        def breaks(*args: Any) -> Any:
            raise KeyError("later")

        seen: list[Any] = []
        net: Any = Fails()
        net.register_forward_hook(lambda m, args, out: seen.append("never"))
        net.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
        net.register_forward_hook(breaks, always_call=True)
        with pytest.raises(ValueError, match="inside"), pytest.warns(UserWarning, match="later"):
            net(1)
        net = nn.Identity()
        net.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
        net(7)
        assert seen == [None, 7]


def passes(t: Any, edit: Any) -> tuple[list[Any], list[Any]]:
    """What the hooks that `edit(module, log)` registers have seen, and the gradients, for a module of t.nn."""

    class Net(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = t.nn.Parameter(t.tensor([3.0]))

        def forward(self, x: Any, y: Any) -> Any:
            return x * self.scale, x * y

    log: list[Any] = []

    def note(name: str, *grads: Any) -> None:
        log.append((name, *[[None if g is None else g.tolist() for g in grad] for grad in grads]))

    net = Net()
    edit(net, note)
    x = t.tensor([2.0], requires_grad=True)
    a, b = net(x * 1, t.tensor([5.0]))
    (a * 7 + b).sum().backward()
    return log, [x.grad.tolist(), net.scale.grad.tolist()]


BACKWARD = {
    "seen": lambda net, note: net.register_full_backward_hook(lambda m, gi, go: note("full", gi, go)),
    "pre": lambda net, note: net.register_full_backward_pre_hook(lambda m, go: note("pre", go)),
    "replaced": lambda net, note: net.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2, None)),
    "pre replaced": lambda net, note: net.register_full_backward_pre_hook(lambda m, go: (go[0] * 2, go[1])),
    "both": lambda net, note: (
        net.register_full_backward_pre_hook(lambda m, go: (go[0] * 2, go[1])),
        net.register_full_backward_hook(lambda m, gi, go: note("full", gi, go)),
    ),
    "two": lambda net, note: (
        net.register_full_backward_hook(lambda m, gi, go: note("later", gi)),
        net.register_full_backward_hook(lambda m, gi, go: (note("first", gi), (gi[0] * 3, gi[1]))[1], prepend=True),
    ),
}


class TestBackward:
    @pytest.mark.parametrize("edit", BACKWARD.values(), ids=BACKWARD)
    def test_agrees_with_pytorch(self, edit: Any, torch: Any) -> None:
        assert passes(ddp, edit) == passes(torch, edit)

    def test_inputs_that_require_no_grad(self) -> None:
        layer = nn.Linear(2, 3)
        seen: list[Any] = []
        handle = layer.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go[0].tolist())))
        layer(ddp.ones(1, 2)).sum().backward()
        assert seen == [((None,), [[1.0] * 3])]
        handle.remove()
        layer.register_full_backward_hook(lambda m, gi, go: go)
        with pytest.raises(ArgumentError, match="nothing to replace"):
            layer(ddp.ones(1, 2)).sum().backward()

    def test_refusals(self) -> None:
        x = ddp.ones(3, requires_grad=True)
        for result, error, text in (
            ((ddp.ones(2),), ShapeError, r"shape \(2,\) for a tensor of shape \(3,\)"),
            ((1.0,), DtypeError, "expected tensors or None, got float"),
            ((None, None), ArgumentError, "returned 2 gradients, expected 1"),
        ):
            layer = nn.Identity()
            layer.register_full_backward_hook(lambda m, gi, go, result=result: result)
            with pytest.raises(error, match=text):
                layer(x).sum().backward()


class TestState:
    def test_saving(self) -> None:
        seen: list[Any] = []
        net = nn.Sequential(nn.Linear(1, 1))
        net[0].register_state_dict_pre_hook(lambda m, prefix, keep_vars: seen.append((m, prefix, keep_vars)))
        net[0].register_state_dict_post_hook(lambda m, state, prefix, meta: state.pop(f"{prefix}bias"))
        assert list(net.state_dict()) == ["0.weight"]
        assert seen == [(net[0], "0.", False)]

    def test_loading(self) -> None:
        net = nn.Sequential(nn.Linear(1, 1))

        def rename(m: Any, state: Any, prefix: str, *rest: Any) -> None:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

        net[0].register_load_state_dict_pre_hook(rename)
        given = {"0.old": ddp.full((1, 1), 4.0), "0.bias": ddp.zeros(1)}
        assert repr(net.load_state_dict(given)) == "<All keys matched successfully>"
        assert net[0].weight.item() == 4.0
        assert list(given) == ["0.old", "0.bias"]

    def test_a_hook_may_forgive(self) -> None:
        net = nn.Linear(1, 1)
        net.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())
        net.load_state_dict({"weight": ddp.full((1, 1), 4.0)})
        assert_array_equal(net.weight.detach().numpy(), [[4.0]])
        with pytest.raises(ddp.errors.StateDictError, match="unexpected: other"):
            net.load_state_dict({"other": ddp.ones(1)})
