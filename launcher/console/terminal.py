"""The launcher's two output streams as one terminal: lines above, one progress bar below. No write blocks.

The bar is erased before anything else is written to the terminal, and painted again after all has been written.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections import deque
from collections.abc import Mapping

# A pipe that select reports as writable takes this many bytes without blocking.
_PIPE_BUF = 4096
# Errors of a write whose reader is gone: the terminal was closed, or `head` has ended.
_NO_READER = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASE_LINE = b"\r\x1b[K"
# Control characters except tab and newline; bytes of control characters that could not be decoded (\udc80 to \udc9f);
# and marks that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udc9f]")
# The beginning of each line that looks like one of the launcher.
_LAUNCHER_LINE = re.compile(r"^(?=ddp-launch:)", re.MULTILINE)


def one_line(text: str) -> str:
    r"""The text as one line without control characters, whatever names and messages it contains.

    >>> one_line("there is no script \x1b[31m\n.py")
    'there is no script \\x1b[31m\\n.py'
    """
    return _escape(text).replace("\n", "\\n")


def quote(text: str) -> str:
    r"""The text without colours, its control characters escaped. Lines that look like the launcher's get "> " in front.

    >>> quote("ValueError:\nddp-launch: all is \x1b[32mwell\x07")
    'ValueError:\n> ddp-launch: all is well\\x07'
    """
    return _LAUNCHER_LINE.sub("> ", _escape(_ESCAPES.sub("", text.replace("\r\n", "\n"))))


def _escape(text: str) -> str:
    return _CONTROLS.sub(lambda control: repr(control[0])[1:-1], text)


class Terminal:
    """Writes to two file descriptors in one order, without blocking.

    is_terminal: for each of the two, whether it is a terminal; colour: whether colours may be used
    backlog: bytes that wait for a slow reader
    """

    def __init__(self, out: int = 1, err: int = 2, environ: Mapping[str, str] = os.environ) -> None:
        self.is_terminal = {fd: os.isatty(fd) for fd in (out, err)}
        self._can_repaint = environ.get("TERM") != "dumb"
        self.colour = self._can_repaint and not environ.get("NO_COLOR")
        self.backlog = 0
        self._writers = {fd: _Writer(fd) for fd in (out, err)}
        self._queue: deque[tuple[int, list[bytes]]] = deque()
        self._errors: dict[int, OSError] = {}  # Of each file descriptor that can no longer be written to.
        self._open_fd = -1  # The file descriptor that an unfinished line was written to.
        self._bar: tuple[int, bytes] | None = None
        self._painted: tuple[int, bytes] | None = None

    def paints(self, fd: int) -> bool:
        """True if lines of `fd` can be repainted."""
        return self.is_terminal[fd] and self._can_repaint

    def size(self) -> tuple[int, int] | None:
        """Width and height of the terminal; None if there is none, its width is unknown, or it has been closed."""
        try:
            width, height = os.get_terminal_size(next(fd for fd in self.is_terminal if self.is_terminal[fd]))
        except (OSError, StopIteration):
            return None
        return (width, height) if width else None

    # -- content

    def lines(self, fd: int, text: bytes) -> None:
        """Prints whole lines, each with its newline."""
        self.end_line()
        if self.is_terminal[fd]:
            self._erase()
        self._put(fd, text)

    def part(self, fd: int, text: bytes) -> None:
        """Prints a text that may end in the middle of a line. The next part of the same `fd` continues it."""
        if self._open_fd != fd:
            self.end_line()
        self._erase()
        self._put(fd, text)
        self._open_fd = -1 if text.endswith(b"\n") else fd

    def end_line(self) -> None:
        """Ends an unfinished line, so that what follows begins a new one."""
        if self._open_fd >= 0:
            self._put(self._open_fd, b"\n")
            self._open_fd = -1

    def typed(self) -> None:
        """Called when the user has typed a newline: the terminal has moved the cursor to the next line."""
        self._open_fd = -1
        self._painted = None

    def bar(self, fd: int, text: bytes) -> None:
        """Sets the progress bar, which is cut to the terminal's width. text: b"" removes it"""
        self._bar = (fd, text) if text and self.paints(fd) else None

    @property
    def bar_fd(self) -> int:
        """The file descriptor of the bar, -1 if there is no bar."""
        return -1 if self._bar is None else self._bar[0]

    def hide(self) -> None:
        """Erases the bar until the next `flush`, so that another program can write to the terminal."""
        self._erase()
        self._write()

    def _erase(self) -> None:
        if self._painted is not None:
            self._put(self._painted[0], _ERASE_LINE)
            self._painted = None

    def _paint(self) -> None:
        bar = self._bar if self._open_fd < 0 else None
        if self._painted is None or self._painted != bar:
            self._erase()
            if bar is not None:
                fd, text = bar
                width, _ = self.size() or (80, 24)
                plain = _ESCAPES.sub("", text.decode("utf-8", "replace"))
                # The last column stays empty: when it is filled, some terminals move the cursor to the next line.
                self._put(fd, text if len(plain) < width else plain[: width - 1].encode())
            self._painted = bar

    # -- writing

    def close(self) -> None:
        """Closes the files that were opened here; `out` and `err` stay open."""
        for writer in self._writers.values():
            writer.close()

    @property
    def broken(self) -> bool:
        """Whether one of the two streams can no longer be written to."""
        return bool(self._errors)

    @property
    def reason(self) -> str:
        """The error of a stream that cannot be written to. "": there is none, or only its reader has gone"""
        return next((str(error.strerror) for error in self._errors.values() if error.errno not in _NO_READER), "")

    def _put(self, fd: int, data: bytes) -> None:
        if fd in self._errors:
            return
        if self._queue and self._queue[-1][0] == fd:
            self._queue[-1][1].append(data)
        else:
            self._queue.append((fd, [data]))
        self.backlog += len(data)

    @property
    def waiting_for(self) -> int | None:
        """The file descriptor that must become writable next, or None if nothing waits to be written."""
        return self._writers[self._queue[0][0]].fd if self._queue else None

    def flush(self) -> None:
        """Writes as much as possible without blocking."""
        self._write()
        if self.broken:
            self._erase()
        elif not self._queue:
            self._paint()  # Not while lines wait: the bar could not be read between them.
        self._write()

    def _write(self) -> None:
        while self._queue:
            fd, chunks = self._queue.popleft()
            data = memoryview(b"".join(chunks))
            while data:
                try:
                    written = self._writers[fd].write(data)
                except OSError as error:
                    self._fail(fd, error)
                    break
                self.backlog -= written
                data = data[written:]
                if not written:
                    self._queue.appendleft((fd, [bytes(data)]))
                    return

    def _fail(self, fd: int, error: OSError) -> None:
        """Gives up `fd`, with all that waits for it. The other file descriptor is still written to."""
        self._errors[fd] = error
        self._queue = deque(entry for entry in self._queue if entry[0] != fd)
        self.backlog = sum(len(chunk) for _, chunks in self._queue for chunk in chunks)

    def drop(self) -> None:
        """Discards all that waits to be written."""
        self._queue.clear()
        self.backlog = 0


class _Writer:
    """Writes to a file without blocking. Other processes share `fd`, so it must not be made nonblocking itself.

    A pipe or a terminal is opened a second time, nonblocking. If that fails, and for a socket, few bytes are written at
    a time, and only after select has reported that the file is writable. Regular files are written directly.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        mode = os.fstat(fd).st_mode
        self._is_file = stat.S_ISREG(mode)
        self._own = False
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self.fd = os.open(f"/proc/self/fd/{fd}", flags)
                self._own = True
            except OSError:
                pass  # It is another user's terminal; or a pipe without a reader, which the first write reports.

    def write(self, data: memoryview) -> int:
        """Writes as much of `data` as possible without blocking. Returns: the number of bytes"""
        if not self._own and not self._is_file:
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
