"""Which hosts a job runs on, and how many ranks each has room for: `a:4,b:4` on the command line, or a file.

Files come in two customs, MPICH's (`host:4`) and Open MPI's (`host slots=4`); both are read, in one file if need be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launcher.job import UsageError

_FORMS = "host, host:4, [::1]:4 or host slots=4"
# A name goes to a remote shell: what would be an option, or two words, there is no host. IPv6 stands in brackets.
_HOST = re.compile(
    r"""(?: (?P<name> [A-Za-z0-9_] [\w.\-]* ) | \[ (?P<address> [0-9A-Fa-f:.]+ (?: %[\w.\-]+ )? ) \] )
        (?: : (?P<slots> \d{1,9} ) )?""",
    re.VERBOSE | re.ASCII,
)
_SLOTS = re.compile(r"slots\s*=\s*(\d{1,9})", re.ASCII)


class Host(NamedTuple):
    """A machine that ranks run on.

    name: as the remote shell is to be given it; an IPv6 address without brackets
    slots: how many ranks it has room for
    """

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of a list as `--hosts` takes it. A host without a number has one slot; one named twice has the sum.

    >>> parse_hosts("a:4,b,a:2")
    (Host(name='a', slots=6), Host(name='b', slots=1))
    Raises: UsageError
    """
    return _summed(_host(word.strip(), "--hosts") for word in text.split(","))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file. Raises: UsageError if it cannot be read, names none, or has a line that makes no sense."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror}") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a file's text: one a line, `#` begins a comment, and the rule for slots is that of `parse_hosts`.

    >>> parse_hostfile("a slots=4  # the large one", "hosts.txt")
    (Host(name='a', slots=4),)
    path: for messages
    Raises: UsageError with the line's number.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if words:
            found.append(_line(words, f"{path}, line {number}"))
    if not found:
        raise UsageError(f"the hostfile {path} names no host")
    return _summed(found)


def dealt(n: int, hosts: Sequence[Host]) -> list[Host]:
    """`n` ranks on hosts that are filled one after the other; those that get none are left out.

    >>> dealt(5, [Host("a", 4), Host("b", 4), Host("c", 4)])
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    found = []
    for host in hosts:
        if n > 0:
            found.append(Host(host.name, min(n, host.slots)))
            n -= host.slots
    return found


def refuse_addresses(program: str, hosts: Iterable[Host]) -> None:
    """For a program that takes a colon for the end of a name. Raises: UsageError for an IPv6 address."""
    for host in hosts:
        if ":" in host.name:
            raise UsageError(f"{program} takes no IPv6 address ({host.name}): give the host a name")


def _line(words: str, where: str) -> Host:
    name, *rest = words.split(maxsplit=1)
    host = _host(name, where, words)
    if not rest:
        return host
    slots = _SLOTS.fullmatch(rest[0])
    if slots is None or _HOST.fullmatch(name)["slots"]:  # type: ignore[index]  # `_host` has seen that it matches
        raise UsageError(f"{where}: {words!r} is not understood: {_FORMS}")
    return _with_room(Host(host.name, int(slots[1])), where)


def _host(word: str, where: str, whole: str = "") -> Host:
    match = _HOST.fullmatch(word)
    if match is None:
        raise UsageError(f"{where}: {whole or word!r} is not understood: {_FORMS}")
    return _with_room(Host(match["name"] or match["address"], int(match["slots"] or 1)), where)


def _with_room(host: Host, where: str) -> Host:
    if host.slots < 1:
        raise UsageError(f"{where}: {host.name} has no slot: leave it out")
    return host


def _summed(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in slots.items())
