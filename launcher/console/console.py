"""Console: whole lines of many ranks, prompts, one progress bar.

Ranks' stdout goes to stdout and their stderr to stderr, in the order of arrival. On a terminal rank 0's `\\r` updates
repaint the lowest line and everything else is printed above it; elsewhere only the last state of a bar is kept.
Whole lines are passed on in one block: a rank that prints a million lines must not cost a million objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from launcher.console.terminal import Terminal, one_line, quote
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message, to_bytes

_COLOURS = (36, 33, 32, 35, 34, 31)
# An unfinished line of a rank that a user may answer is shown after so long (s): most likely it is a prompt.
_PROMPT = 0.05
#: A line longer than this (a binary dump) is passed on in parts, so that memory stays bounded.
LINE_LIMIT = 1 << 20
#: Bytes waiting for a slow reader, from which on ranks are made to wait.
BACKLOG = 1 << 20


class LineSplitter:
    r"""Cuts one stream into lines. `\r\n` ends a line like `\n`; a lone `\r` begins it anew.

    >>> LineSplitter().feed(b"one\ntwo 10%\rtwo 20%")
    (b'one\n', b'two 20%')
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._rest = b""  # of the line that is being written; after a `\r`, its last state alone
        self._shown = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """What `data` finishes: whole lines, and the newest state of a repainted one; b"" for neither."""
        finished, newline, self._rest = (self._rest + data).replace(b"\r\n", b"\n").rpartition(b"\n")
        text = finished + newline
        if b"\r" in text:
            text = b"".join(_last_state(line) + b"\n" for line in finished.split(b"\n"))
        state = b""
        if b"\r" in self._rest:
            state = _last_state(self._rest)
            self._rest = state + b"\r" if self._rest.endswith(b"\r") else b"\r" + state
        if len(self._rest) > self._limit:
            text += _last_state(self.take()) + b"\n"
            state = b""
        if text:
            self._shown = b""
        if state == self._shown:
            return text, b""
        self._shown = state or self._shown
        return text, state

    @property
    def unfinished(self) -> bool:
        """A line has been begun that neither a newline nor a repainting has shown yet."""
        return bool(self._rest) and b"\r" not in self._rest

    def take(self) -> bytes:
        """What has been written of an unfinished line, as a prompt is; its rest will be a line of its own."""
        text, self._rest = self._rest, b""
        return text

    def close(self) -> bytes:
        """The last line, if the stream does not end with a newline."""
        state = _last_state(self.take())
        return state + b"\n" if state.strip() else b""


