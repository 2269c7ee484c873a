"""Ranks as threads of one process: the transport of fast tests and of simulation.

Each collective is a row on a board that all ranks share. A rank writes its arrays into the row; the last one to arrive
does the work for everybody, in rank order, so the same inputs give the same bits whoever comes last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectives.departure import Departure
from collectives.errors import MismatchError
from collectives.reduction import COMBINE, Array, ReduceOp
from collectives.transport import Test, offsets


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank brings to a collective. what: everything that must be the same on all ranks."""

    what: tuple[Any, ...]
    x: Any = None
    out: Any = None


@dataclass(kw_only=True)
class _Row:
    """One collective. done: every rank arrived and the work is finished."""

    parts: dict[int, _Part] = field(default_factory=dict)
    done: bool = False
    error: Exception | None = None


class Board:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._rows: dict[int, _Row] = {}
        self._duplicates: dict[str, tuple[Board, int]] = {}

    def post(self, rank: int, number: int, part: _Part, work: Callable[[list[_Part]], None]) -> Test:
        """Adds `rank`'s part to collective `number`; the last rank to come does the work."""
        with self.lock:
            row = self._rows.setdefault(number, _Row())
            row.parts[rank] = part
            if len(row.parts) == self.size:
                del self._rows[number]
                self._finish(row, work)

        def test() -> bool:
            if row.error is not None:
                raise MismatchError(str(row.error)) from row.error.__cause__
            return row.done

        return test

    def _finish(self, row: _Row, work: Callable[[list[_Part]], None]) -> None:
        parts = [row.parts[rank] for rank in range(self.size)]
        if all(part.what == parts[0].what for part in parts):
            try:
                work(parts)
                row.done = True
            except Exception as error:  # every rank must hear of it, not only the one that came last
                row.error = MismatchError(f"ranks' arrays do not fit each other: {error}")
                row.error.__cause__ = error
        else:
            table = ", ".join(f"rank {rank} {part.what}" for rank, part in enumerate(parts))
            row.error = MismatchError(f"ranks made different calls: {table}")
        row.parts.clear()

    def duplicate(self, key: str) -> Board:
        """The board of the duplicate called `key`: the first rank to ask makes it."""
        with self.lock:
            board, ranks = self._duplicates.pop(key, (Board(self.size), 0))
            if ranks + 1 < self.size:  # kept until every rank has it
                self._duplicates[key] = board, ranks + 1
            return board


class ThreadTransport:
    """One thread's end of a board.

    left: rank → departure, shared by all communicators of the world
    """

    name = "threads"
    node = 0

    def __init__(self, board: Board, rank: int, left: Mapping[int, Departure], key: str = "world") -> None:
        self.key = key
        self.rank = self.local_rank = rank
        self.size = self.local_size = board.size
        self._board = board
        self._left = left
        self._number = 0

    def _post(self, work: Callable[[list[_Part]], None], what: tuple[Any, ...], x: Any = None, out: Any = None) -> Test:
        number, self._number = self._number, self._number + 1
        return self._board.post(self.rank, number, _Part(what=what, x=x, out=out), work)

    def all_reduce(self, x: Array, out: Array, op: ReduceOp) -> Test:
        return self._post(_reducer(op), ("all_reduce", op.value, x.dtype.str, x.size), x, out)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int) -> Test:
        return self._post(_reducer(op), ("reduce", op.value, x.dtype.str, x.size, root), x, out)

    def broadcast(self, x: Array, root: int) -> Test:
        def work(parts: list[_Part]) -> None:
            for part in parts:
                if part.x is not parts[root].x:
                    np.copyto(part.x, parts[root].x)

        return self._post(work, ("broadcast", x.size, root), x)

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        return self._post(_join, ("gather", tuple(counts), root), x, out)

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        return self._post(_join, ("all_gather", tuple(counts)), x, out)

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        def work(parts: list[_Part]) -> None:
            whole = parts[root].x
            for part, start, count in zip(parts, offsets(counts), counts, strict=True):
                np.copyto(part.out, whole[start : start + count])

        return self._post(work, ("scatter", tuple(counts), root), x, out)

    def barrier(self) -> Test:
        return self._post(lambda parts: None, ("barrier",))

    def duplicate(self, key: str) -> tuple[ThreadTransport, Test]:
        return ThreadTransport(self._board.duplicate(key), self.rank, self._left, key), self.barrier()

    def close(self) -> None:
        return  # the board goes with its last user

    def departures(self) -> Mapping[int, Departure]:
        return dict(self._left)


def _reducer(op: ReduceOp) -> Callable[[list[_Part]], None]:
    def work(parts: list[_Part]) -> None:
        total = np.array(parts[0].x)  # in memory of its own: an in-place rank's result must not feed the next
        for part in parts[1:]:
            COMBINE[op](total, part.x, out=total)
        for part in parts:
            if part.out is not None:
                np.copyto(part.out, total)

    return work


def _join(parts: list[_Part]) -> None:
    pieces = [part.x for part in parts if part.x is not None]
    for part in parts:
        if part.out is not None:
            np.concatenate(pieces, out=part.out)
