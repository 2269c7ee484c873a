"""`Optimizer`: parameter groups with their settings, and state beside each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddp._tensor.base import clear_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, StateDictError

Group = dict[str, Any]


class Optimizer:
    """The base of optimizers. params: tensors, or groups {"params": tensors, "lr": ...} with settings of their own.

    Raises: ArgumentError for no parameters, or one named twice; DtypeError for what is no tensor.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[Group], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        groups: list[Any] = list(params)
        if not groups:
            raise ArgumentError(f"{type(self).__name__}: there is no parameter to train")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: Group) -> None:
        """Trains more parameters from now on. Raises: ArgumentError, DtypeError."""
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        seen = {id(p) for group in self.param_groups for p in group["params"]}
        for p in params:
            if not isinstance(p, Tensor):
                raise DtypeError(f"{type(self).__name__}: a parameter is a Tensor, not {type(p).__name__}")
            if not p.is_leaf:
                raise ArgumentError(f"{type(self).__name__}: shape {p.shape} is the result of an op, not a leaf")
            if id(p) in seen:
                raise ArgumentError(f"{type(self).__name__}: a parameter of shape {p.shape} is named twice")
            seen.add(id(p))
        self.param_groups.append({**self.defaults, **param_group, "params": params})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the gradients of all parameters; not `set_to_none`: those that are there become zeros, and stay."""
        for group in self.param_groups:
            for p in group["params"]:
                clear_grad(p, set_to_none)

    def step(self) -> None:
        """Updates the parameters from their gradients; one whose grad is None is not touched. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no step()")

    def state_dict(self) -> dict[str, Any]:
        """{"state": {number: ...}, "param_groups": [...]}: parameters by number, in the order of the groups."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            for p in group["params"]:
                numbers[id(p)] = len(numbers)
            groups.append({**group, "params": [numbers[id(p)] for p in group["params"]]})
        return {"state": {numbers[id(p)]: dict(s) for p, s in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over settings and state; tensors are copied, in the dtype and on the device of their parameter.

        Raises: StateDictError if the groups are not those of this optimizer.
        """
        groups = state_dict["param_groups"]
        sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in self.param_groups]
        if sizes != own:
            raise StateDictError(f"{type(self).__name__}: state dict with groups of {sizes} parameters, expected {own}")
        state: dict[Tensor, dict[str, Any]] = {}
        for group, given in zip(self.param_groups, groups, strict=True):
            for p, number in zip(group["params"], given["params"], strict=True):
                saved = state_dict["state"].get(number)
                if saved is not None:
                    state[p] = {name: _adopted(value, p) for name, value in saved.items()}
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self.state = state

    def __repr__(self) -> str:
        groups = [", ".join(f"{k}={v}" for k, v in group.items() if k != "params") for group in self.param_groups]
        return f"{type(self).__name__}({'; '.join(groups)})"


def _adopted(value: Any, p: Tensor) -> Any:
    """A copy of a state tensor that fits its parameter; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    dtype = p.dtype if value.is_floating_point() else value.dtype
    return value.detach().clone().to(device=p.device, dtype=dtype)
