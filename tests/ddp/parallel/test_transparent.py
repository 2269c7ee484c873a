"""The wrapper is not seen in state dicts: what was saved wrapped loads bare, and back, whatever the names are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp import nn
from ddp.errors import StateDictError
from ddp.parallel import DataParallel


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


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in state.items()}


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(mine) == list(theirs)  # the order too
    for name, value in plain(mine).items():
        assert_array_equal(value, plain(theirs)[name], err_msg=name)


class Outer(nn.Module):
    """A wrapped module as a part of a larger one; `body_more` begins with the same letters."""

    def __init__(self, make: Callable[[], nn.Module], wrapped: bool) -> None:
        super().__init__()
        self.body = DataParallel(make()) if wrapped else make()
        self.body_more = nn.Linear(1, 1)


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("make", [sequential, Inner])
def test_wrapped_into_bare_and_back_with_pytorchs_names_too(make: Callable[[], nn.Module], inside: bool) -> None:
    """In another module only the names of the part that is wrapped are PyTorch's with `module.` in them."""
    start = "body." if inside else ""
    wrapped: nn.Module = Outer(make, True) if inside else DataParallel(make())
    bare, fresh, third = (Outer(make, False) if inside else make() for _ in range(3))
    bare.load_state_dict(wrapped.state_dict())
    assert_equal(bare.state_dict(), wrapped.state_dict())
    wrapped.load_state_dict(fresh.state_dict())
    assert_equal(wrapped.state_dict(), fresh.state_dict())
    pytorchs = {
        f"{start}module.{name.removeprefix(start)}" if name.startswith(start) else name: value
        for name, value in third.state_dict().items()
    }
    wrapped.load_state_dict(pytorchs)
    assert_equal(wrapped.state_dict(), third.state_dict())


def test_what_is_missing_or_too_much_is_told_as_by_the_bare_module() -> None:
    model = DataParallel(sequential())
    state = model.state_dict()
    del state["0.bias"]
    state["strange"] = ddp.ones(1)
    state["2.weight"] = ddp.ones(7)
    with pytest.raises(StateDictError) as caught:
        model.load_state_dict(state)
    for part in ("missing: 0.bias;", "unexpected: strange;", "size mismatch: 2.weight is (7,)"):
        assert part in str(caught.value)
    assert "module." not in str(caught.value)
    found = Outer(sequential, True).load_state_dict({"body.0.bias": ddp.ones(2), "last": ddp.ones(1)}, strict=False)
    assert "body.2.weight" in found.missing_keys
    assert found.unexpected_keys == ["last"]
