"""Console: prints whole lines of many ranks, prompts, and one progress bar.

Ranks' stdout goes to stdout and their stderr to stderr, in the order of arrival. On a terminal, the progress bar
(`\\r` updates) of the lowest rank that is shown stays in the bottom line, and everything else is printed above it.
Other ranks' bars, and all bars where the output is not a terminal, appear only in their last state. Whole lines are
handled in blocks: a rank that prints a million lines must not cost a million objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from launcher.console.terminal import Terminal, one_line, quote
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message, to_bytes

# Colours of prefixes, as numbers of ANSI escape sequences; rank R gets the one at R modulo their number.
_COLOURS = (36, 33, 32, 35, 34, 31)
# After this long (s), an unfinished line of a rank that can read the terminal counts as a prompt, and is printed.
_PROMPT = 0.05
#: Maximum length of an unfinished line (bytes). A longer one, as of a binary dump, is printed as a line of its own.
LINE_LIMIT = 1 << 20
#: Once this many bytes wait for a slow reader, nothing more is read from ranks.
BACKLOG = 1 << 20


class LineSplitter:
    r"""Cuts one stream into lines. `\r\n` ends a line like `\n`; a lone `\r` starts the same line again.

    >>> LineSplitter().feed(b"one\ntwo 10%\rtwo 20%")
    (b'one\n', b'two 20%')
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._rest = b""  # The unfinished line; if it has a `\r`, only its last state.
        self._shown = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """The lines that `data` finishes, and the state of an unfinished line that is repainted (b"" if unchanged)."""
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
        """Whether a line was begun that `feed` has returned neither as a line nor as a state."""
        return bool(self._rest) and b"\r" not in self._rest

    def take(self) -> bytes:
        """Removes and returns what was written of the unfinished line; the rest of it will count as a new line."""
        text = self._rest
        self._rest = b""
        return text

    def close(self) -> bytes:
        """The last line, if the stream does not end with a newline; b"" if it does, or if that line is blank."""
        state = _last_state(self.take())
        return state + b"\n" if state.strip() else b""


