"""A transport that stands on another one: what is rare, or has no need of speed, goes on over the one below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collectives.backends.transport import Test, Transport
from collectives.exit_notice import ExitNotice
from collectives.reduction import Array


class LayeredTransport:
    """Point to point, duplicates, departures and the end of a transport, by the one of the same ranks below it."""

    def __init__(self, below: Transport) -> None:
        self._below = below
        self.name, self.key = below.name, below.key
        self.rank, self.size = below.rank, below.size
        self.local_rank, self.local_size, self.node = below.local_rank, below.local_size, below.node

    @property
    def below(self) -> Transport:
        """What it was set up over."""
        return self._below

    def pid(self, rank: int) -> int | None:
        return self._below.pid(rank)

    def send(self, x: Array, dst: int, tag: int) -> Test:
        return self._below.send(x, dst, tag)

    def recv(self, out: Array, src: int, tag: int) -> Test:
        return self._below.recv(out, src, tag)

    def arrived(self) -> tuple[int, Array] | None:
        return self._below.arrived()

    def duplicate(self, key: str) -> tuple[Transport, Test]:
        return self._below.duplicate(key)

    def split(self, members: Sequence[int] | None, key: str) -> tuple[Transport | None, Test]:
        return self._below.split(members, key)

    def group(self, members: Sequence[int], key: str, missing: list[int]) -> tuple[Transport, Test]:
        return self._below.group(members, key, missing)

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return self._below.exit_notices()

    def close(self) -> None:
        self._below.close()
