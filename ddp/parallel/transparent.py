"""The wrapper in state dicts: it is not there. A checkpoint of the wrapped module loads into the bare one, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.nn import Module

_PART = "module."


def keep_names(wrapper: Module) -> None:
    """Has `wrapper`, whose child `module` is all it holds, give and take state under the child's own names.

    Names with the wrapper's part in them, as PyTorch writes them, are taken too.
    """
    wrapper.register_state_dict_post_hook(_shorten)
    wrapper.register_load_state_dict_pre_hook(_lengthen)


def _shorten(wrapper: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    _rename(state, prefix, lambda name: name.removeprefix(_PART))


def _lengthen(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The names of the bare module, unless they are PyTorch's: those fit better with the wrapper's part in front."""
    there = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    bare = set(wrapper.module.state_dict())
    if len(there & {_PART + name for name in bare}) <= len(there & bare):
        _rename(state, prefix, lambda name: _PART + name)


def _rename(state: dict[str, Any], prefix: str, new: Callable[[str], str]) -> None:
    """Renames all that lies under the prefix at once: one's new name may be another's old one."""
    found = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + new(name.removeprefix(prefix)): value for name, value in found.items()})