def _last_state(line: bytes) -> bytes:
    r"""The last non-empty part of a line that `\r` divides into parts."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class Console(Observer):
    """Prints the ranks' output to the launcher's stdout and stderr.

    n: number of ranks
    out, err: file descriptors
    prefix: if there are several ranks, lines begin with their rank; a single rank writes to the terminal directly.
        False: lines never begin with a rank, and the output of a single rank, too, is printed as whole lines, prompts
        and one bar
    ranks: those whose lines are printed; None: all
    hosts: names of the machines that ranks run on, as far as they are known beforehand
    asking: ranks whose unfinished lines are prompts that a user may answer
    clock: seconds, as `time.monotonic`
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
        self.terminal = Terminal(out, err, environ)
        self._fds = {"out": out, "err": err}
        self._clock = clock
        self._prefix_wanted = prefix
        self._prefixed = False
        self.choose(ranks, asking)
        self._debugging: frozenset[int] = frozenset()
        self._labels = Labels(n, hosts)
        self.attempt_started(0, n)
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._begun: set[tuple[int, str]] = set()  # Streams whose current line has been printed in part.
        self._speaker: tuple[int, str] | None = None  # The stream in whose unfinished line the cursor stands.
        self._prompt_times: dict[tuple[int, str], float] = {}
        self._reported = False  # Whether it has reported that the output cannot be written.
        #: False if, since the launcher's last sentence, a rank has written to the terminal directly, or its prompt or
        #: unfinished line has been printed.
        self.has_last_word = True
        #: Called with every text that the launcher itself prints.
        self.reporter: Callable[[str], None] = lambda text: None

    def choose(self, ranks: Sequence[int] | None, asking: Iterable[int]) -> None:
        """Changes the ranks whose lines are printed, and those whose unfinished lines are prompts (see `Console`)."""
        self._ranks = None if ranks is None else frozenset(ranks)
        self._bar_rank = min(ranks) if ranks else 0
        self._asking = frozenset(asking)

    @property
    def prefix_width(self) -> int:
        """Columns that a prefix takes."""
        return self._labels.width + 2 if self._prefixed else 0

    # -- events

    def attempt_started(self, number: int, n: int) -> None:
        # Once lines have a prefix they keep it, even if only one rank is left.
        self._prefixed |= self._prefix_wanted and n > 1
        self._alone = self._prefix_wanted and not self._prefixed

    def rank_started(self, rank: int, hello: Message) -> None:
        if host := str(hello.get("host") or ""):
            self._labels.add(rank, host)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if self._ranks is not None and rank not in self._ranks:
            return
        key = rank, stream
        if self.terminal.is_terminal[self._fds[stream]] and (self._alone or rank in self._debugging):
            self._begun.discard(key)
            self._write(key, data)  # At once and unchanged, so that the user sees prompts.
            return
        splitter = self._splitters.get(key)
        if splitter is None:
            splitter = self._splitters[key] = LineSplitter()
        text, state = splitter.feed(data)
        if text:
            self._print_lines(key, text)
        if state:
            self._show_bar(key, state)
        if rank in self._asking or rank in self._debugging:
            if splitter.unfinished:
                self._prompt_times.setdefault(key, self._clock() + _PROMPT)
            else:
                self._prompt_times.pop(key, None)

    def rank_ended(self, rank: int, status: int) -> None:
        for stream in self._fds:
            key = rank, stream
            self._prompt_times.pop(key, None)
            if (splitter := self._splitters.pop(key, None)) and (text := splitter.close()):
                self._print_lines(key, text)
                self.has_last_word = False
            self._begun.discard(key)

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = ranks
        for key in self._splitters:
            if key[0] in ranks:
                self._print_prompt(key)

    def typed(self, data: bytes) -> None:
        """Called when the user has typed `data`, which the terminal has shown."""
        if b"\n" in data:
            self.terminal.typed()
            self._speaker = None

    def say(self, text: str, quoted: str = "") -> None:
        """Prints a sentence of the launcher to stderr, below all lines so far, and then the text that it quotes.

        text: may be "" if something is quoted: a traceback, a table. Escape sequences in both are made harmless.
        """
        sentence = f"ddp-launch: {one_line(text)}\n" if text else ""
        block = (sentence + quote(quoted)).rstrip("\n")
        self._speaker = None
        self.has_last_word = True
        self.terminal.lines(self._fds["err"], to_bytes(block) + b"\n")
        self.reporter(block)

    def tick(self, now: float) -> float:
        """Prints the prompts whose time has come. Returns: the time of the next one"""
        for key in [key for key, prompt_time in self._prompt_times.items() if prompt_time <= now]:
            del self._prompt_times[key]
            self._print_prompt(key)
        return min(self._prompt_times.values(), default=float("inf"))

    def remove_bar(self) -> None:
        """Removes the progress bar. Called at the end of the job."""
        self.terminal.bar(-1, b"")

    def close(self) -> None:
        self.remove_bar()
        self.flush()
        self.terminal.close()

    # -- writing

    @property
    def backlogged(self) -> bool:
        """Whether so many bytes wait for a slow reader that nothing more is read from ranks."""
        return self.terminal.backlog >= BACKLOG

    @property
    def unwritable(self) -> str:
        """A sentence with the error, if a stream cannot be written although it has a reader (full disk); else ""."""
        return f"the output cannot be written: {reason}" if (reason := self.terminal.reason) else ""

    def flush(self) -> None:
        """Writes as much as possible without blocking. If the output is `unwritable`, reports this once."""
        self.terminal.flush()
        if self.unwritable and not self._reported:
            self._reported = True
            self.say(self.unwritable)
            self.terminal.flush()

    def _print_lines(self, key: tuple[int, str], text: bytes) -> None:
        """Prints whole lines of one rank. The first may be the rest of a line whose beginning has been printed."""
        rank, stream = key
        fd = self._fds[stream]
        if rank == self._bar_rank and fd == self.terminal.bar_fd:
            self.terminal.bar(fd, b"")  # The first of these lines is the last state of the bar.
        if key in self._begun:
            self._begun.discard(key)
            rest, _, text = text.partition(b"\n")
            if self._speaker == key:
                self.terminal.part(fd, rest + b"\n")
                self._speaker = None
            elif rest:
                text = rest + b"\n" + text
            if not text:
                return
        if prefix := self._prefix(rank, fd):
            text = prefix + text[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        self._speaker = None
        self.terminal.lines(fd, text)

    def _show_bar(self, key: tuple[int, str], text: bytes) -> None:
        rank, stream = key
        fd = self._fds[stream]
        if rank == self._bar_rank and self.terminal.paints(fd):
            if self._speaker == key:
                self.terminal.end_line()
                self._speaker = None
            self._begun.discard(key)
            self.terminal.bar(fd, self._prefix(rank, fd) + text if text.strip() else b"")

    def _print_prompt(self, key: tuple[int, str]) -> None:
        """If the stream has an unfinished line, prints the part of it that has not been printed yet."""
        if not self._splitters[key].unfinished:
            return
        text = self._splitters[key].take()
        if key not in self._begun or self._speaker != key:
            text = self._prefix(key[0], self._fds[key[1]]) + text
            self.terminal.end_line()
        self._begun.add(key)
        self._write(key, text)

    def _write(self, key: tuple[int, str], data: bytes) -> None:
        """Writes data of one rank, which need not be whole lines."""
        if self._speaker != key:
            self.terminal.end_line()
        self.terminal.part(self._fds[key[1]], data)
        self.has_last_word = False
        self._speaker = None if data.endswith(b"\n") else key

    def _prefix(self, rank: int, fd: int) -> bytes:
        if not self._prefixed:
            return b""
        text = f"{self._labels[rank]}: "
        if self.terminal.is_terminal[fd] and self.terminal.colour:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()


class Labels:
    """The labels of `n` ranks, all of one width: `3` if there is one host, `node7:3` if there are several.

    hosts: names of the hosts, as far as they are known beforehand
    """

    def __init__(self, n: int, hosts: Iterable[str] = ()) -> None:
        self._digits = len(str(n - 1))
        self._names = {short(host) for host in hosts}
        self._hosts: dict[int, str] = {}

    def add(self, rank: int, host: str) -> None:
        """Records that `rank` runs on `host`."""
        self._hosts[rank] = short(host)
        self._names.add(short(host))

    @property
    def width(self) -> int:
        """Columns of a label."""
        return self._digits + (max(map(len, self._names)) + 1 if len(self._names) > 1 else 0)

    def __getitem__(self, rank: int) -> str:
        """The label of a rank, padded to `width`.

        >>> labels = Labels(12, ["node1.cluster", "node2.cluster"])
        >>> labels.add(3, "node2.cluster")
        >>> labels[3], labels[4]
        (' node2:3', '       4')
        """
        several = len(self._names) > 1 and rank in self._hosts
        label = f"{self._hosts[rank]}:{rank}" if several else str(rank)
        return label.rjust(self.width)


def short(host: str) -> str:
    """A host's name without its domain; an address stays unchanged.

    >>> short("node7.cluster.example"), short("10.0.0.7"), short("fe80::1")
    ('node7', '10.0.0.7', 'fe80::1')
    """
    name, _, domain = host.partition(".")
    return host if name.isdigit() or ":" in host or not domain else name
