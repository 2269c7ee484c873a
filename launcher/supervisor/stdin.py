"""Forwards the launcher's standard input to one rank. If it holds the program to run, all ranks get it."""

from __future__ import annotations

import os
from collections.abc import Callable

from launcher.protocol import to_text
from launcher.supervisor.rank_table import RankTable

# Maximum number of bytes that are read at once.
_CHUNK = 1 << 15


class StdinForwarder:
    """Reads the standard input and sends it to one rank. It reads more only after the rank has taken all that was sent.

    rank: the rank that gets it; fd: file descriptor to read from
    typed: called with the data if it was typed in a terminal that echoes what is typed
    program: the whole standard input if it holds the program to run, which every rank gets; None: it does not
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
        """Called when a rank has started: sends it the program, or the end of an input that has ended already."""
        if self._program is not None:
            ranks[rank].channel.send({"stdin": to_text(self._program)})
        elif rank == self.rank:
            self._acknowledged = True
            if self._fd is None:
                ranks[rank].channel.send({"stdin": ""})

    def acknowledged(self, rank: int, ranks: RankTable) -> None:
        """Called when the rank has taken all that was sent. If that was the program, sends the end of the input."""
        self._acknowledged = True
        if self._program is not None:
            ranks[rank].channel.send({"stdin": ""})

    def readable_fd(self, ranks: RankTable) -> int | None:
        """The file descriptor to wait for; None while nothing should be read."""
        ready = self._fd is not None and self._acknowledged and self.rank in ranks and in_foreground(self._fd)
        return self._fd if ready else None

    def read(self, ranks: RankTable) -> None:
        """Reads from the file descriptor and sends the data to the rank; at the end of the input, sends ""."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, _CHUNK)
        except OSError:
            data = b""  # The terminal is closed.
        self._acknowledged = False
        if _is_echoing(self._fd):
            self._typed(data)
        ranks[self.rank].channel.send({"stdin": to_text(data)})
        if not data:
            self._fd = None


def in_foreground(fd: int) -> bool:
    """False if `fd` is a terminal in whose background this process runs: the kernel would stop a process that reads."""
    try:
        return not os.isatty(fd) or os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # It is not our controlling terminal.


def _is_echoing(fd: int) -> bool:
    """True for a terminal that shows what is typed."""
    if not os.isatty(fd):
        return False
    import termios  # Imported late: few jobs need it.

    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False  # It is closed.
