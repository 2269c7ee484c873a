"""TOML in and out: files, single values as they are given in a shell, and lines that are read back as the same."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from launcher.job import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]  # not installed where it is not needed

# An integer of thousands of digits is a ValueError of Python's own, and what is nested too deep ends the recursion.
_NOT_TOML = (ValueError, RecursionError)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: str, what: str) -> dict[str, Any]:
    """What the TOML file at `path` holds; `what` it is to the user. Raises: UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    except _NOT_TOML as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None


def value_of(text: str) -> Any:
    """The TOML value that a text stands for; a text that is none stands for itself.

    >>> [value_of(text) for text in ("4", "[1, 2]", "true", "adam", "'4'", "a#b")]
    [4, [1, 2], True, 'adam', '4', 'a#b']
    """
    if "#" in text and text[:1] not in ("'", '"', "["):
        return text  # not a value with a comment
    try:
        found = tomllib.loads(f"value = {text}")
    except _NOT_TOML:
        return text
    return found["value"] if len(found) == 1 else text


def written(value: Any) -> str:
    """A value as TOML has it. Raises: UsageError for a string that is no Unicode, which TOML cannot hold.

    >>> print(written(["a b", 1e-05, True]))
    ["a b", 1e-05, true]
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(one) for one in value)}]"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"TOML cannot hold {value!r}, which is not valid UTF-8") from None
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, dates and times


def line(key: str, value: Any) -> str:
    """`key = value`, a line of a table."""
    return f"{key if _BARE.fullmatch(key) else written(key)} = {written(value)}\n"
