"""What somebody in front of a terminal sees: as much of a terminal's behaviour as the launcher makes use of."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import pytest

_PIECES = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class Glass:
    """A screen of unlimited height: everything that was ever shown, as it stands now."""

    def __init__(self, width: int = 60) -> None:
        self.width = width
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for match in _PIECES.finditer(text):
            count, code, control, letter = match.groups()
            if control == "\n":
                self._row += 1
                while len(self._rows) <= self._row:
                    self._rows.append([])
            elif control == "\r":
                self._column = 0
            elif letter:
                self._put(letter)
            elif code == "K":
                del self._rows[self._row][self._column :]
            elif code == "A":
                self._row = max(0, self._row - int(count or 1))
            else:
                assert code == "m", f"the launcher has no use for {match.group()!r}"

    def _put(self, letter: str) -> None:
        assert self._column < self.width, "the launcher cuts what it repaints"
        row = self._rows[self._row]
        row.extend(" " * (self._column + 1 - len(row)))
        row[self._column] = letter
        self._column += 1

    @property
    def lines(self) -> list[str]:
        """What is seen, without the empty rest below."""
        shown = ["".join(row).rstrip() for row in self._rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown


def open_terminal(width: int = 60) -> tuple[int, int]:
    """A terminal of 24 x `width`: the side of who looks at it, and the side of who writes to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    return master, slave


class Terminal:
    """A terminal of 24 x `width` that somebody looks at. fd: for whoever writes to it"""

    def __init__(self, width: int = 60) -> None:
        self.master, self.fd = open_terminal(width)
        self.glass = Glass(width)
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.master)
        os.close(self.fd)

    def look(self) -> list[str]:
        """The lines that are seen now."""
        while select.select([self.master], [], [], 0.02)[0]:
            text = os.read(self.master, 1 << 16).decode()
            self.raw += text
            self.glass.feed(text)
        return self.glass.lines


@contextmanager
def stderr_on_a_terminal(width: int = 60, term: str = "xterm") -> Iterator[Terminal]:
    """A terminal that `sys.stderr` writes to meanwhile."""
    with Terminal(width) as terminal, open(os.dup(terminal.fd), "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", term)
        patch.setattr(sys, "stderr", file)
        yield terminal
