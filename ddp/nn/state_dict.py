"""State dicts: a module's parameters and buffers by path.

Loading checks all entries before it copies any; `load_state_dict` names the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import as_tensor, from_foreign
from ddp.errors import DtypeError, StateDictError
from ddp.nn.parameter import Parameter

if TYPE_CHECKING:
    from ddp.nn.module import Module

_EXTRA = "_extra_state"


class IncompatibleKeys(NamedTuple):
    """The module's paths that a state dict lacks, and the state dict's paths that the module lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def describe(self) -> list[str]:
        """Describes the keys, as in `["missing: weight, bias", "unexpected: scale"]`."""
        named = {"missing": self.missing_keys, "unexpected": self.unexpected_keys}
        return [f"{what}: {', '.join(paths)}" for what, paths in named.items() if paths]

    def __repr__(self) -> str:
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return f"IncompatibleKeys(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"


class HasStateDict:
    """The state dict methods of a module."""

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Parameters and persistent buffers by path, as tensors that share their memory and are outside the graph.

        Each module that defines get_extra_state has one more entry, the result of this method.

        destination: a dict to add the entries to; prefix: put before every path; keep_vars: returns the parameters and
        buffers themselves
        """
        module = cast("Module", self)
        result = {} if destination is None else destination
        for (hook,) in module._hooks("state_dict_pre"):
            hook(module, prefix, keep_vars)
        for path, entry in _entries(module, prefix):
            result[path] = entry.tensor if keep_vars else entry.tensor.detach()
        if _overrides(module, "get_extra_state"):
            result[prefix + _EXTRA] = module.get_extra_state()
        for name, child in module._modules.items():
            if child is not None:
                child.state_dict(destination=result, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        for (hook,) in module._hooks("state_dict_post"):
            hook(module, result, prefix, {})
        return result

    @no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copies the tensors of `state_dict` into the module, and returns the missing and the unexpected keys.

        If it raises StateDictError, nothing was copied. This does not hold for modules with load post hooks or with
        their own `_load_from_state_dict`.

        state_dict: by path, tensors of this package or of PyTorch, or arrays. Paths match with or without the `module.`
        of DataParallel, whether or not this module, or a part of it, is wrapped.
        assign: the given tensors become the module's, in their dtype and on their device, instead of being copied. In
        place of a parameter, a plain tensor becomes a new Parameter over its memory.

        Raises: StateDictError for a key that is not a str, and for entries that do not fit. It lists missing and
        unexpected keys (if strict), sizes that differ, values that are not tensors, and with assign the parameters that
        DataParallel has wrapped. DtypeError if state_dict is not a mapping, or if assign would make an integer tensor a
        parameter that requires grad.
        """
        module = cast("Module", self)
        name = type(self).__name__
        if not isinstance(state_dict, Mapping):
            raise DtypeError(f"load_state_dict into {name}: expected a dict, got {type(state_dict).__name__}")
        if not all(isinstance(path, str) for path in state_dict):
            raise StateDictError(f"load_state_dict into {name}: expected paths as keys, got {list(state_dict)!r:.80}")
        keys = IncompatibleKeys([], [])
        problems: list[str] = []
        metadata = getattr(state_dict, "_metadata", None) or {}  # the metadata that PyTorch adds to state dicts
        writes: list[Callable[[], None]] = []

        def load(part: Module, state: dict[str, Any], prefix: str) -> None:
            state = _match_wrapper(part, state, prefix)
            local_metadata = {**metadata.get(prefix[:-1], {}), "assign_to_params_buffers": assign}
            if _overrides(part, "_load_from_state_dict"):  # the override may read loaded tensors, so it loads at once
                part._load_from_state_dict(state, prefix, local_metadata, True, *keys, problems)
            else:
                writes.extend(_plan_writes(part, state, prefix, local_metadata, True, *keys, problems))
            for name, child in part._modules.items():
                if child is not None:
                    below = f"{prefix}{name}."
                    load(child, {path: x for path, x in state.items() if path.startswith(below)}, below)

        load(module, dict(state_dict), "")
        hooked = [part for part in module.modules() if part._hooks("load_state_dict_post")]
        # A post hook may remove keys from the lists. With such hooks, the keys are checked after loading.
        _raise_problems(name, problems, keys if strict and not hooked else None)
        for write in writes:
            write()
        for part in reversed(hooked):
            for (hook,) in part._hooks("load_state_dict_post"):
                hook(part, keys)
        _raise_problems(name, problems, keys if strict else None)
        return keys

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads this module's own part of a state dict, without its children: for subclasses to extend, as in PyTorch.

        state_dict: the entries whose paths begin with `prefix`; may be changed
        missing_keys, unexpected_keys, error_msgs: lists to which problems are added

        A module that overrides this method is loaded at once, even if other modules turn out not to fit.
        """
        before = len(error_msgs)
        lists = missing_keys, unexpected_keys, error_msgs
        writes = _plan_writes(cast("Module", self), state_dict, prefix, local_metadata, strict, *lists)
        if len(error_msgs) == before:
            for write in writes:
                write()

    def get_extra_state(self) -> Any:
        """Returns what the state dict should hold in addition to tensors. Subclasses define it and set_extra_state.

        Raises: NotImplementedError if the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no get_extra_state()")

    def set_extra_state(self, state: Any) -> None:
        """Restores what get_extra_state returned. Raises: NotImplementedError if the subclass does not define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no set_extra_state()")


class _Entry(NamedTuple):
    """A tensor of the state: the dict of parameters or buffers that holds it, and its name there."""

    part: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.part[self.name]

    def load(self, value: Any, assign: bool) -> None:
        """Copies `value` into the tensor. assign: puts `value` in its place, as a Parameter if the tensor is one."""
        own = self.tensor
        if not assign:
            own.copy_(value)
            return
        value = value if isinstance(value, Tensor) else as_tensor(value)
        if isinstance(own, Parameter) and not isinstance(value, Parameter):
            value = Parameter(value, own.requires_grad)
        self.part[self.name] = value


def _entries(module: Module, prefix: str) -> Iterator[tuple[str, _Entry]]:
    """The parameters and persistent buffers of one module, by path."""
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, _Entry(module._parameters, name)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, _Entry(module._buffers, name)


def _match_wrapper(module: Module, state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Adds or drops the "module." of DataParallel after `prefix` in paths of `state`, if more paths fit then.

    state: the entries whose paths begin with the prefix
    """
    wrapped = f"{prefix}module."
    if "module" not in module._modules and not any(path.startswith(wrapped) for path in state):
        return state
    added = {wrapped + path.removeprefix(prefix): value for path, value in state.items()}
    dropped = {prefix + path.removeprefix(wrapped): value for path, value in state.items()}
    own = module.state_dict(prefix=prefix).keys()
    return max(state, added, dropped, key=lambda paths: len(own & paths.keys()))  # if several fit equally, the first


