"""Ranks as threads of one process: the transport of fast tests and of simulation.

Each collective is a row in a table that all ranks share. A rank writes its arrays into the row; the last one to arrive
does the work for everybody, in rank order, so the same inputs give the same bits whoever comes last.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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

#: Does a collective for all ranks, from what each one sends and where each one receives.
Work = Callable[[list[Any], list[Any]], None]


@dataclass(kw_only=True)
class _Call:
    """One collective. ranks: what each rank calls, sends and receives into; done: the work is finished."""

    ranks: dict[int, tuple[tuple[Any, ...], Any, Any]] = field(default_factory=dict)
    done: bool = False
    error: MismatchError | None = None


@dataclass(kw_only=True)
class _Message:
    """What one rank sends to another."""

    x: Array
    received: bool = False


class ThreadGroup:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._groups: dict[str, tuple[ThreadGroup, int]] = {}
        self._messages: dict[tuple[int, int, int, int], _Message] = {}
        self.mailboxes: list[deque[tuple[int, Array]]] = [deque() for _ in range(size)]

    def post(self, rank: int, number: int, what: tuple[Any, ...], x: Any, out: Any, work: Work) -> Test:
        """Adds a rank's arrays to collective `number`; the last rank to come does the work.

        what: everything that must be the same on all ranks
        """
        with self.lock:
            call = self._calls.setdefault(number, _Call())
            call.ranks[rank] = what, x, out
            if len(call.ranks) == self.size:
                del self._calls[number]
                call.error = self._finish([call.ranks[rank] for rank in range(self.size)], work)
                call.done = True
                call.ranks.clear()

        def test() -> bool:
            if call.error is not None:
                raise MismatchError(str(call.error)) from call.error.__cause__
            return call.done

        return test

    def _finish(self, ranks: list[tuple[tuple[Any, ...], Any, Any]], work: Work) -> MismatchError | None:
        """Does the work. Returns: what every rank raises, not only the one that came last."""
        if any(what != ranks[0][0] for what, _, _ in ranks):
            table = ", ".join(f"rank {rank} {what}" for rank, (what, _, _) in enumerate(ranks))
            return MismatchError(f"ranks made different calls: {table}")
        try:
            work([x for _, x, _ in ranks], [out for _, _, out in ranks])
        except Exception as error:
            mismatch = MismatchError(f"ranks' arrays do not fit each other: {error}")
            mismatch.__cause__ = error
            return mismatch
        return None

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to collective `number`; none if it is complete."""
        with self.lock:
            call = self._calls.get(number)
            return [] if call is None else [rank for rank in range(self.size) if rank not in call.ranks]

    def send(self, src: int, dst: int, tag: int, number: int, x: Array) -> Test:
        """Posts array `number` of those that src sends to dst under that tag."""
        if tag == EAGER_TAG:
            self.mailboxes[dst].append((src, x.copy()))
            return completed
        message = _Message(x=x)
        with self.lock:
            self._messages[src, dst, tag, number] = message
        return lambda: message.received

    def recv(self, src: int, dst: int, tag: int, number: int, out: Array) -> Test:
        """Takes that array once it is there."""
        done = False

        def test() -> bool:
            nonlocal done
            if not done:
                with self.lock:
                    message = self._messages.pop((src, dst, tag, number), None)
                if message is not None:
                    np.copyto(out, message.x)
                    message.received = done = True
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

    left: rank of the world → exit notice, shared by all communicators; members: the ranks of the world that are in this
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

    def _post(self, work: Work, what: tuple[Any, ...], x: Any = None, out: Any = None) -> Test:
        number, self._number = self._number, self._number + 1
        return self._group.post(self.rank, number, what, x, out, work)

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        self._headers = np.zeros((self.size, WORDS), np.int64)
        shown = np.zeros(WORDS, np.int64)
        shown[HASH : HASH + len(header)] = header
        return self._gather(shown, self._headers)

    def signatures(self) -> Signatures | None:
        return None if self._headers is None else self._headers.tolist()

    def all_prefixes(self, prefix: Array, buffer: Array) -> Test:
        return self._gather(prefix, buffer)

    def late(self) -> Sequence[int]:
        return self._group.missing(self._number - 1)

    def _gather(self, part: Array, buffer: Array) -> Test:
        return self.all_gather(part.view(np.uint8), buffer.reshape(-1).view(np.uint8), [part.nbytes] * self.size)

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        what = "all_reduce", op.value, x.dtype.str, x.size
        return then(self._post(_reducer(op, [slice(None)] * self.size), what, x, out), finish, out)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        what = "reduce", op.value, x.dtype.str, x.size, root
        return then(self._post(_reducer(op, [slice(None)] * self.size), what, x, out), finish, out)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        what = "reduce_scatter", op.value, x.dtype.str, tuple(counts)
        return then(self._post(_reducer(op, _slices(counts)), what, x, out), finish, out)

    def broadcast(self, x: Array, root: int) -> Test:
        return self._post(_joiner([root]), ("broadcast", x.size, root), x, None if self.rank == root else x)

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        return self._post(_joiner(range(self.size)), ("gather", tuple(counts), root), x, out)

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        return self._post(_joiner(range(self.size)), ("all_gather", tuple(counts)), x, out)

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        table = [counts if rank == root else [0] * self.size for rank in range(self.size)]
        return self._post(_exchanger(table), ("scatter", tuple(counts), root), x, out)

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        return self._post(_exchanger(table), ("all_to_all", tuple(map(tuple, table))), x, out)

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
        return self._post(lambda xs, outs: None, ("barrier",))

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


def _reducer(op: ReduceOp, parts: Sequence[slice]) -> Work:
    def work(xs: list[Any], outs: list[Any]) -> None:
        total = np.array(xs[0])  # in memory of its own: an in-place rank's result must not feed the next
        for x in xs[1:]:
            COMBINE[op](total, x, out=total)
        for out, part in zip(outs, parts, strict=True):
            if out is not None:
                np.copyto(out, total[part])

    return work


def _joiner(sources: Iterable[int]) -> Work:
    def work(xs: list[Any], outs: list[Any]) -> None:
        for out in outs:
            if out is not None:
                np.concatenate([xs[rank] for rank in sources], out=out)

    return work


def _exchanger(table: Sequence[Sequence[int]]) -> Work:
    def work(xs: list[Any], outs: list[Any]) -> None:
        parts = [_slices(sends) for sends in table]
        for d, out in enumerate(outs):
            np.concatenate([x[part[d]] for x, part in zip(xs, parts, strict=True) if x is not None], out=out)

    return work


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, start + count) for start, count in zip(offsets(counts), counts, strict=True)]
