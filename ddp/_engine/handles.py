"""Handles: what a registration returns, so that it can be taken back."""

from __future__ import annotations

from typing import Any


class RemovableHandle:
    """Takes a hook out of the list it was put into: by `remove()`, or at the end of a `with` block."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        """The hook is called no more; removing it twice changes nothing."""
        for i, hook in enumerate(self._hooks):
            if hook is self._hook:
                del self._hooks[i]
                return

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
