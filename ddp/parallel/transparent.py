"""The wrapper in state dicts: it is not there. A checkpoint of the wrapped module loads into the bare one, and back."""

from __future__ import annotations

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
    for name in [name for name in state if name.startswith(prefix + _PART)]:
        state[prefix + name[len(prefix + _PART) :]] = state.pop(name)


def _lengthen(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in wrapper.module.state_dict():
        if prefix + name in state:
            state[prefix + _PART + name] = state.pop(prefix + name)
