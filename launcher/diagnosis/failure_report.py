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


class Report(NamedTuple):
    """A report to be printed.

    blocks: in their order, each a sentence and what it quotes; one of the two may be ""
    code: the job's exit code; sentence: the last block's
    """

    blocks: list[tuple[str, str]]
    code: int
    sentence: str


def explain(failures: Sequence[Failure], engine_output: bytes, tail: Tail, several_hosts: bool) -> Report:
    """The report on a job that failed.

    failures: what went wrong, in the order in which it was learned, at least one
    engine_output: what the engine printed; tail: the last lines of ranks that the console does not show
    several_hosts: ranks ran on more than one, so that sentences say where
    """
    if not several_hosts:
        local = RankFailed | AgentLost | EngineLost
        failures = [replace(failure, host="") if isinstance(failure, local) else failure for failure in failures]
    first = root_cause(failures, engine_output)
    blocks = []
    if also := others(failures, first):
        blocks.append((f"failed too: {also}", ""))
    if (rank := _one_rank(first)) is not None and (lines := tail.lines(rank)):
        number = f"{len(lines)} lines" if len(lines) > 1 else "line"
        text = b"\n".join(lines).decode("utf-8", "surrogateescape")
        blocks.append((f"the last {number} of rank {rank}:", text))
    if isinstance(first, RankFailed) and first.raised is not None and first.raised.traceback:
        blocks.append(("", first.raised.traceback))
    # An agent's own last error comes through the engine too.
    clear = isinstance(first, NotStarted) and first.code == 2  # wrong use, and its sentence says all
    unexplained = isinstance(first, EngineEnded | NotStarted) or b"Traceback" in engine_output
    if unexplained and not clear and engine_output.strip():
        blocks.append(("", engine_output.decode("utf-8", "surrogateescape")))
    blocks.append((str(first), ""))
    return Report(blocks, first.code, str(first))


def _one_rank(failure: Failure) -> int | None:
    """The rank that it is about, if it is one."""
    if isinstance(failure, RankFailed | AgentLost):
        return failure.rank
    return failure.ranks[0] if isinstance(failure, Hung) and len(failure.ranks) == 1 else None


class Tail(Observer):
    """Keeps the last 20 lines of each rank that the console does not show: a few kilobytes a rank, whatever it writes.

    hidden: these ranks
    """

    def __init__(self, hidden: frozenset[int] = frozenset()) -> None:
        self.hidden = hidden
        self._lines: dict[int, deque[bytes]] = {}
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def attempt_started(self, number: int, n: int) -> None:
        self._lines, self._unfinished = {}, {}

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if rank in self.hidden:
            *lines, rest = (self._unfinished.get((rank, stream), b"") + data).split(b"\n")
            self._unfinished[rank, stream] = rest[-_UNFINISHED:]
            self._lines.setdefault(rank, deque(maxlen=_KEPT)).extend(map(_visible, lines[-_KEPT:]))

    def lines(self, rank: int) -> list[bytes]:
        """The last lines of a hidden rank, without their ends, and what it left unfinished."""
        unfinished = [_visible(self._unfinished.get((rank, stream), b"")) for stream in ("out", "err")]
        return [*self._lines.get(rank, ()), *filter(None, unfinished)][-_KEPT:]


def _visible(line: bytes) -> bytes:
    r"""What a line shows: of a bar that was repainted by `\r`, its last state; of a long one, its end."""
    shown = next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
    return shown if len(shown) <= _WIDEST else b"[...] " + shown[-_WIDEST:]