def _last_state(line: bytes) -> bytes:
    """What a line shows after its last `\r`, or before it while nothing follows."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class Console(Observer):
    """The ranks' output, on the launcher's two streams.

    n: number of ranks
    prefix: lines have their rank in front, and a rank that is alone writes to the terminal directly; without it only
    whole lines and one bar are shown, of a world of one too
    ranks: whose lines are shown; None: all
    hosts: names of the machines that ranks run on, as far as they are known beforehand
    asking: ranks whose unfinished lines are prompts that a user may answer
    out, err: file descriptors; clock: seconds, as `time.monotonic`
    """

    def __init__(
        self,
        n: int,
        out: int = 1,
        err: int = 2,
        environ: Mapping[str, str] = os.environ,
        *,
        prefix: bool = True,
        ranks: Sequence[int] | None = None,
        hosts: Iterable[str] = (),
        asking: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = Terminal(out, err, environ)
        self._fds = {"out": out, "err": err}
        self._clock = clock
        self._prefixed = prefix and n > 1
        self._alone = prefix and n == 1
        self.choose(ranks, asking)
        self._debugging: frozenset[int] = frozenset()
        self._labels = Labels(n, hosts)
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._begun: set[tuple[int, str]] = set()  # whose current line has been shown in part
        self._talker: tuple[int, str] | None = None  # whose line stands open on the screen, if one does
        self._due: dict[tuple[int, str], float] = {}
        self._reported = False  # that it is unwritable
        self.has_last_word = True  # no bar or unfinished line of a rank stands below what the launcher said last
        #: Called with the launcher's own lines.
        self.witness: Callable[[str], None] = lambda text: None

    def choose(self, ranks: Sequence[int] | None, asking: Iterable[int]) -> None:
        """From now on the lines of `ranks` are shown, and unfinished ones of `asking` are prompts; see above."""
        self._ranks = None if ranks is None else frozenset(ranks)
        self._bar_rank = min(ranks) if ranks else 0
        self._asking = frozenset(asking)

    @property
    def prefix_width(self) -> int:
        """Columns that a prefix takes."""
        return self._labels.width + 2 if self._prefixed else 0

    def columns(self) -> tuple[int, int] | None:
        """Width and height of the terminal that ranks write to, or None."""
        return self._terminal.size()

    # -- what comes in

    def rank_started(self, rank: int, hello: Message) -> None:
        if host := str(hello.get("host") or ""):
            self._labels.add(rank, host)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if self._ranks is not None and rank not in self._ranks:
            return
        key = rank, stream
        if self._terminal.terminal[self._fds[stream]] and (self._alone or rank in self._debugging):
            self._begun.discard(key)
            self._continue(key, data)  # exactly what was written, prompts too
            return
        splitter = self._splitters.get(key)
        if splitter is None:
            splitter = self._splitters[key] = LineSplitter()
        text, state = splitter.feed(data)
        if text:
            self._lines(key, text)
        if state:
            self._bar(key, state)
        if rank in self._asking or rank in self._debugging:
            if splitter.unfinished:
                self._due.setdefault(key, self._clock() + _PROMPT)
            else:
                self._due.pop(key, None)

    def rank_ended(self, rank: int, status: int) -> None:
        self.leave(rank)

    def leave(self, rank: int) -> None:
        """`rank` writes no more: shows the lines that it left unfinished."""
        for stream in self._fds:
            key = rank, stream
            self._due.pop(key, None)
            if (splitter := self._splitters.pop(key, None)) and (text := splitter.close()):
                self._lines(key, text)
                self.has_last_word = False
            self._begun.discard(key)

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = ranks  # on a terminal what they write is shown at once, and exactly
        for key, splitter in self._splitters.items():
            if key[0] in ranks and splitter.unfinished:
                self._prompt(key, splitter.take())

    def typed(self, data: bytes) -> None:
        """This was typed in at a terminal that shows what is typed."""
        if b"\n" in data:
            self._terminal.typed()
            self._talker = None

    def say(self, text: str, quoted: str = "") -> None:
        """Prints a sentence of the launcher's own to stderr, below all lines so far, and after it what it quotes.

        text: may be "", with something quoted: a traceback, a table. Neither can write more than text to a terminal.
        """
        sentence = f"ddp-launch: {one_line(text)}\n" if text else ""
        shown = (sentence + quote(quoted)).rstrip("\n")
        self._talker = None
        self.has_last_word = True
        self._terminal.lines(self._fds["err"], to_bytes(shown) + b"\n")
        self.witness(shown)

    def tick(self, now: float) -> float:
        """Shows what has waited long enough; when to come again."""
        for key in [key for key, at in self._due.items() if at <= now]:
            del self._due[key]
            if self._splitters[key].unfinished:  # else a debugger has begun, or ended, meanwhile
                self._prompt(key, self._splitters[key].take())
        return min(self._due.values(), default=float("inf"))

    def finish(self) -> None:
        """The job has ended: nothing is repainted any more."""
        self._terminal.bar(-1, b"")

    def close(self) -> None:
        self.finish()
        self.flush()
        self._terminal.close()

    # -- writing

    @property
    def backlog(self) -> int:
        """Bytes that wait for a slow reader."""
        return self._terminal.backlog

    @property
    def backlogged(self) -> bool:
        """So much waits for a slow reader that nothing more is read from ranks."""
        return self.backlog >= BACKLOG

    @property
    def broken(self) -> bool:
        """One of the two streams can be written to no more: its reader has gone, or it is `unwritable`."""
        return self._terminal.broken

    @property
    def unwritable(self) -> str:
        """A sentence, if one of the two streams fails though it has a reader (a full disk); else ""."""
        return f"the output cannot be written: {reason}" if (reason := self._terminal.reason) else ""

    @property
    def waiting_for(self) -> int | None:
        """The file descriptor that must become writable next, or None if nothing waits."""
        return self._terminal.waiting_for

    def flush(self) -> None:
        """Writes what can be written without blocking; says, once, if that fails."""
        self._terminal.flush()
        if self.unwritable and not self._reported:
            self._reported = True
            self.say(self.unwritable)
            self._terminal.flush()

    def drop(self) -> None:
        """Forgets what has not been written."""
        self._terminal.drop()

    def hide(self) -> None:
        """Erases what is repainted, before another program writes to the terminal; the next `flush` paints it again."""
        self._terminal.hide()

    # -- what goes out

    def _lines(self, key: tuple[int, str], text: bytes) -> None:
        """Whole lines of one rank. The first may be the rest of one whose beginning has been shown."""
        rank, stream = key
        fd = self._fds[stream]
        if rank == self._bar_rank and fd == self._terminal.bar_fd:
            self._terminal.bar(fd, b"")  # the line that was being repainted is the first of these
        if key in self._begun:
            self._begun.discard(key)
            rest, _, text = text.partition(b"\n")
            if self._talker == key:
                self._terminal.part(fd, rest + b"\n")
                self._talker = None
            elif rest:
                text = rest + b"\n" + text
            if not text:
                return
        if prefix := self._prefix(rank, fd):
            text = prefix + text[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        self._talker = None
        self._terminal.lines(fd, text)

    def _bar(self, key: tuple[int, str], text: bytes) -> None:
        rank, stream = key
        if rank == self._bar_rank and self._terminal.paints(self._fds[stream]):
            if self._talker == key:
                self._terminal.end_line()
                self._talker = None
            self._begun.discard(key)
            shown = self._prefix(rank, self._fds[stream]) + text if text.strip() else b""
            self._terminal.bar(self._fds[stream], shown)

    def _prompt(self, key: tuple[int, str], text: bytes) -> None:
        """The beginning of a line that is not finished, or more of it."""
        if key not in self._begun or self._talker != key:
            text = self._prefix(key[0], self._fds[key[1]]) + text
            self._terminal.end_line()
        self._begun.add(key)
        self._continue(key, text)

    def _continue(self, key: tuple[int, str], data: bytes) -> None:
        if self._talker != key:
            self._terminal.end_line()
        self._terminal.part(self._fds[key[1]], data)
        self.has_last_word = False
        self._talker = None if data.endswith(b"\n") else key

    def _prefix(self, rank: int, fd: int) -> bytes:
        if not self._prefixed:
            return b""
        text = f"{self._labels[rank]}: "
        if self._terminal.terminal[fd] and self._terminal.colour:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()


class Labels:
    """The labels of `n` ranks, all of one width: `3` where there is one host, `node7:3` where there are several.

    hosts: names of the hosts as far as they are known beforehand; more may come with the ranks
    """

    def __init__(self, n: int, hosts: Iterable[str] = ()) -> None:
        self._digits = len(str(n - 1))
        self._names = {short(host) for host in hosts}
        self._hosts: dict[int, str] = {}
        self._known: dict[int, str] = {}

    def add(self, rank: int, host: str) -> None:
        """`rank` runs on `host`."""
        self._hosts[rank] = short(host)
        self._names.add(short(host))
        self._known.clear()

    @property
    def width(self) -> int:
        """Columns of a label."""
        return self._digits + (max(map(len, self._names)) + 1 if len(self._names) > 1 else 0)

    def __getitem__(self, rank: int) -> str:
        """
        >>> labels = Labels(12, ["node1.cluster", "node2.cluster"])
        >>> labels.add(3, "node2.cluster")
        >>> labels[3], labels[4]
        (' node2:3', '       4')
        """
        if rank not in self._known:
            host = self._hosts.get(rank, "") if len(self._names) > 1 else ""
            self._known[rank] = f"{host}:{rank}".rjust(self.width) if host else str(rank).rjust(self.width)
        return self._known[rank]


def short(host: str) -> str:
    """A host's name without its domain; an address as it is.

    >>> short("node7.cluster.example"), short("10.0.0.7"), short("fe80::1")
    ('node7', '10.0.0.7', 'fe80::1')
    """
    first, _, rest = host.partition(".")
    return host if first.isdigit() or ":" in host or not rest else first
