"""The wrapper in state dicts: it is not there. A checkpoint of the wrapped module loads into the bare one, and back.

The module keeps its own names because it is the wrapper's nameless child. Left to do: names that PyTorch wrote.
"""

from __future__ import annotations

from typing import Any

from ddp.nn import Module

_PART = "module."


def take_pytorchs_names(wrapper: Module) -> None:
    """Has `wrapper`, whose nameless child `module` is all it holds, load names with the wrapper's part in them too."""
    wrapper.register_load_state_dict_pre_hook(_shorten)


def _shorten(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leaves the wrapper's part out of the names if more of them fit the module with it than without."""
    there = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    bare = set(wrapper.module.state_dict())
    if len(there & {_PART + name for name in bare}) > len(there & bare):
        found = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        for name, value in found.items():
            state[prefix + name.removeprefix(prefix).removeprefix(_PART)] = value
