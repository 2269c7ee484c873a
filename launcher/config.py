"""Job files and `--set`: the layers from which a job is made. Later layers win: job file, `--set`, command line.

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

import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from launcher.arguments import nearest
from launcher.errors import UsageError
from launcher.job import Job
from launcher.options import GPU, KEYS


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


# To say one of these is to take back what an earlier layer says of the other.
_RIVALS = (("script", "module"), ("hosts", "hostfile"))


class Layer(NamedTuple):
    """What one place says of a job.

    launch: keys of [launch] and their values, as the fields of a `Job` have them; no `args`
    args: [args], as TOML has it
    words: what else the script is to find in `sys.argv`, after [args]
    """

    launch: dict[str, Any]
    args: dict[str, Any]
    words: tuple[str, ...] = ()

    def over(self, lower: Layer) -> Layer:
        """This one, with what `lower` says of things of which it says nothing; words add up."""
        hidden = {name for pair in _RIVALS for name in pair if any(one in self.launch for one in pair)}
        left = {key: value for key, value in lower.launch.items() if key not in hidden}
        return Layer(left | self.launch, lower.args | self.args, lower.words + self.words)

    def job(self) -> Job:
        """The job that is said. Raises: UsageError if there can be no such job: no such script, no GPU to count, ..."""
        fields = dict(self.launch)
        if path := fields.pop("hostfile", None):
            if "hosts" in fields:
                raise UsageError(f"give hosts or a hostfile, not both: {path}")
            from launcher.network import read_hostfile

            fields["hosts"] = read_hostfile(path)
        if fields.get("n") == GPU:
            if fields.get("hosts"):
                text = "give every host its number of ranks, as in --hosts a:8,b:8"
                raise UsageError(f"-n gpu counts the GPUs of this machine, not those of hosts: {text}")
            from launcher.placement import count_gpus

            fields["n"] = count_gpus()
        return Job(**fields, args=(*words(self.args), *self.words))


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
        if any("\0" in word for word in found):
            raise UsageError(f"{key!r} in [args] has a zero byte, which no argument of a program can have")
    return tuple(found)


def word(value: object) -> str:
    """A string, number or boolean as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# An integer of thousands of digits is a ValueError of Python's own, and what is nested too deep ends the recursion.
_NOT_TOML = (ValueError, RecursionError)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def tomllib() -> Any:
    """Python's TOML parser, imported when there is some TOML: it takes milliseconds."""
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def read_toml(path: str, what: str) -> dict[str, Any]:
    """What the TOML file at `path` holds; `what` it is to the user. Raises: UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib().load(file)
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
        found = tomllib().loads(f"value = {text}")
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
