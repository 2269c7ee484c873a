"""Job files, and `--set`, which changes one key of them.

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
from collections.abc import Iterable, Sequence
from typing import Any

from launcher.job import Job, UsageError
from launcher.settings.layers import Layer, words
from launcher.settings.options import KEYS, nearest
from launcher.settings.toml import line, read_toml, value_of


def load(path: str) -> Layer:
    """What the job file at `path` says. Raises: UsageError, with the file and what is wrong in it."""
    found = read_toml(path, "the job file")
    try:
        return layer(found, os.path.dirname(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def layer(document: dict[str, Any], folder: str) -> Layer:
    """What a parsed file says.

    folder: where the file lies; the paths in [launch] count from there
    Raises: UsageError for an unknown key or a value of the wrong kind.
    """
    _known(document, ("launch", "args"), "table")
    launch, args = document.get("launch", {}), document.get("args", {})
    for name, table in (("launch", launch), ("args", args)):
        if not isinstance(table, dict):
            raise UsageError(f"{name} should be a table: [{name}]")
    _known(launch, KEYS, "key in [launch]:")
    words(args)
    found = {key: _value(key, value, folder) for key, value in launch.items()}
    return Layer(found, args, found.pop("args", ()))


def changes(assignments: Sequence[str]) -> Layer:
    """What `--set KEY=VALUE`, given so often, says: `n=4` is `launch.n=4`, and `args.lr=0.1` is for the script.

    Raises: UsageError for an unknown key, a value of the wrong kind, and what is no assignment.
    """
    document: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        table, dot, key = name.strip().partition(".")
        if not dot:
            table, key = "launch", table
        if not equals or not key:
            raise UsageError(f"--set should be KEY=VALUE, as in n=4 or args.lr=0.1, not {assignment!r}")
        document.setdefault(table, {})[key] = value_of(text.strip())
    try:
        return layer(document, "")
    except UsageError as error:
        raise UsageError(f"--set: {error}") from None


def show(job: Job, said: Layer) -> str:
    """The job as it would run, as a job file: loading it gives the same job, wherever it lies.

    said: what the job was made of
    Raises: UsageError if TOML cannot hold it.
    """
    launch = []
    for key, kind in KEYS.items():
        value = kind.show(getattr(job, key, None)) if key != "args" else kind.show(said.words)
        if value is not None:
            launch.append(line(key, os.path.abspath(value) if kind.path else value))
    args = [line(key, value) for key, value in said.args.items()]
    return "".join(("[launch]\n", *launch, *(("\n[args]\n", *args) if args else ())))


def _value(key: str, value: object, folder: str) -> Any:
    kind = KEYS[key]
    try:
        found = kind.accept(value)
    except ValueError:
        raise UsageError(f"{key} should be {kind.what}, not {value!r}") from None
    return os.path.join(folder, found) if kind.path and found else found


def _known(table: dict[str, Any], names: Iterable[str], what: str) -> None:
    for key in table:
        if key not in names:
            raise UsageError(f"unknown {what} {key}{nearest(key, names)}")
