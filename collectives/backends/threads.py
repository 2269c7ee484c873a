"""Ranks as threads of one process: the transport of fast tests and of simulation.

Each collective is a row in a table that all ranks share. A rank writes its arrays into the row; the last one to arrive
does the work for everybody, in rank order, so the same inputs give the same bits whoever comes last.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectives.errors import MismatchError
from collectives.exit_notice import ExitNotice, among
from collectives.reduction import COMBINE, Array, ReduceOp
from collectives.transport import (
    EAGER_TAG,
    HASH,
    WORDS,
    Finish,
    Signature,
    Signatures,
    Test,
    Transport,
    completed,
    offsets,
    then,
)


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


@dataclass(kw_only=True)
class _Message:
    """What one rank sends to another. taken: received"""

    x: Array
    taken: bool = False


class ThreadGroup:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._rows: dict[int, _Row] = {}
        self._groups: dict[str, tuple[ThreadGroup, int]] = {}
        self._messages: dict[tuple[int, int, int, int], _Message] = {}
        self.mailboxes: list[deque[tuple[int, Array]]] = [deque() for _ in range(size)]

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

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to collective `number`; none if it is complete."""
        with self.lock:
            row = self._rows.get(number)
            return [] if row is None else [rank for rank in range(self.size) if rank not in row.parts]

    def send(self, src: int, dst: int, tag: int, number: int, x: Array) -> Test:
        """Posts array `number` of those that src sends to dst under that tag."""
        if tag == EAGER_TAG:
            self.mailboxes[dst].append((src, x.copy()))
            return completed
        letter = _Message(x=x)
        with self.lock:
            self._messages[src, dst, tag, number] = letter
        return lambda: letter.taken

    def recv(self, src: int, dst: int, tag: int, number: int, out: Array) -> Test:
        """Takes that array once it is there."""
        done = False

        def test() -> bool:
            nonlocal done
            if not done:
                with self.lock:
                    letter = self._messages.pop((src, dst, tag, number), None)
                if letter is not None:
                    np.copyto(out, letter.x)
                    letter.taken = done = True
            return done

        return test

    def part(self, key: str, size: int) -> ThreadGroup:
        """The group of `size` of these ranks with the communicator called `key`: the first rank to ask makes it."""
        with self.lock:
            group, ranks = self._groups.pop(key, (ThreadGroup(size), 0))
            if ranks + 1 < size:  # kept until every rank has it
                self._groups[key] = group, ranks + 1
            return group


class ThreadTransport(Transport):
    """One thread's end of a `ThreadGroup`.

    left: rank of the world → departure, shared by all communicators; members: the ranks of the world that are in this
    """

    name = "threads"
    node = 0

    def __init__(
        self,
        group: ThreadGroup,
        rank: int,
        left: Mapping[int, ExitNotice],
        key: str = "world",
        members: Sequence[int] | None = None,
    ) -> None:
        self.key = key
        self.rank = self.local_rank = rank
        self.size = self.local_size = group.size
        self._group = group
        self._left = left
        self._members = list(range(group.size)) if members is None else members
        self._number = 0
        self._headers: Array | None = None
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()

    def _post(self, work: Callable[[list[_Part]], None], what: tuple[Any, ...], x: Any = None, out: Any = None) -> Test:
        number, self._number = self._number, self._number + 1
        return self._group.post(self.rank, number, _Part(what=what, x=x, out=out), work)

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        self._headers = np.zeros((self.size, WORDS), np.int64)
        shown = np.zeros(WORDS, np.int64)
        shown[HASH : HASH + len(header)] = header
        return self._gather(shown, self._headers)

    def signatures(self) -> Signatures | None:
        return None if self._headers is None else self._headers.tolist()

    def all_prefixes(self, prefix: Array, room: Array) -> Test:
        return self._gather(prefix, room)

    def late(self) -> Sequence[int]:
        return self._group.missing(self._number - 1)

    def _gather(self, part: Array, room: Array) -> Test:
        return self.all_gather(part.view(np.uint8), room.reshape(-1).view(np.uint8), [part.nbytes] * self.size)

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        return then(self._post(_reducer(op), ("all_reduce", op.value, x.dtype.str, x.size), x, out), finish, out)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        return then(self._post(_reducer(op), ("reduce", op.value, x.dtype.str, x.size, root), x, out), finish, out)

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

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        def work(parts: list[_Part]) -> None:
            total = np.array(parts[0].x)
            for part in parts[1:]:
                COMBINE[op](total, part.x, out=total)
            for part, start, count in zip(parts, offsets(counts), counts, strict=True):
                np.copyto(part.out, total[start : start + count])

        return then(self._post(work, ("reduce_scatter", op.value, x.dtype.str, tuple(counts)), x, out), finish, out)

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        return self._post(_exchange(table), ("all_to_all", tuple(map(tuple, table))), x, out)

    def send(self, x: Array, dst: int, tag: int) -> Test:
        number = self._sent[dst, tag]
        self._sent[dst, tag] += 1
        return self._group.send(self.rank, dst, tag, number, x)

    def recv(self, out: Array, src: int, tag: int) -> Test:
        number = self._received[src, tag]
        self._received[src, tag] += 1
        return self._group.recv(src, self.rank, tag, number, out)

    def arrived(self) -> tuple[int, Array] | None:
        mailbox = self._group.mailboxes[self.rank]
        return mailbox.popleft() if mailbox else None

    def barrier(self) -> Test:
        return self._post(lambda parts: None, ("barrier",))

    def duplicate(self, key: str) -> tuple[ThreadTransport, Test]:
        return self._part(list(range(self.size)), key), self.barrier()

    def split(self, members: Sequence[int] | None, key: str) -> tuple[ThreadTransport | None, Test]:
        return None if members is None else self._part(members, key), self.barrier()

    def group(self, members: Sequence[int], key: str, missing: list[int]) -> tuple[ThreadTransport, Test]:
        part = self._part(members, key)
        met = part.barrier()

        def test() -> bool:
            missing[:] = [members[rank] for rank in part.late()]
            return met()

        return part, test

    def _part(self, members: Sequence[int], key: str) -> ThreadTransport:
        group = self._group.part(key, len(members))
        everyones = [self._members[rank] for rank in members]
        return ThreadTransport(group, members.index(self.rank), self._left, key, everyones)

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return among(self._members, self._left)


def _reducer(op: ReduceOp) -> Callable[[list[_Part]], None]:
    def work(parts: list[_Part]) -> None:
        total = np.array(parts[0].x)  # in memory of its own: an in-place rank's result must not feed the next
        for part in parts[1:]:
            COMBINE[op](total, part.x, out=total)
        for part in parts:
            if part.out is not None:
                np.copyto(part.out, total)

    return work


def _exchange(table: Sequence[Sequence[int]]) -> Callable[[list[_Part]], None]:
    def work(parts: list[_Part]) -> None:
        for d, receiver in enumerate(parts):
            starts = [offsets(sends)[d] for sends in table]
            came = [part.x[at : at + sends[d]] for part, sends, at in zip(parts, table, starts, strict=True)]
            np.concatenate(came, out=receiver.out)

    return work


def _join(parts: list[_Part]) -> None:
    pieces = [part.x for part in parts if part.x is not None]
    for part in parts:
        if part.out is not None:
            np.concatenate(pieces, out=part.out)
