"""State dicts have PyTorch's names, with `module.` under the wrapper; with or without, they load wrapped and bare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import StateDictError
from ddp.parallel import DataParallel
from tests.ddp.parallel.ranks import assert_same


class Inner(nn.Module):
    """Names that could be taken for the wrapper's: a child `module` beside a parameter of the same name as in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(ddp.randn(2))
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.module.weight = nn.Parameter(ddp.randn(3))
        self.module.module = nn.Linear(1, 1)
        self.register_buffer("module_", ddp.randn(1))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.module(x) * self.weight


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


class Outer(nn.Module):
    """A wrapped module as a part of a larger one; `body_more` begins with the same letters."""

    def __init__(self, make: Callable[[], nn.Module], wrapped: bool) -> None:
        super().__init__()
        self.body = DataParallel(make()) if wrapped else make()
        self.body_more = nn.Linear(1, 1)


def added(state: dict[str, Any], path: str) -> dict[str, Any]:
    """The names of a module under a wrapper at that path."""
    return {name.replace(path, f"{path}module.", 1) if name.startswith(path) else name: state[name] for name in state}


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("make", [sequential, Inner])
def test_either_names_load_wrapped_and_bare(make: Callable[[], nn.Module], inside: bool) -> None:
    path = "body." if inside else ""
    wrapped: nn.Module = Outer(make, True) if inside else DataParallel(make())
    bare, fresh = (Outer(make, False) if inside else make() for _ in range(2))
    assert list(wrapped.state_dict()) == list(added(bare.state_dict(), path))
    assert {name for name, _ in wrapped.named_parameters()} < set(wrapped.state_dict())
    for model in (wrapped, bare):
        for with_prefix in (False, True):
            state = (Outer(make, False) if inside else make()).state_dict()
            model.load_state_dict(added(state, path) if with_prefix else state)
            fresh.load_state_dict(model.state_dict())
            assert list(fresh.state_dict()) == list(state)  # the order too
            assert_same(fresh.state_dict(), state, 0)


def test_what_is_missing_or_too_much_is_named_as_in_the_model() -> None:
    model = DataParallel(sequential())
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    del state["0.bias"]
    state["strange"] = ddp.ones(1)
    state["2.weight"] = ddp.ones(7)
    with pytest.raises(StateDictError) as caught:
        model.load_state_dict(state)
    for part in ("missing: module.0.bias;", "unexpected: module.strange;", "size mismatch: module.2.weight is (7,)"):
        assert part in str(caught.value)
    result = Outer(sequential, True).load_state_dict({"body.0.bias": ddp.ones(2), "last": ddp.ones(1)}, strict=False)
    assert "body.module.2.weight" in result.missing_keys
    assert result.unexpected_keys == ["last"]
    named = nn.Module()
    named.module = nn.Linear(1, 1)  # a name of the user's, and not the wrapper's
    with pytest.raises(StateDictError, match=r"missing: module.bias; unexpected: module.more"):
        named.load_state_dict({"module.weight": ddp.ones(1, 1), "module.more": ddp.ones(1)})
