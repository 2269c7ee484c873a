"""The user's own state: from what Checkpointer was given into a checkpoint, and back to where it came from.

It is a dict, or an object that has a `state_dict`; a dict may hold such objects, and other dicts that do.
"""

from __future__ import annotations

from typing import Any

from ddp.checkpoint._encoding import JSON, decode
from ddp.errors import CheckpointError

_ABSENT = object()


def told(user: Any) -> Any:
    """The user's state: of objects with a state_dict what that says, in a dict's values too."""
    if hasattr(user, "state_dict"):
        return user.state_dict()
    if isinstance(user, dict):
        return {name: told(value) for name, value in user.items()}
    return user


def lacking(user: Any, saved: JSON) -> list[str]:
    """The objects that take a state, and for which there is none: `["user.ema"]`. saved: what `told` said, encoded"""
    return _lacking(user, _ABSENT if saved is None else saved, "user")  # None: nothing was given when it was saved


def _lacking(user: Any, saved: Any, name: str) -> list[str]:
    if hasattr(user, "load_state_dict"):
        return [name] if saved is _ABSENT else []
    if not isinstance(user, dict):
        return []
    pairs = saved.get("dict", ()) if isinstance(saved, dict) else ()
    there = {decode(key, _no_array): value for key, value in pairs}
    return [each for key, mine in user.items() for each in _lacking(mine, there.get(key, _ABSENT), f"{name}.{key}")]


def _no_array(name: str) -> Any:
    raise CheckpointError(f"the user's state has the array {name} for a key")


def give(user: Any, state: Any) -> None:
    """Puts back what `told` said: objects take it in, all else in a dict is replaced.

    What is not in the state goes, but for objects that take one.
    """
    if hasattr(user, "load_state_dict"):
        user.load_state_dict(state)
    elif isinstance(user, dict) and isinstance(state, dict):
        for name in [name for name in user if name not in state and not _takes(user[name])]:
            del user[name]
        for name, value in state.items():
            if _takes(user.get(name)):
                give(user[name], value)
            else:
                user[name] = value


def _takes(value: Any) -> bool:
    return hasattr(value, "load_state_dict") or (isinstance(value, dict) and any(map(_takes, value.values())))
