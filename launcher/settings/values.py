"""Kinds of values that options take. Each is written in two ways: as a word of a command line, and in TOML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from launcher.hosts import Host

#: The number of ranks that stands for one on each visible GPU.
GPU = "gpu"
#: The time limit that never comes.
OFF = "off"


def _same(value: Any) -> Any:
    return value


class Kind(NamedTuple):
    """One kind of value.

    what: what a value should be, to the user
    read: the value that a word stands for. Raises: ValueError if it stands for none
    accept: the value that what TOML holds stands for. Raises: ValueError
    show: the value as TOML holds it, None if nothing is to be written
    path: a relative one in a job file counts from the folder of the file
    """

    what: str
    read: Callable[[str], Any]
    accept: Callable[[Any], Any]
    show: Callable[[Any], Any] = _same
    path: bool = False


def _only(*types: type) -> Callable[[Any], Any]:
    """Accepts values of these types, and no boolean for a number."""

    def accept(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(value)
        return value

    return accept


_whole, _flag = _only(int), _only(bool)


def _text(value: Any) -> str:
    text: str = _only(str)(value)
    if "\0" in text:  # which ends a path, a name and an argument for the system
        raise ValueError(value)
    return text


def _number(value: Any) -> float:
    number: float = _only(int, float)(value)
    try:
        float(number)
    except OverflowError:  # an integer, which TOML does not limit
        raise ValueError(value) from None
    return number


def _read_count(word: str) -> int | str:
    return GPU if word == GPU else int(word)


def _accept_count(value: Any) -> int | str:
    return GPU if value == GPU else _whole(value)


def _read_limit(word: str) -> float | None:
    return None if word == OFF else float(word) or None


def _accept_limit(value: Any) -> float | None:
    return None if value == OFF else _number(value) or None


def _show_limit(value: float | None) -> float | str:
    return OFF if value is None else value


def _read_ranks(word: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in word.split(","))


def _accept_ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return _read_ranks(value)
    return tuple(_whole(rank) for rank in (value if isinstance(value, list) else [value]))


def _read_hosts(word: str) -> tuple[Host, ...]:
    from launcher.hosts import parse_hosts  # here, because most jobs name none

    return parse_hosts(word)


def _accept_hosts(value: Any) -> tuple[Host, ...]:
    return _read_hosts(",".join(_accept_words(value)) if isinstance(value, list) else _text(value))


def _show_hosts(hosts: tuple[Host, ...]) -> list[str] | None:
    return [f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}" for name, slots in hosts] or None


def _accept_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(value)
    return tuple(_text(word) for word in value)


def _show_list(values: tuple[Any, ...] | None) -> list[Any] | None:
    return list(values) if values else None


def _engine(value: Any) -> str:
    return "mpich" if _text(value) == "intel" else _text(value)


def _refuse(word: str) -> Any:
    raise ValueError(word)


COUNT = Kind(f"a whole number of ranks, or {GPU}", _read_count, _accept_count)
WHOLE = Kind("a whole number", int, _whole)
SECONDS = Kind("a number of seconds", float, _number)
LIMIT = Kind(f"a number of seconds, or {OFF}", _read_limit, _accept_limit, _show_limit)
HOSTS = Kind("hosts, as in a:4,b:4", _read_hosts, _accept_hosts, _show_hosts)
RANKS = Kind("ranks, as in 0,3", _read_ranks, _accept_ranks, _show_list)
FLAG = Kind("true or false", _refuse, _flag)
MODULE = Kind("a module's name", str, _text)
ENGINE = Kind("an engine's name", _engine, _engine)
BACKEND = Kind("a backend's name", str, _text)
SETTING = Kind("KEY=VALUE", str, _text)
FILE = Kind("a path", str, _text, path=True)
FOLDER = Kind("a folder", str, _text, path=True)
WORDS = Kind("a list of strings", _refuse, _accept_words, _show_list)
