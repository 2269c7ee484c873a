"""By which addresses other hosts reach this one, and which names mean this one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator

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
