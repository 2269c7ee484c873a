"""Failure report: one report about the failure that explains the others.

The last line is one sentence; above it comes the traceback, above that the last lines of that rank, and first what else
failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from launcher.diagnosis.failures import (
    AgentLost,
    EngineEnded,
    EngineLost,
    Failure,
    Hung,
    NotStarted,
    RankFailed,
    others,
    root_cause,
)
from launcher.diagnosis.observer import Observer

_KEPT = 20  # lines of each rank
_WIDEST = 2_000  # bytes of a line
_UNFINISHED = 4 * _WIDEST  # bytes of a line that is being written, with what a bar showed before
# On what is no terminal, a screen is as high as it has always been.
_SCREEN = 24


class Report(NamedTuple):
    """blocks: texts, to be printed one after the other; code: the job's exit code; sentence: the last block's"""

    blocks: list[str]
    code: int
    sentence: str


def explain(failures: Sequence[Failure], engine_output: bytes, tails: Tail, several_hosts: bool) -> Report:
    """The report on a job that failed.

    failures: what went wrong, in the order in which it was learned, at least one; engine_output: what the engine said
    several_hosts: ranks ran on more than one, so that sentences say where
    """
    if not several_hosts:
        local = RankFailed | AgentLost | EngineLost
        failures = [replace(failure, host="") if isinstance(failure, local) else failure for failure in failures]
    first = root_cause(failures, engine_output)
    blocks = []
    if also := others(failures, first):
        blocks.append(f"ddp-launch: failed too: {also}")
    if (rank := _one_rank(first)) is not None and (lines := tails.hidden_lines(rank)):
        head = f"ddp-launch: the last {len(lines)} lines of rank {rank}:" if len(lines) > 1 else ""
        text = b"\n".join(lines).decode("utf-8", "surrogateescape")
        blocks.append(f"{head or f'ddp-launch: the last line of rank {rank}:'}\n{text}")
    if isinstance(first, RankFailed) and first.raised is not None and first.raised.traceback:
        blocks.append(first.raised.traceback)
    # An agent's own last words come through the engine too.
    clear = isinstance(first, NotStarted) and first.code == 2  # wrong use, and its sentence says all
    unexplained = isinstance(first, EngineEnded | NotStarted) or b"Traceback" in engine_output
    if unexplained and not clear and engine_output.strip():
        blocks.append(engine_output.decode("utf-8", "surrogateescape"))
    blocks.append(f"ddp-launch: {first}")
    return Report(blocks, first.code, str(first))


def _one_rank(failure: Failure) -> int | None:
    """The rank that it is about, if it is one."""
    if isinstance(failure, RankFailed | AgentLost):
        return failure.rank
    return failure.ranks[0] if isinstance(failure, Hung) and len(failure.ranks) == 1 else None


class _Stream:
    """The line that a rank is writing to one of its streams."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes, kept: int) -> list[bytes]:
        """The last `kept` lines at most that `data` finishes."""
        *lines, rest = data.rsplit(b"\n", kept)
        if not lines:
            self.rest = (self.rest + rest)[-_UNFINISHED:]
            return []
        # The first piece may hold more lines, too old for us.
        lines[0] = lines[0].rpartition(b"\n")[2] if b"\n" in lines[0] else self.rest + lines[0]
        self.rest = rest[-_UNFINISHED:]
        return [_visible(line) for line in lines]


def _visible(line: bytes) -> bytes:
    r"""What a line shows: of a bar that was repainted by `\r`, its last state; of a long one, its end."""
    shown = next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
    return shown if len(shown) <= _WIDEST else b"[...] " + shown[-_WIDEST:]


class Tail(Observer):
    """Keeps each rank's last 20 lines, of stdout and stderr as they came; a few kilobytes a rank, whatever it writes.

    hidden: ranks whose lines the console does not show
    screen: height of the terminal in lines
    """

    def __init__(self, hidden: frozenset[int] = frozenset(), screen: int = _SCREEN) -> None:
        self.hidden = hidden
        self._terminal = screen
        self._begin()

    def _begin(self) -> None:
        self._streams: dict[tuple[int, str], _Stream] = {}
        # Of each line also how many others had been shown before it.
        self._lines: dict[int, deque[tuple[int, bytes]]] = {}
        self._shown = 0
        self._own: dict[int, int] = {}

    def attempt_started(self, number: int, n: int) -> None:
        self._begin()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        finished = data.count(b"\n")
        if rank not in self.hidden:
            self._shown += finished
            self._own[rank] = self._own.get(rank, 0) + finished
        before = self._foreign(rank)
        kept = self._lines.setdefault(rank, deque(maxlen=_KEPT))
        for line in self._streams.setdefault((rank, stream), _Stream()).feed(data, _KEPT):
            kept.append((before, line))

    def rank_ended(self, rank: int, status: int) -> None:
        for stream in ("out", "err"):  # what it left unfinished
            unfinished = self._streams.pop((rank, stream), None)
            if unfinished is not None and (line := _visible(unfinished.rest)):
                self._lines[rank].append((self._foreign(rank), line))

    def lines(self, rank: int) -> list[bytes]:
        """The last lines of a rank, without their ends."""
        return [line for _, line in self._lines.get(rank, ())]

    def hidden_lines(self, rank: int) -> list[bytes]:
        """The last lines of a rank if they cannot be read together on the console, else none.

        That is so if the rank was hidden, or if others have shown more than a screen of lines since the first of these.
        """
        kept = self._lines.get(rank)
        if not kept:
            return []
        if rank in self.hidden or self._foreign(rank) - kept[0][0] > self._terminal:
            return self.lines(rank)
        return []

    def _foreign(self, rank: int) -> int:
        """Lines of others that the console has shown."""
        return self._shown - self._own.get(rank, 0)
