r"""Lines and progress bars out of bytes: a rank's output comes in pieces, and `\r` repaints instead of scrolling."""

from __future__ import annotations

from typing import NamedTuple

#: A line longer than this (a binary dump) is passed on in parts, so that memory stays bounded.
LINE_LIMIT = 1 << 23


class Line(NamedTuple):
    """A finished line, without its end."""

    text: bytes


class Repaint(NamedTuple):
    """What a line that is being repainted shows now."""

    text: bytes


class LineSplitter:
    r"""Cuts one stream into lines. `\r\n` ends a line like `\n`; a lone `\r` begins it anew.

    >>> LineSplitter().feed(b"one\ntwo 10%\rtwo 20%")
    [Line(text=b'one'), Repaint(text=b'two 20%')]
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._parts: list[bytes] = []  # of the line that is being written
        self._length = 0
        self._state: bytes | None = None  # what stood in this line before the last `\r`
        self._shown: bytes | None = None

    def feed(self, data: bytes) -> list[Line | Repaint]:
        """What `data` finishes: whole lines, and the newest state of a repainted one."""
        pieces: list[Line | Repaint] = []
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._write(line)
            pieces.append(self._finish())
        self._write(rest)
        if self._length > self._limit:
            pieces.append(self._finish())
        elif self._state is not None:
            shown = b"".join(self._parts) or self._state
            if shown != self._shown:
                self._shown = shown
                pieces.append(Repaint(shown))
        return pieces

    def close(self) -> list[Line | Repaint]:
        """The last line, if the stream does not end with a newline."""
        if not self._length and not (self._state or b"").strip():
            return []
        return [self._finish()]

    def _write(self, data: bytes) -> None:
        *past, last = data.split(b"\r")
        if past:
            states = [b"".join(self._parts) + past[0], *past[1:]]
            self._state = next((state for state in reversed(states) if state), self._state or b"")
            self._parts, self._length = [], 0
        if last:
            self._parts.append(last)
            self._length += len(last)

    def _finish(self) -> Line:
        text = b"".join(self._parts)
        if not text and (self._state or b"").strip():
            text = self._state or b""
        self._parts, self._length, self._state, self._shown = [], 0, None, None
        return Line(text)
