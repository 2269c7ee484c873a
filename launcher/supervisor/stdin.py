"""Forwards the launcher's standard input: to one rank, or, if it is the program that all run, to each of them."""

from __future__ import annotations

import os
from collections.abc import Callable

from launcher.protocol import to_text
from launcher.supervisor.rank_table import RankTable

_CHUNK = 1 << 15


class StdinForwarder:
    """What the launcher reads, for one rank. It is read only while that rank has taken what it was sent before.

    fd: where it comes from; rank: whose it is; typed: called with what a terminal echoed
    program: all that was read from `fd` already, which each rank gets; None: nothing was
    """

    def __init__(
        self,
        rank: int = 0,
        fd: int = 0,
        typed: Callable[[bytes], None] = lambda data: None,
        program: bytes | None = None,
    ) -> None:
        self.rank = rank
        self._typed = typed
        self._program = program
        self._fd: int | None = fd if program is None else None
        self._acknowledged = True

    def rank_started(self, rank: int, ranks: RankTable) -> None:
        """A rank has started, perhaps the one that reads standard input: nothing is on its way to it yet."""
        if self._program is not None:
            ranks[rank].channel.send({"stdin": to_text(self._program)})
        elif rank == self.rank:
            self._acknowledged = True
            if self._fd is None:
                ranks[rank].channel.send({"stdin": ""})

    def acknowledged(self, rank: int, ranks: RankTable) -> None:
        """The rank has taken what it was sent."""
        self._acknowledged = True
        if self._program is not None:
            ranks[rank].channel.send({"stdin": ""})

    def readable_fd(self, ranks: RankTable) -> int | None:
        """The file descriptor to wait for, None while nothing could be done with what comes."""
        ready = self._fd is not None and self._acknowledged and self.rank in ranks and in_foreground(self._fd)
        return self._fd if ready else None

    def read(self, ranks: RankTable) -> None:
        """Forwards what was read, or that the input has ended."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, _CHUNK)
        except OSError:
            data = b""  # the terminal has gone
        self._acknowledged = False
        if _echoes(self._fd):
            self._typed(data)
        ranks[self.rank].channel.send({"stdin": to_text(data)})
        if not data:
            self._fd = None


def in_foreground(fd: int) -> bool:
    """False for the terminal of a job in the background: reading it, or changing its modes, would stop us."""
    try:
        return not os.isatty(fd) or os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # a terminal, but not the one that controls us


def _echoes(fd: int) -> bool:
    """True for a terminal that shows what is typed."""
    if not os.isatty(fd):
        return False
    import termios  # here, because few jobs want it

    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False  # it has gone
