r"""What the user sees: whole lines of many ranks, one progress bar, and never a write that blocks the launcher.

Ranks' stdout goes to stdout and their stderr to stderr, in the order of arrival. On a terminal rank 0's `\r` updates
repaint the lowest line and everything else is printed above it; elsewhere only the last state of a bar is kept.
"""

from __future__ import annotations

import os
import select
import stat
from collections import deque
from collections.abc import Mapping

from launcher.lines import Line, LineSplitter, Repaint

_COLOURS = (36, 33, 32, 35, 34, 31)
# A pipe that select calls writable takes this much at once.
_PIPE_BUF = 4096
#: Bytes waiting for a slow reader, from which on ranks are made to wait.
BACKLOG = 1 << 20


class Console:
    """The launcher's two output streams.

    n: number of ranks; prefix: lines bear their rank in front, and a rank that is alone has the terminal to itself;
    without it only whole lines and one bar are shown, of a world of one too
    out, err: file descriptors
    """

    def __init__(
        self, n: int, out: int = 1, err: int = 2, environ: Mapping[str, str] = os.environ, *, prefix: bool = True
    ) -> None:
        self._fds = {"out": out, "err": err}
        self._terminal = {fd: os.isatty(fd) for fd in (out, err)}
        self._colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._prefixed = prefix and n > 1
        self._exact = prefix and n == 1
        self._width = len(str(n - 1))
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bar = b""
        self._bar_fd = -1
        self._mid_line = False
        self.backlog = 0
        self.broken = False

    @property
    def prefix_width(self) -> int:
        """Columns that a prefix takes."""
        return self._width + 2 if self._prefixed else 0

    def columns(self) -> tuple[int, int] | None:
        """Width and height of the terminal that ranks write to, or None."""
        for fd, terminal in self._terminal.items():
            if terminal:
                width, height = os.get_terminal_size(fd)
                return (width, height) if width else None
        return None

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Takes what `rank` wrote to `stream` ("out" or "err")."""
        fd = self._fds[stream]
        if self._exact and self._terminal[fd]:
            self._put(fd, data)  # alone on a terminal: exactly what the script wrote, prompts too
            self._mid_line = not data.endswith(b"\n")
            return
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        self._show(rank, fd, splitter.feed(data))

    def close(self, rank: int) -> None:
        """`rank` has ended: prints lines that it left unfinished."""
        for stream, fd in self._fds.items():
            if splitter := self._splitters.pop((rank, stream), None):
                self._show(rank, fd, splitter.close())

    def say(self, text: str) -> None:
        """Prints the launcher's own words to stderr, below all lines taken so far."""
        err = self._fds["err"]
        if self._mid_line:
            self._put(err, b"\n")
            self._mid_line = False
        self._lines(err, [line.encode("utf-8", "surrogateescape") for line in text.rstrip("\n").split("\n")])

    def _show(self, rank: int, fd: int, pieces: list[Line | Repaint]) -> None:
        lines = []
        bar = None
        for piece in pieces:
            if isinstance(piece, Line):
                lines.append(self._prefix(rank, fd) + piece.text)
                if rank == 0 and fd == self._bar_fd:
                    self._erase()  # the line that was being repainted is this one
            elif rank == 0 and self._terminal[fd]:
                bar = piece.text
        if lines:
            self._lines(fd, lines)
        if bar is not None:
            self._erase()
            if bar.strip():
                self._bar, self._bar_fd = self._prefix(rank, fd) + bar, fd
                self._put(fd, self._bar)

    def _lines(self, fd: int, lines: list[bytes]) -> None:
        bar, bar_fd = self._bar, self._bar_fd
        above = bool(bar) and self._terminal[fd]
        if above:
            self._erase()
        self._put(fd, b"\n".join(lines) + b"\n")
        if above:
            self._bar, self._bar_fd = bar, bar_fd
            self._put(bar_fd, bar)

    def _erase(self) -> None:
        if self._bar:
            self._put(self._bar_fd, b"\r\x1b[K")
        self._bar, self._bar_fd = b"", -1

    def _prefix(self, rank: int, fd: int) -> bytes:
        if not self._prefixed:
            return b""
        text = f"{rank:>{self._width}}: "
        if self._terminal[fd] and self._colour:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()

    def _put(self, fd: int, data: bytes) -> None:
        self._queue.append((fd, data))
        self.backlog += len(data)

    @property
    def waiting_for(self) -> int | None:
        """The file descriptor that must become writable next, or None if nothing waits."""
        return self._queue[0][0] if self._queue else None

    def flush(self) -> None:
        """Writes what can be written without blocking."""
        while self._queue:
            fd, data = self._queue.popleft()
            start = 0
            while start < len(data):
                try:
                    written = _write(fd, memoryview(data)[start:])
                except OSError:  # nobody reads any more: the terminal was closed, `head` has enough, the disk is full
                    self.broken = True
                    self.drop()
                    return
                start += written
                self.backlog -= written
                if not written:
                    self._queue.appendleft((fd, data[start:]))
                    return

    def drop(self) -> None:
        """Forgets what has not been written."""
        self._queue.clear()
        self.backlog = 0


def _write(fd: int, data: memoryview) -> int:
    """Writes as much as goes without blocking; how much that was."""
    size = len(data) if stat.S_ISREG(os.fstat(fd).st_mode) else _PIPE_BUF
    if not select.select([], [fd], [], 0)[1]:
        return 0
    try:
        return os.write(fd, data[:size])
    except BlockingIOError:
        return 0
