"""Hosts of a job, and the addresses by which they reach each other.

Hosts come from `--hosts a:4,b:4` or from a file in the syntax of MPICH (`host:4`) or Open MPI (`host slots=4`).
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.errors import UsageError

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


def fill_hosts(n: int, hosts: Sequence[Host]) -> list[Host]:
    """`n` ranks on hosts that are filled one after the other; those that get none are left out.

    >>> fill_hosts(5, [Host("a", 4), Host("b", 4), Host("c", 4)])
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    found = []
    for host in hosts:
        if n > 0:
            found.append(Host(host.name, min(n, host.slots)))
            n -= host.slots
    return found


def ranks_by_host(hosts: Sequence[Host], n: int) -> Iterator[tuple[Host, range]]:
    """Ranks fill the hosts in order."""
    first = 0
    for host in hosts:
        yield host, range(first, min(first + host.slots, n))
        first += host.slots


def ranks_on(hosts: Sequence[Host], n: int, name: str | None) -> frozenset[int]:
    """The ranks of the host of that name, of a job of `n`.

    >>> sorted(ranks_on([Host("a", 2), Host("b", 2)], 3, "b"))
    [2]
    """
    return frozenset(rank for host, ranks in ranks_by_host(hosts, n) if host.name == name for rank in ranks)


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


_SIOCGIFADDR = 0x8915
_DISCARD = 9  # a port; nothing is sent there


def addresses(hosts: Iterable[str]) -> list[str]:
    """Addresses of this machine: first that from which it would speak to the first of `hosts`, then its others.

    "127.0.0.1" alone if it has no network.
    """
    towards = next((ours for host in hosts for ours, _ in _routes(host)), None)
    found = [towards] if towards is not None else []
    found += [each for each in _interfaces() if each not in found]
    return found or ["127.0.0.1"]


def is_here(host: str) -> bool:
    """True if `host` is this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    return any(ours == theirs or theirs.startswith("127.") for ours, theirs in _routes(host))


def _routes(host: str) -> Iterator[tuple[str, str]]:
    """Our address and theirs, for each way to a host; none if its name means nothing here (ssh may know more)."""
    try:
        ways = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, theirs in ways:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.connect(theirs)  # a datagram socket: it only looks up the route
            except OSError:
                continue
            yield str(trial.getsockname()[0]), str(theirs[0])


def _interfaces() -> Iterator[str]:
    """The IPv4 address of every network interface but the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                yield address
