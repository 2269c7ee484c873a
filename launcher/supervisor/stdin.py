"""Forwards the launcher's standard input to one rank."""

from __future__ import annotations

import os
import termios
from collections.abc import Callable
from typing import Any

from launcher.protocol import to_text
from launcher.supervisor.rank_table import RankTable

_CHUNK = 1 << 15


class StdinForwarder:
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
                self._keys = Keys(self._fd)
            self._keys.switch(edited)

    def rest(self) -> None:
        """Leaves the terminal to others, as it was, until `wanted` is asked again."""
        if self._keys is not None:
            self._keys.switch(False)

    def came(self, rank: int, ranks: RankTable) -> None:
        """A rank has come, perhaps the one whose this is, perhaps again: nothing is on its way to it."""
        if rank == self.rank:
            self._taken = True
            if self._fd is None:
                ranks[rank].channel.send({"stdin": ""})

    def taken(self) -> None:
        """The rank has taken what it was sent."""
        self._taken = True

    def wanted(self, ranks: RankTable) -> int | None:
        """The file descriptor to wait for, None while nothing could be done with what comes."""
        ready = self._fd is not None and self._taken and self.rank in ranks and in_foreground(self._fd)
        if ready and self._edited:
            self.edit(True)  # it may have come back from the background
        return self._fd if ready else None

    def read(self, ranks: RankTable) -> None:
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
        ranks[self.rank].channel.send({"keys" if edited and data else "stdin": to_text(data)})
        if not data:
            if edited:  # the terminal has gone: the editor hears of it as of Ctrl-D
                ranks[self.rank].channel.send({"keys": "\x04"})
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


def one_by_one(modes: list[Any]) -> list[Any]:
    """Modes of a terminal, as `termios.tcgetattr` has them, in which keys come one by one and are not shown."""
    changed = [*modes[:6], [*modes[6]]]
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    return changed


class Keys:
    """The modes of one terminal, switched and restored."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._modes: list[Any] | None = None  # of before

    @property
    def on(self) -> bool:
        """Keys come one by one."""
        return self._modes is not None

    def switch(self, on: bool) -> None:
        """Has keys come one by one, or as whole lines again, in exactly the modes of before."""
        if on == self.on:
            return
        try:
            if on:
                self._modes = termios.tcgetattr(self._fd)
                changed = one_by_one(self._modes)
            else:
                assert self._modes is not None
                changed, self._modes = self._modes, None
            termios.tcsetattr(self._fd, termios.TCSANOW, changed)  # now: a terminal that Ctrl-S holds drains nothing
        except termios.error:
            self._modes = None  # it has gone
