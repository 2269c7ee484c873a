"""The words of `ddp-bench`'s command line, and the keys of its config files, which are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from launcher.bench.kinds import KINDS
from launcher.bench.settings import BACKENDS, OPS, RIVALS, Settings, parse_size
from launcher.job import UsageError
from launcher.settings.layers import word
from launcher.settings.options import nearest
from launcher.settings.toml import read_toml

HELP = f"""\
usage: ddp-bench COLLECTIVE... [OPTIONS]        ddp-bench --config FILE [OPTIONS]

Measures collectives for a range of sizes, on ranks of its own or on those of the launcher that started it.
COLLECTIVE: all, or {", ".join([*KINDS][:5])},
            {", ".join([*KINDS][5:])}

  -n, --ranks N         number of ranks (2)
  -b, --minbytes SIZE   smallest size (8); K, M and G are powers of 1024
  -e, --maxbytes SIZE   largest size (32M)
  -f, --stepfactor F    each size is F times the last (2), or
  -i, --stepbytes SIZE  larger by SIZE
  -d, --dtype A,B       float32, bfloat16, int8, ... (float32)
  -o, --op OP           {", ".join(OPS)} (sum)
  --place P             both, out (of place) or in (place) (both)
  --backend A,B         {", ".join(BACKENDS)} (auto); several are measured in turn
  --vs A,B              rivals, in the same job on the same ranks: {", ".join(RIVALS)}
  --empty               ours a second time, on arrays of comm.empty
  --check               compare every element with what it must be; exit code 1 if any is wrong
  --iters N             calls measured for each size, instead of --budget
  --budget S            seconds for each size, contestant and place (0.1)
  --warmup N            calls before that (5)
  --json FILE           settings, machine, versions and results
  --plot FILE.png       bandwidth against size
  --config FILE         these options in TOML, without dashes: maxbytes = "128M"; the command line wins
  --version, --help

Exit code: 0; 1 if an element was wrong; 2 for wrong use; 130 after Ctrl-C; else that of the first rank that failed.
"""


class Option(NamedTuple):
    """One option. parse: its value from the text; what: what that text should be."""

    parse: Callable[[str], Any]
    what: str = ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


_COUNT = Option(int, "a whole number")
_SIZE = Option(parse_size, "a number of bytes, as 512, 64K, 128M or 1G")
_NAMES = Option(_names)
_TEXT = Option(str)
_VALUED = {
    "ranks": _COUNT,
    "minbytes": _SIZE,
    "maxbytes": _SIZE,
    "stepfactor": _COUNT,
    "stepbytes": _SIZE,
    "dtype": _NAMES,
    "op": _TEXT,
    "place": _TEXT,
    "backend": _NAMES,
    "vs": _NAMES,
    "iters": _COUNT,
    "budget": Option(float, "a number of seconds"),
    "warmup": _COUNT,
    "json": _TEXT,
    "plot": _TEXT,
}
_FLAGS = ("check", "empty")
_SHORT = {
    "-n": "ranks",
    "-b": "minbytes",
    "-e": "maxbytes",
    "-f": "stepfactor",
    "-i": "stepbytes",
    "-d": "dtype",
    "-o": "op",
}
_OPTIONS = (*(f"--{name}" for name in (*_VALUED, *_FLAGS, "config")), *_SHORT)


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line asks for, with the config file that it names.

    Raises: UsageError, in one sentence.
    """
    fields = _fields(argv)
    if (path := fields.pop("config", None)) is not None:
        fields = {**load(path), **fields}
    if "maxbytes" not in fields and "minbytes" in fields:
        fields["maxbytes"] = max(fields["minbytes"], Settings.maxbytes)
    return Settings(**{"collectives": (), **fields})


def load(path: str) -> dict[str, Any]:
    """The fields of `Settings` that a TOML file sets. Raises: UsageError, with the file and what is wrong in it."""
    found = read_toml(path, "the settings file")
    try:
        return _fields(words(found))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def words(table: dict[str, Any]) -> list[str]:
    """The command line that a file's keys stand for.

    >>> words({"collective": "all_reduce", "maxbytes": "1M", "check": True, "vs": ["mpi4py", "torch-gloo"]})
    ['all_reduce', '--maxbytes=1M', '--check', '--vs=mpi4py,torch-gloo']
    Raises: UsageError for an unknown key, or a value that is no option's.
    """
    found = []
    known = ("collective", *_VALUED, *_FLAGS)
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"unknown key {key}{nearest(key, known)}")
        if key in _FLAGS:
            if not isinstance(value, bool):
                raise UsageError(f"{key} should be true or false, not {value!r}")
            found += [f"--{key}"] * value
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
            raise UsageError(f"{key} should be a string, a number or a list of these, not {value!r}")
        found += [word(each) for each in values] if key == "collective" else [f"--{key}={','.join(map(word, values))}"]
    return found


def _fields(argv: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    collectives: list[str] = []
    waiting = list(argv)
    while waiting:
        text = waiting.pop(0)
        if not text.startswith("-"):
            collectives += KINDS if text == "all" else _names(text)
            continue
        option, attached, value = text.partition("=")
        if option[:2] in _SHORT and len(option) > 2 and option[1] != "-":
            option, attached, value = text[:2], "=", text[2:]
        name = _SHORT.get(option, option[2:])
        if option not in _OPTIONS:
            raise UsageError(f"unknown option {option}{nearest(option, _OPTIONS)}")
        if name in _FLAGS:
            if attached:
                raise UsageError(f"option {option} takes no value")
            fields[name] = True
            continue
        if not attached:
            if not waiting:
                raise UsageError(f"option {option} needs a value")
            value = waiting.pop(0)
        parser = _VALUED.get(name, _TEXT)
        try:
            fields[name] = parser.parse(value)
        except ValueError:
            raise UsageError(f"{option} should be {parser.what}, not {value!r}") from None
    if collectives:
        fields["collectives"] = tuple(dict.fromkeys(collectives))
    return fields
