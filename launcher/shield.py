"""Arguments that pass through an engine unharmed; apart from `launcher.engines`, so that a keeper loads only this."""

from __future__ import annotations

from collections.abc import Sequence


def shield(args: Sequence[str]) -> list[str]:
    """The same arguments, safe to pass through an engine: a lone colon would begin a second program.

    >>> shield(["a:b", ":", "::"])
    ['a:b', '::', ':::']
    """
    return [arg + ":" if arg and not arg.strip(":") else arg for arg in args]


def unshield(args: Sequence[str]) -> list[str]:
    """Undoes `shield`."""
    return [arg[:-1] if arg and not arg.strip(":") else arg for arg in args]
