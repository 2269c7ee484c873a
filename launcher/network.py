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

# A name goes to a remote shell: neither an option nor two words is one. No engine takes an IPv6 address.
_HOST = re.compile(r"([A-Za-z0-9_][\w.\-]*)(?:(?::|\s+slots\s*=\s*)(\d{1,9}))?", re.ASCII)


class Host(NamedTuple):
    """A machine that ranks run on.

    name: as the remote shell is to be given it
    slots: how many ranks it takes
    """

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of a list as `--hosts` takes it. A host without a number has one slot; one named twice has the sum.

    >>> parse_hosts("a:4,b,a:2")
    (Host(name='a', slots=6), Host(name='b', slots=1))
    Raises: UsageError
    """
    return _parse((word.strip(), "--hosts") for word in text.split(","))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file: one a line, `#` begins a comment, and the rule for slots is that of `parse_hosts`.

    Raises: UsageError if it cannot be read, names no host, or has a line that is not understood.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file.read().splitlines()]
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror}") from None
    if not any(lines):
        raise UsageError(f"the hostfile {path} names no host")
    return _parse((line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line)


def _parse(entries: Iterable[tuple[str, str]]) -> tuple[Host, ...]:
    """The hosts of texts, each with the place where it was found; those of one name add up."""
    slots: dict[str, int] = {}
    for text, where in entries:
        match = _HOST.fullmatch(text)
        if match is None:
            raise UsageError(f"{where}: {text!r} is not understood: host, host:4 or host slots=4")
        name, number = match[1], int(match[2] or 1)
        if number < 1:
            raise UsageError(f"{where}: {name} has no slot: leave it out")
        slots[name] = slots.get(name, 0) + number
    return tuple(Host(name, number) for name, number in slots.items())


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
