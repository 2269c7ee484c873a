"""Job files in TOML.

[launch]
n = 2
script = "train.py"    # relative to the folder of this file
grace = 5.0
trace = "trace"        # a folder; relative to the folder of this file

[args]                 # options that the script gets
lr = 0.1               # --lr 0.1
layers = [64, 10]      # --layers 64 10
verbose = true         # --verbose; false: nothing
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from launcher.arguments import nearest
from launcher.errors import UsageError
from launcher.options import parser

#: Keys whose relative paths are relative to the folder of the job file.
PATHS = ("script", "hostfile", "log_dir", "events", "trace")
# Options of the command line that a job file cannot have.
_NO_OPTIONS = ("config", "version", "help", "resize", "job")


def load(path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Reads a job file. Returns: its options by name, with `script` if the file has it; and the script's arguments.

    Raises: UsageError if the file cannot be read, or has an invalid key or value; the message names the file.
    """
    document = read_toml(path, "the job file")
    try:
        _check_keys(document, ("launch", "args"), "table")
        launch = document.get("launch", {})
        args = document.get("args", {})
        for name, table in (("launch", launch), ("args", args)):
            if not isinstance(table, dict):
                raise UsageError(f"{name} should be a table: [{name}]")
        last_args = launch.pop("args", [])
        if not isinstance(last_args, list) or not all(isinstance(arg, str) and "\0" not in arg for arg in last_args):
            raise UsageError(f"args should be a list of strings, not {last_args!r}")
        actions = {action.dest: action for action in reversed(parser().actions) if action.dest not in _NO_OPTIONS}
        _check_keys(launch, ("script", "args", *actions), "key in [launch]:")
        options = {key: _value(key, actions.get(key), value) for key, value in launch.items()}
        paths = {key: os.path.join(os.path.dirname(path), options[key]) for key in PATHS if options.get(key)}
        return options | paths, (*words(args), *last_args)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _value(key: str, option: argparse.Action | None, value: object) -> Any:
    """The value of a key, parsed as on the command line. The items of a list are first joined by commas."""
    if option is not None and option.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{key} should be true or false, not {value!r}")
        return value
    text = ",".join(map(word, value)) if isinstance(value, list) else word(value)
    if "\0" in text or (key in PATHS and not isinstance(value, str)):
        raise UsageError(f"{key} should be a path, or another text without a zero byte, not {value!r}")
    try:
        return option.type(text) if option is not None and callable(option.type) else text
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{key} {error}") from None


def _check_keys(table: dict[str, Any], names: Iterable[str], what: str) -> None:
    for key in table:
        if key not in names:
            raise UsageError(f"unknown {what} {key}{nearest(key, names)}")


def words(args: dict[str, Any]) -> tuple[str, ...]:
    """The command-line arguments of an [args] table.

    >>> words({"lr": 0.1, "layers": [64, 10], "fast": True, "slow": False})
    ('--lr', '0.1', '--layers', '64', '10', '--fast')

    Raises: UsageError for a table, a list in a list, or a text with a zero byte.
    """
    arguments: list[str] = []
    for key, value in args.items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise UsageError(f"{key} in [args] should be a string, a number, a boolean or a list of these")
        if value is not False:
            arguments += [f"--{key}", *(word(item) for item in items if value is not True)]
        if any("\0" in argument for argument in arguments):
            raise UsageError(f"{key!r} in [args] has a zero byte, which no argument of a program can have")
    return tuple(arguments)


def word(value: object) -> str:
    """A TOML value, neither a table nor a list, as a word of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_toml(path: str, what: str) -> dict[str, Any]:
    """The content of a TOML file. what: its name in messages. Raises: UsageError if it cannot be read or is invalid"""
    tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with open(path, "rb") as file:
            return dict(tomllib.load(file))
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: values are nested too deeply.
        raise UsageError(f"{path} is not valid TOML: {error}") from None
