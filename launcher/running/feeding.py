"""The launcher's standard input, on its way to one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.running.crew import Crew
from launcher.wire import to_text

if TYPE_CHECKING:
    from launcher.running.keys import Keys

_CHUNK = 1 << 15


class StandardInput:
    """What the launcher reads, for one rank. It is read only while that rank has taken what it was sent before.

    fd: where it comes from; rank: whose it is; shown: hears what a terminal has shown while it was typed in
    """

    def __init__(self, rank: int = 0, fd: int = 0, shown: Callable[[bytes], None] = lambda data: None) -> None:
        self.rank = rank
        self._shown = shown
        self._fd: int | None = fd
        self._taken = True
        self._keys: Keys | None = None
        self._edited = False  # the rank edits lines itself

    @property
    def terminal(self) -> bool:
        """Somebody sits there, and sees what the ranks say."""
        return self._fd is not None and os.isatty(self._fd) and os.isatty(1)

    def edit(self, edited: bool) -> None:
        """The rank edits lines itself from now on, and wants every key; or no longer."""
        self._edited = edited
        if self._fd is not None and in_foreground(self._fd) and (edited or self._keys):
            if self._keys is None:
                from launcher.running.keys import Keys  # here, because few jobs want it

                self._keys = Keys(self._fd)
            self._keys.switch(edited)

    def rest(self) -> None:
        """Leaves the terminal to others, as it was, until `wanted` is asked again."""
        if self._keys is not None:
            self._keys.switch(False)

    def came(self, rank: int, crew: Crew) -> None:
        """A rank has come, perhaps the one whose this is, perhaps again: nothing is on its way to it."""
        if rank == self.rank:
            self._taken = True
            if self._fd is None:
                crew[rank].channel.send({"stdin": ""})

    def taken(self) -> None:
        """The rank has taken what it was sent."""
        self._taken = True

    def wanted(self, crew: Crew) -> int | None:
        """The file descriptor to wait for, None while nothing could be done with what comes."""
        ready = self._fd is not None and self._taken and self.rank in crew and in_foreground(self._fd)
        if ready and self._edited:
            self.edit(True)  # it may have come back from the background
        return self._fd if ready else None

    def read(self, crew: Crew) -> None:
        """Passes on what has come, or that it has ended."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, _CHUNK)
        except OSError:
            data = b""  # the terminal has gone
        self._taken = False
        if _echoes(self._fd):
            self._shown(data)
        edited = self._keys is not None and self._keys.on
        crew[self.rank].channel.send({"keys" if edited and data else "stdin": to_text(data)})
        if not data:
            if edited:  # the terminal has gone: the editor hears of it as of Ctrl-D
                crew[self.rank].channel.send({"keys": "\x04"})
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
