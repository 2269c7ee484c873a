"""A job in a TOML file: the same words as on the command line, kept beside the code they belong to.

[launch]
n = 2
script = "train.py"    # from the folder of this file
grace = 5.0
trace = "trace"        # a folder, from the folder of this file

[args]                 # handed to the script
lr = 0.1               # --lr 0.1
layers = [64, 10]      # --layers 64 10
verbose = true         # --verbose; false: nothing
"""

from __future__ import annotations

import os
import sys
from typing import Any

from launcher.cli import nearest
from launcher.job import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]  # not installed where it is not needed

_LAUNCH: dict[str, tuple[tuple[type, ...], str]] = {
    "n": ((int,), "a whole number"),
    "script": ((str,), "a path"),
    "module": ((str,), "a module's name"),
    "grace": ((int, float), "a number of seconds"),
    "trace": ((str,), "a folder"),
}
_PATHS = ("script", "trace")


def load(path: str) -> dict[str, object]:
    """The fields of a `Job` that the file at `path` sets; `args` is always among them.

    Raises: UsageError, with the file and what is wrong in it.
    """
    found = read_toml(path, "the job file")
    try:
        return settings(found, os.path.dirname(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def read_toml(path: str, what: str) -> dict[str, Any]:
    """What the TOML file at `path` holds; `what` it is to the user. Raises: UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None


def settings(document: dict[str, Any], folder: str) -> dict[str, object]:
    """The fields of a `Job` that a parsed file sets.

    folder: where the file lies; the script's path counts from there
    Raises: UsageError for an unknown key or a value of the wrong kind.
    """
    _known(document, ("launch", "args"), "table")
    launch, args = document.get("launch", {}), document.get("args", {})
    for name, table in (("launch", launch), ("args", args)):
        if not isinstance(table, dict):
            raise UsageError(f"{name} should be a table: [{name}]")
    _known(launch, tuple(_LAUNCH), "key in [launch]:")
    found: dict[str, object] = {"args": words(args)}
    for key, value in launch.items():
        kinds, what = _LAUNCH[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UsageError(f"{key} should be {what}, not {value!r}")
        found[key] = os.path.join(folder, str(value)) if key in _PATHS and value else value
    return found


def words(args: dict[str, Any]) -> tuple[str, ...]:
    """The command-line arguments that an [args] table stands for.

    >>> words({"lr": 0.1, "layers": [64, 10], "fast": True, "slow": False})
    ('--lr', '0.1', '--layers', '64', '10', '--fast')
    Raises: UsageError for a value that is no string, number, boolean or list of these.
    """
    found: list[str] = []
    for key, value in args.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict | list) for one in values):
            raise UsageError(f"{key} in [args] should be a string, a number, a boolean or a list of these")
        if value is not False:
            found += [f"--{key}", *(word(one) for one in values if value is not True)]
    return tuple(found)


def word(value: object) -> str:
    """A string, number or boolean as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _known(table: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    for key in table:
        if key not in names:
            raise UsageError(f"unknown {what} {key}{nearest(key, names)}")
