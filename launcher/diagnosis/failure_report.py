"""Failure report: what is printed about a failed job.

Its last line is a sentence about the root cause. Other parts come before, each only if there is something to show: one
line about the failures of other ranks; the last lines of the rank that is the root cause, if the console has not shown
them; the traceback of this rank; and the engine's output, if it may explain more.
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
    describe_others,
    root_cause,
)
from launcher.diagnosis.observer import Observer
from launcher.protocol import to_text

# Number of lines that are kept of each rank.
_LINES = 20
# Maximum length of a line (bytes); of a longer line the end is kept.
_MAX_LINE = 2_000
# Maximum number of bytes that are kept of an unfinished line. More than `_MAX_LINE`, because the line may hold earlier
# states of a progress bar.
_MAX_UNFINISHED = 4 * _MAX_LINE


class Report(NamedTuple):
    """A report to be printed.

    blocks: each is a sentence and a text that it quotes; one of the two may be ""
    code: the job's exit code; sentence: that of the last block
    """

    blocks: list[tuple[str, str]]
    code: int
    sentence: str


def explain(failures: Sequence[Failure], engine_output: bytes, tail: Tail, several_hosts: bool) -> Report:
    """The report about a job that failed.

    failures: in the order in which the launcher learned of them, at least one
    engine_output: what the engine printed; tail: holds the last lines of ranks that the console does not show
    several_hosts: whether the job ran on several hosts; only then the sentences name hosts
    """
    if not several_hosts:
        local = RankFailed | AgentLost | EngineLost
        failures = [replace(failure, host="") if isinstance(failure, local) else failure for failure in failures]
    first = root_cause(failures, engine_output)
    blocks = []
    if others := describe_others(failures, first):
        blocks.append((f"failed too: {others}", ""))
    if (rank := _rank_of(first)) is not None and (lines := tail.lines(rank)):
        number = f"{len(lines)} lines" if len(lines) > 1 else "line"
        blocks.append((f"the last {number} of rank {rank}:", to_text(b"\n".join(lines))))
    if isinstance(first, RankFailed) and first.raised is not None and first.raised.traceback:
        blocks.append(("", first.raised.traceback))
    wrong_use = isinstance(first, NotStarted) and first.code == 2  # Then the sentence explains everything.
    # A traceback in the engine's output is that of an agent.
    unexplained = isinstance(first, EngineEnded | NotStarted) or b"Traceback" in engine_output
    if unexplained and not wrong_use and engine_output.strip():
        blocks.append(("", to_text(engine_output)))
    blocks.append((str(first), ""))
    return Report(blocks, first.code, str(first))


def _rank_of(failure: Failure) -> int | None:
    """The rank that a failure is about; None if there are several, or none."""
    if isinstance(failure, RankFailed | AgentLost):
        return failure.rank
    return failure.ranks[0] if isinstance(failure, Hung) and len(failure.ranks) == 1 else None


class Tail(Observer):
    """Keeps the last 20 lines of each rank that the console does not show, but at most 60 kB per rank.

    hidden: the ranks that the console does not show
    """

    def __init__(self, hidden: frozenset[int] = frozenset()) -> None:
        self.hidden = hidden
        self._lines: dict[int, deque[bytes]] = {}
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def attempt_started(self, number: int, n: int) -> None:
        self._lines.clear()
        self._unfinished.clear()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if rank in self.hidden:
            *lines, unfinished = (self._unfinished.get((rank, stream), b"") + data).split(b"\n")
            self._unfinished[rank, stream] = unfinished[-_MAX_UNFINISHED:]
            self._lines.setdefault(rank, deque(maxlen=_LINES)).extend(map(_visible, lines[-_LINES:]))

    def lines(self, rank: int) -> list[bytes]:
        """The last lines of a hidden rank, without newlines, including unfinished lines."""
        unfinished = [_visible(self._unfinished.get((rank, stream), b"")) for stream in ("out", "err")]
        return [*self._lines.get(rank, ()), *filter(None, unfinished)][-_LINES:]


def _visible(line: bytes) -> bytes:
    r"""The part of a line that a terminal would show: of the parts between `\r`, the last one that is not blank.

    If that part is longer than 2,000 bytes: `[...] ` and its last 2,000 bytes.
    """
    visible = next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
    return visible if len(visible) <= _MAX_LINE else b"[...] " + visible[-_MAX_LINE:]
