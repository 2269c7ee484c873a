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

# A host with an optional number of slots. Its name is passed to a remote shell, so it may neither look like an option
# nor contain a space; and no engine takes an IPv6 address.
_HOST = re.compile(r"([A-Za-z0-9_][\w.\-]*)(?:(?::|\s+slots\s*=\s*)(\d{1,9}))?", re.ASCII)


class Host(NamedTuple):
    """A machine that ranks run on.

    name: as the remote shell takes it; slots: maximum number of ranks on this host
    """

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses the value of `--hosts`. Without a number, a host has one slot; the slots of a repeated name are added.

    >>> parse_hosts("a:4,b,a:2")
    (Host(name='a', slots=6), Host(name='b', slots=1))

    Raises: UsageError if a word is not understood, or a host has 0 slots.
    """
    return _parse((word.strip(), "--hosts") for word in text.split(","))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Reads a hostfile: one host per line, with slots as in `parse_hosts`; `#` begins a comment.

    Raises: UsageError if it cannot be read, names no host, has a line that is not understood, or a host with 0 slots.
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
    """Parses hosts, adding the slots of those with the same name. entries: each text, and its place for messages"""
    slots: dict[str, int] = {}
    for text, place in entries:
        match = _HOST.fullmatch(text)
        if match is None:
            raise UsageError(f"{place}: {text!r} is not understood: host, host:4 or host slots=4")
        name = match[1]
        number = int(match[2] or 1)
        if number < 1:
            raise UsageError(f"{place}: {name} has no slot: leave it out")
        slots[name] = slots.get(name, 0) + number
    return tuple(Host(name, number) for name, number in slots.items())


def fill_hosts(n: int, hosts: Sequence[Host]) -> list[Host]:
    """The hosts that `n` ranks use if each host is filled before the next. Their slots are the ranks that they get.

    >>> fill_hosts(5, [Host("a", 4), Host("b", 4), Host("c", 4)])
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    return [Host(host.name, len(ranks)) for host, ranks in ranks_by_host(hosts, n) if ranks]


def ranks_by_host(hosts: Sequence[Host], n: int) -> Iterator[tuple[Host, range]]:
    """Yields each host with its ranks, if the hosts are filled in order with `n` ranks."""
    first = 0
    for host in hosts:
        yield host, range(first, min(first + host.slots, n))
        first += host.slots


def ranks_on(hosts: Sequence[Host], n: int, name: str | None) -> frozenset[int]:
    """The ranks of a job of `n` that run on the host called `name`.

    >>> sorted(ranks_on([Host("a", 2), Host("b", 2)], 3, "b"))
    [2]
    """
    return frozenset(rank for host, ranks in ranks_by_host(hosts, n) if host.name == name for rank in ranks)


# The ioctl that reads the IPv4 address of a network interface.
_SIOCGIFADDR = 0x8915
# The discard port, for sockets that send nothing.
_DISCARD = 9


def addresses(hosts: Iterable[str]) -> list[str]:
    """The addresses of this machine; only "127.0.0.1" if there are none.

    If there is a route to any of `hosts`, the local address of the first such route comes first. Then come the IPv4
    addresses of the network interfaces.
    """
    first = next((local for host in hosts for local, _ in _routes(host)), "")
    return list(dict.fromkeys(filter(None, (first, *_interfaces())))) or ["127.0.0.1"]


def is_here(host: str) -> bool:
    """True if `host` is this machine."""
    return host in ("localhost", socket.gethostname()) or any(
        local == remote or remote.startswith("127.") for local, remote in _routes(host)
    )


def _routes(host: str) -> Iterator[tuple[str, str]]:
    """Yields the local and the remote address of each route to a host.

    Yields nothing if the name cannot be resolved: it may be an alias in the configuration of ssh.
    """
    try:
        infos = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, socket_type, protocol, _, remote in infos:
        with socket.socket(family, socket_type, protocol) as datagram_socket:
            try:
                datagram_socket.connect(remote)  # Sends nothing: it only looks up the route.
            except OSError:
                continue
            yield str(datagram_socket.getsockname()[0]), str(remote[0])


def _interfaces() -> Iterator[str]:
    """Yields the IPv4 address of each network interface that has one, except the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # It has no IPv4 address.
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                yield address
