"""Splits bytes into lines and progress bars: output comes in pieces, and `\\r` repaints instead of scrolling.

Whole lines are passed on in one block: a rank that prints a million lines must not cost a million objects.
"""

from __future__ import annotations

from typing import NamedTuple

#: A line longer than this (a binary dump) is passed on in parts, so that memory stays bounded.
LINE_LIMIT = 1 << 23


class Lines(NamedTuple):
    """Finished lines, each with its newline."""

    text: bytes


class Repaint(NamedTuple):
    """What a line that is being repainted shows now."""

    text: bytes


class LineSplitter:
    r"""Cuts one stream into lines. `\r\n` ends a line like `\n`; a lone `\r` begins it anew.

    >>> LineSplitter().feed(b"one\ntwo 10%\rtwo 20%")
    [Lines(text=b'one\n'), Repaint(text=b'two 20%')]
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._parts: list[bytes] = []  # of the line that is being written
        self._length = 0
        self._state: bytes | None = None  # what stood in this line before the last `\r`
        self._shown: bytes | None = None

    def feed(self, data: bytes) -> list[Lines | Repaint]:
        """What `data` finishes: whole lines, and the newest state of a repainted one."""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        finished, newline, rest = data.rpartition(b"\n")
        if b"\r" in finished or self._state is not None:
            text = self._repainted(finished) if newline else b""
        elif newline:
            text = b"".join((*self._parts, finished, newline))
            self._parts, self._length = [], 0
        else:
            text = b""
        self._write(rest)
        if self._length > self._limit:
            text += self._finish()
        pieces: list[Lines | Repaint] = [Lines(text)] if text else []
        if self._state is not None:
            shown = b"".join(self._parts) or self._state
            if shown != self._shown:
                self._shown = shown
                pieces.append(Repaint(shown))
        return pieces

    @property
    def unfinished(self) -> bool:
        """A line has been begun that neither a newline nor a repainting has shown yet."""
        return self._length > 0 and self._state is None

    def take(self) -> bytes:
        """What has been written of an unfinished line, as a prompt is; its rest will come as a line of its own."""
        assert self.unfinished
        text = b"".join(self._parts)
        self._parts, self._length = [], 0
        return text

    def close(self) -> list[Lines | Repaint]:
        """The last line, if the stream does not end with a newline."""
        if not self._length and not (self._state or b"").strip():
            return []
        return [Lines(self._finish())]

    def _repainted(self, finished: bytes) -> bytes:
        """Lines of which at least one was repainted, in its last state each."""
        done = []
        for line in finished.split(b"\n"):
            self._write(line)
            done.append(self._finish())
        return b"".join(done)

    def _write(self, data: bytes) -> None:
        *past, last = data.split(b"\r")
        if past:
            states = [b"".join(self._parts) + past[0], *past[1:]]
            self._state = next((state for state in reversed(states) if state), self._state or b"")
            self._parts, self._length = [], 0
        if last:
            self._parts.append(last)
            self._length += len(last)

    def _finish(self) -> bytes:
        text = b"".join(self._parts)
        if not text and (self._state or b"").strip():
            text = self._state or b""
        self._parts, self._length, self._state, self._shown = [], 0, None, None
        return text + b"\n"
