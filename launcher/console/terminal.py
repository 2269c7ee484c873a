"""The launcher's two output streams as one terminal: lines above, rank 0's progress bar below, no write that blocks.

The bar is erased before anything else is written, and painted again once everything has been.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections import deque
from collections.abc import Mapping

# A pipe that select calls writable takes this much at once.
_PIPE_BUF = 4096
# A write fails with one of these where the terminal was closed, or `head` has had enough.
_NO_READER = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASE_LINE = b"\r\x1b[K"
# What a terminal obeys, bytes of an older encoding and marks that reorder a line among it; not the tab and the newline.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udc9f]")
_OURS = re.compile(r"^(?=ddp-launch:)", re.MULTILINE)


def one_line(text: str) -> str:
    r"""A sentence that a terminal shows as it stands, whatever names and messages it quotes.

    >>> one_line("there is no script \x1b[31m\n.py")
    'there is no script \\x1b[31m\\n.py'
    """
    return _escape(text).replace("\n", "\\n")


def quote(text: str) -> str:
    r"""Lines that are not the launcher's own, without colours; none of them can be taken for one of its own.

    >>> quote("ValueError:\nddp-launch: all is \x1b[32mwell\x07")
    'ValueError:\n> ddp-launch: all is well\\x07'
    """
    return _OURS.sub("> ", _escape(_ESCAPES.sub("", text.replace("\r\n", "\n"))))


def _escape(text: str) -> str:
    return _CONTROLS.sub(lambda control: repr(control[0])[1:-1], text)


class Terminal:
    """Whatever is written to file descriptors `out` and `err`, in one order.

    terminal: whether each of the two is one; colour: whether it shows any
    backlog: bytes that wait for a slow reader
    """

    def __init__(self, out: int = 1, err: int = 2, environ: Mapping[str, str] = os.environ) -> None:
        self.terminal = {fd: os.isatty(fd) for fd in (out, err)}
        self.colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.backlog = 0
        self._paints = environ.get("TERM") != "dumb"
        self._writers = {fd: _Writer(fd) for fd in (out, err)}
        self._queue: deque[tuple[int, list[bytes]]] = deque()
        self._lost: dict[int, OSError] = {}  # streams that fail, and why
        self._open = -1  # where a line has been begun and not ended
        self._bar: tuple[int, bytes] | None = None
        self._painted: tuple[int, bytes] | None = None

    def paints(self, fd: int) -> bool:
        """True if lines of `fd` can be repainted."""
        return self.terminal[fd] and self._paints

    def size(self) -> tuple[int, int] | None:
        """Width and height of the terminal; None if there is none, or it has gone."""
        for fd, terminal in self.terminal.items():
            if terminal:
                try:
                    width, height = os.get_terminal_size(fd)
                except OSError:
                    return None
                return (width, height) if width else None
        return None

    # -- what is shown

    def lines(self, fd: int, text: bytes) -> None:
        """Prints whole lines, each with its newline."""
        self.end_line()
        if self.terminal[fd]:
            self._erase()
        self._put(fd, text)

    def part(self, fd: int, text: bytes) -> None:
        """Prints what may leave the cursor in the middle of a line; the next part goes on there."""
        if self._open != fd:
            self.end_line()
        self._erase()
        self._put(fd, text)
        self._open = -1 if text.endswith(b"\n") else fd

    def end_line(self) -> None:
        """Ends a line that was only begun, so that nothing else comes to stand in it."""
        if self._open >= 0:
            self._put(self._open, b"\n")
            self._open = -1

    def typed(self) -> None:
        """A newline was typed in, and the terminal has shown it: the cursor stands in another line."""
        self._open = -1
        self._painted = None

    def bar(self, fd: int, text: bytes) -> None:
        """The progress bar that is shown from now on, cut to the terminal's width; empty: none."""
        self._bar = (fd, text) if text and self.paints(fd) else None

    @property
    def bar_fd(self) -> int:
        """Where the bar is shown that is now, -1 if none is."""
        return -1 if self._bar is None else self._bar[0]

    def hide(self) -> None:
        """Erases the bar until the next `flush`."""
        self._erase()
        self._write()

    def _erase(self) -> None:
        if self._painted is not None:
            self._put(self._painted[0], _ERASE_LINE)
            self._painted = None

    def _paint(self) -> None:
        bar = self._bar if self._open < 0 else None
        if self._painted is None or self._painted != bar:
            self._erase()
            if bar is not None:
                width = (self.size() or (80, 24))[0]
                plain = _ESCAPES.sub("", bar[1].decode("utf-8", "replace"))
                # In the last column the cursor is in this line on some terminals, in the next on others.
                self._put(bar[0], bar[1] if len(plain) < width else plain[: width - 1].encode())
            self._painted = bar

    # -- writing

    def close(self) -> None:
        """Closes what was opened here; `out` and `err` themselves stay open."""
        for writer in self._writers.values():
            writer.close()

    @property
    def broken(self) -> bool:
        """One of the two can be written to no more: its reader has gone, or there is a reason."""
        return bool(self._lost)

    @property
    def reason(self) -> str:
        """Why one of the two cannot be written to, though it has a reader; "" if it is not so."""
        return next((str(error.strerror) for error in self._lost.values() if error.errno not in _NO_READER), "")

    def _put(self, fd: int, data: bytes) -> None:
        if fd in self._lost:
            return
        if self._queue and self._queue[-1][0] == fd:
            self._queue[-1][1].append(data)
        else:
            self._queue.append((fd, [data]))
        self.backlog += len(data)

    @property
    def waiting_for(self) -> int | None:
        """The file descriptor that must become writable next, or None if nothing waits."""
        return self._writers[self._queue[0][0]].fd if self._queue else None

    def flush(self) -> None:
        """Writes what can be written without blocking."""
        self._write()
        if self.broken:
            self._erase()
        elif not self._queue:
            self._paint()  # while lines pour out it could not be read
        self._write()

    def _write(self) -> None:
        while self._queue:
            fd, chunks = self._queue.popleft()
            data = memoryview(b"".join(chunks))
            while data:
                try:
                    written = self._writers[fd].write(data)
                except OSError as error:
                    self.backlog -= len(data)
                    self._lose(fd, error)
                    break
                self.backlog -= written
                data = data[written:]
                if not written:
                    self._queue.appendleft((fd, [bytes(data)]))
                    return

    def _lose(self, fd: int, error: OSError) -> None:
        """Nothing more is written there, nor what waits; the other one goes on."""
        self._lost[fd] = error
        self.backlog -= sum(len(chunk) for each, chunks in self._queue if each == fd for chunk in chunks)
        self._queue = deque(entry for entry in self._queue if entry[0] != fd)

    def drop(self) -> None:
        """Forgets what has not been written."""
        self._queue.clear()
        self.backlog = 0


class _Writer:
    """Writes to a file descriptor that others share, so that it must not be made nonblocking itself.

    A pipe or a terminal is opened a second time for that. Where this cannot be, little is written at a time, and only
    after select has reported that it is writable.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        mode = os.fstat(fd).st_mode
        self._file = stat.S_ISREG(mode)
        self._own = False
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self.fd = os.open(f"/proc/self/fd/{fd}", flags)
                self._own = True
            except OSError:
                pass  # another user's terminal, or a pipe without a reader: then a write says so

    def write(self, data: memoryview) -> int:
        """How much of `data` went without blocking."""
        if not self._own and not self._file:
            if not select.select([], [self.fd], [], 0)[1]:
                return 0
            data = data[:_PIPE_BUF]
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self._own:
            os.close(self.fd)
