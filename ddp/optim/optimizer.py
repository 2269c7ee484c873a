"""`Optimizer`: parameter groups with their settings, and the state of each parameter."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ddp._engine import RemovableHandle
from ddp._tensor.base import clear_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import from_foreign
from ddp.errors import ArgumentError, DtypeError, StateDictError

Group = dict[str, Any]
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]
Closure = Callable[[], Any]


class Optimizer:
    """The base of optimizers. A subclass defines `step`, and keeps the state of parameter p in `self.state[p]`.

    params: tensors, (name, tensor) pairs, or groups {"params": tensors, "lr": ...} with settings of their own

    Raises: ArgumentError if there are no parameters, if one is listed twice or is not a leaf, or if only some have
    names; DtypeError if params is one tensor, if a parameter is not a tensor, or if a group's parameters are a set.
    """

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        if isinstance(params, Tensor):
            raise DtypeError(f"{type(self).__name__}: params is one tensor, expected a list of tensors or of groups")
        self.defaults = defaults
        self.param_groups: list[Group] = []
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._prepare()
        groups: list[Any] = list(params)
        if not groups:
            raise ArgumentError(f"{type(self).__name__}: there is no parameter to train")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls.step = _with_hooks(cls.__dict__["step"])  # type: ignore[method-assign]  # the same call, and hooks

    def _prepare(self) -> None:
        """Sets the attributes that are not pickled: hooks, and what learning rate schedules read."""
        self._before: list[Callable[..., Any]] = []
        self._after: list[Callable[..., Any]] = []
        self._stepped = self._stepping = False
        # A copy of the settings that load_state_dict has set, because schedules change the settings. load_state_dict
        # makes it an empty list, the next new schedule fills it, and a step sets it to None.
        self._loaded_settings: list[Group] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, {"params": tensors, ...}, with defaults for missing settings. Raises: as the constructor."""
        optimizer = type(self).__name__
        if not isinstance(param_group, dict):
            raise DtypeError(f"{optimizer}: a parameter group is a dict, not {type(param_group).__name__}")
        given = param_group["params"]
        if isinstance(given, set | frozenset):
            raise DtypeError(f"{optimizer}: a set of parameters has no order, and state goes by order: use a list")
        params = [given] if isinstance(given, Tensor) else list(given)
        names = [p[0] for p in params if isinstance(p, tuple)]
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        is_mixed = any(("param_names" in other) != bool(names) for other in self.param_groups)
        if is_mixed or len(names) not in (0, len(params)):
            raise ArgumentError(f"{optimizer}: some parameters have names, others have not")
        seen = {id(p) for group in self.param_groups for p in group["params"]}
        for p in params:
            if not isinstance(p, Tensor):
                raise DtypeError(f"{optimizer}: a parameter is a Tensor, not {type(p).__name__}")
            if not p.is_leaf:
                raise ArgumentError(f"{optimizer}: shape {p.shape} is the result of an op, not a leaf")
            if id(p) in seen:
                raise ArgumentError(f"{optimizer}: a parameter of shape {p.shape} is named twice")
            seen.add(id(p))
        group = {**param_group, "params": params}
        if names:
            group["param_names"] = names
        for name, value in self.defaults.items():
            group.setdefault(name, value)
        self.param_groups.append(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all parameters to None; with set_to_none=False, sets existing gradients to zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                clear_grad(p, set_to_none)

    def step(self, closure: Closure | None = None) -> Any:
        """Updates the parameters that have a gradient. Subclasses define this method.

        closure: computes the loss and its gradients again, and returns the loss, which `step` then returns
        """
        raise NotImplementedError(f"{type(self).__name__} defines no step()")

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls hook(optimizer, args, kwargs) before each step. The hook may return new (args, kwargs) for it."""
        self._before.append(hook)
        return RemovableHandle(self._before, hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls hook(optimizer, args, kwargs) after each step."""
        self._after.append(hook)
        return RemovableHandle(self._after, hook)

    def state_dict(self) -> dict[str, Any]:
        """{"state": {number: ...}, "param_groups": [...]}. Parameters are numbered in the order of the groups."""
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = {id(p): position for position, p in enumerate(params)}
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]
        state = {numbers[id(p)] if isinstance(p, Tensor) else p: dict(s) for p, s in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads settings, and copies of the state. Tensors keep their dtype, and go to their parameter's device.

        Only "step" stays on its device.

        Parameters are matched by name if this optimizer and the state dict both have "param_names"; the "module" that
        DataParallel adds to names is ignored. Otherwise they are matched by their order.

        state_dict: of this class, or of PyTorch's optimizer of the same name, with PyTorch's tensors or NumPy arrays

        Raises: StateDictError if the groups are not those of this optimizer, or `state_dict` is not the state dict of
        an optimizer; then nothing has changed.
        """
        pairs = list(zip(self.param_groups, self._groups_in_own_order(state_dict), strict=True))
        owners = {key: p for group, saved in pairs for p, key in zip(group["params"], saved["params"], strict=True)}
        state = {
            owners.get(key, key): copy_state(key, saved, owners.get(key)) for key, saved in state_dict["state"].items()
        }
        settings = [
            {name: copy_state(name, value, None) for name, value in saved.items() if name != "params"}
            for _, saved in pairs
        ]
        for group, group_settings in zip(self.param_groups, settings, strict=True):
            group.update(group_settings)
        self.state = defaultdict(dict, state)
        self._loaded_settings = []

    def _groups_in_own_order(self, state_dict: dict[str, Any]) -> list[Group]:
        """Sorts the groups of a state dict, and the parameters in each group, in the order of this optimizer.

        Raises: StateDictError if the parameters' names differ (without names: if the groups' sizes differ), or if
        `state_dict` is not the state dict of an optimizer.
        """
        _check_form(type(self).__name__, state_dict)
        groups = state_dict["param_groups"]
        own = self.param_groups
        named = all("param_names" in group for group in [*own, *groups])
        expected = [group["param_names"] if named else len(group["params"]) for group in own]
        given = [group["param_names"] if named else len(group["params"]) for group in groups]
        matched = list(groups) if given == expected else None
        hint = ""
        if named:
            matched = groups_by_name([group["param_names"] for group in own], groups)
            hint = ". To load it in the order of its parameters, delete 'param_names' from its groups"
        if matched is None:
            raise StateDictError(
                f"{type(self).__name__}: state dict with groups of {given} parameters, expected {expected}{hint}"
            )
        return matched

    def _record_step(self) -> None:
        self._stepped = True
        self._loaded_settings = None

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            lines += ["", f"Parameter Group {number}"] if number else ["Parameter Group 0"]
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name != "params"]
        return "\n".join([*lines, ")"])


def _check_form(optimizer: str, state_dict: Any) -> None:
    """Checks an optimizer's state dict. Raises: StateDictError if an entry is missing or of a wrong type."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        given = list(state_dict) if isinstance(state_dict, Mapping) else state_dict
        raise StateDictError(f"{optimizer}: expected 'state' and 'param_groups', got {given!r:.80}")
    state = state_dict["state"]
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise StateDictError(f"{optimizer}: expected 'state' as a dict of dicts, got {state!r:.80}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise StateDictError(f"{optimizer}: expected groups that are dicts with a list of 'params', got {groups!r:.80}")


def _is_group(value: Any) -> bool:
    params = value.get("params") if isinstance(value, Mapping) else None
    return isinstance(params, list | tuple) and all(isinstance(key, Hashable) for key in params)


def _with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step` to call the optimizer's hooks before and after it."""

    @functools.wraps(step)
    def hooked(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._stepping:  # called by the step of a subclass, whose wrapper calls the hooks
            return step(self, *args, **kwargs)
        for hook in tuple(self._before):
            changed = hook(self, args, kwargs)
            if changed is not None:
                if not (isinstance(changed, tuple) and len(changed) == 2):
                    raise DtypeError(f"step pre-hook: expected None or (args, kwargs), got {type(changed).__name__}")
                args, kwargs = changed
        self._stepping = True
        try:
            result = step(self, *args, **kwargs)
        finally:
            self._stepping = False
        self._record_step()
        for hook in tuple(self._after):
            hook(self, args, kwargs)
        return result

    return hooked


def groups_by_name(own: Sequence[Sequence[str]], groups: Sequence[Group]) -> list[Group] | None:
    """Sorts saved groups, and the parameters in each group, in the order of `own`.

    own: the names of the parameters in each group

    Ignores "module", which DataParallel adds to names. Returns: the sorted groups; None if the groups have other names.
    Names that are not unique must be in the order of `own`, else the result is None, too.
    """
    if own == [group["param_names"] for group in groups]:
        return list(groups)
    known = {frozenset(map(_without_wrappers, group["param_names"])): group for group in groups}
    matched = []
    for names in own:
        bare = [_without_wrappers(name) for name in names]
        group = known.pop(frozenset(bare), None)
        if group is None or not len(set(bare)) == len(bare) == len(group["params"]):
            return None
        params = dict(zip(map(_without_wrappers, group["param_names"]), group["params"], strict=True))
        matched.append({**group, "params": [params[name] for name in bare], "param_names": names})
    return None if known else matched


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "module")


def copy_state(name: Any, value: Any, p: Tensor | None) -> Any:
    """Copies a state or setting, with the tensors and arrays in its lists, tuples and dicts. Dtypes stay.

    p: the parameter: all tensors except "step" are copied to its device; None: tensors stay on their device
    """
    if isinstance(value, dict):
        return {key: copy_state(key, item, p) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_state(name, item, p) for item in value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "detach"):
        return value.copy()  # arrays stay arrays: some optimizers have arrays as state
    value = from_foreign(value)
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied if p is None or name == "step" else copied.to(device=p.device)


def number(value: Any) -> Any:
    """A setting as a Python number. value: a number, or a tensor of one element"""
    return value.item() if isinstance(value, Tensor) else value


def settings_of(optimizer: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The settings among the `locals()` of an optimizer's `__init__`: all but self and params. optimizer: for errors

    Raises: ArgumentError for None, nan or a negative number (not for dampening, foreach and fused), a
    tensor that does not have one element, betas not in [0, 1), or differentiable=True.
    """
    settings = {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}
    if settings.get("differentiable"):
        raise ArgumentError(f"{optimizer}: differentiable=True needs gradients of an update: there are none")
    for name, value in settings.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ArgumentError(
                f"{optimizer}: {name} is a number, or a tensor of one element, not of shape {value.shape}"
            )
        if name == "betas" and not all(0 <= beta < 1 for beta in value):
            raise ArgumentError(f"{optimizer}: betas are in [0, 1), got {value}")
        if name not in ("betas", "dampening", "foreach", "fused") and (value is None or not number(value) >= 0):
            raise ArgumentError(f"{optimizer}: {name} is at least 0, got {value}")
    return settings