def _overrides(module: Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(HasStateDict, method)


def _plan_writes(
    module: Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *lists: list[str]
) -> list[Callable[[], None]]:
    """The calls that load the module's own part of `state`, without its children.

    prefix: the beginning of the module's paths; strict: whether missing and unexpected paths are listed
    lists: the missing paths, the unexpected paths and the texts of errors, to which this function adds
    """
    missing, unexpected, problems = lists
    for (hook,) in module._hooks("load_state_dict_pre"):
        hook(module, state, prefix, metadata, strict, missing, unexpected, problems)
    assign = bool(metadata.get("assign_to_params_buffers"))
    entries = dict(_entries(module, prefix))
    problems += _mismatches(entries, state, assign)
    loaded = [path for path in entries if path in state]
    writes: list[Callable[[], None]] = [partial(entries[path].load, state[path], assign) for path in loaded]
    wanted = list(entries)
    extra = prefix + _EXTRA
    if _overrides(module, "set_extra_state") and extra in state:
        writes.append(partial(module.set_extra_state, state[extra]))
    if _overrides(module, "get_extra_state"):
        wanted.append(extra)
    if strict:
        missing.extend(path for path in wanted if path not in state)
        own = {path.removeprefix(prefix) for path in entries} | set(module._modules)
        if _overrides(module, "set_extra_state"):
            own.add(_EXTRA)
        for path in state:
            name, dot, _ = path.removeprefix(prefix).partition(".")
            if path.startswith(prefix) and (name not in own or bool(dot) != (name in module._modules)):
                unexpected.append(path)
    return writes


def _mismatches(entries: Mapping[str, _Entry], state: dict[str, Any], assign: bool) -> Iterator[str]:
    """Yields a text for each entry that does not fit. Converts tensors of other libraries in `state`."""
    for path, entry in entries.items():
        if path not in state:
            continue
        try:
            state[path] = from_foreign(state[path])
        except Exception as error:  # raised by the other library
            yield f"no tensor: {path} is a {type(state[path]).__name__} in the state dict: {error}"
            continue
        value = state[path]
        shape = entry.tensor.shape
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            yield f"no tensor: {path} is a {type(value).__name__} in the state dict"
        elif tuple(value.shape) != tuple(shape):
            yield f"size mismatch: {path} is {tuple(value.shape)} in the state dict, {tuple(shape)} in the module"
        elif (
            assign and entry.tensor.accumulate_grad is not None and entry.tensor.accumulate_grad.ready_hook is not None
        ):
            yield f"assign: {path} is wrapped, as under DataParallel; load before wrapping, or without assign"


def _raise_problems(module_name: str, problems: list[str], keys: IncompatibleKeys | None) -> None:
    texts = problems if keys is None else keys.describe() + problems
    if texts:
        raise StateDictError(f"load_state_dict into {module_name}: " + "; ".join(texts))
