"""Ranks as threads of one process, for fast tests and for simulation.

Each collective is an entry in a table that all ranks share. A rank adds its arrays to the entry, and the last rank to
arrive does the work for all. Reductions are in the order of `reduction.tree`, so that the same inputs give the same
bits whichever rank is last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.errors import MismatchError
from collectives.reduction import COMBINE, Array, ReduceOp, combine_in_tree
from collectives.transport import (
    EAGER_TAG,
    Epilogue,
    ExitNotice,
    Steps,
    Test,
    Transport,
    completed,
    notices_of,
    offsets,
    then,
)

#: Does a collective for all ranks. Takes all ranks' inputs and all ranks' outputs, both in rank order.
Execute = Callable[[list[Any], list[Any]], None]


class _Call:
    """One collective: each rank's input and output arrays, and the outcome."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[Any, Any]] = {}
        self.done = False
        self.error: Exception | None = None


class ThreadGroup:
    """The state that the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._groups: dict[str, tuple[ThreadGroup, int]] = {}
        # Key: source, destination, tag. Value: the arrays in the order of sending, each with a list to which True is
        # appended once the array is received.
        self._messages: dict[tuple[int, int, int], deque[tuple[Array, list[bool]]]] = {}
        self.mailboxes: list[deque[tuple[int, Array]]] = [deque() for _ in range(size)]

    def post(self, rank: int, number: int, x: Any, out: Any, execute: Execute) -> Test:
        """Adds a rank's arrays to collective `number`; the last rank executes it for all."""
        with self.lock:
            call = self._calls.setdefault(number, _Call())
            call.ranks[rank] = x, out
            if len(call.ranks) == self.size:
                del self._calls[number]
                ranks = [call.ranks[rank] for rank in range(self.size)]
                try:
                    execute([x for x, _ in ranks], [out for _, out in ranks])
                except Exception as error:  # Raised by every rank, not only by the last one.
                    call.error = error
                call.done = True
                call.ranks.clear()

        def test() -> bool:
            if call.error is not None:
                raise MismatchError(f"ranks' arrays do not fit each other: {call.error}") from call.error
            return call.done

        return test

    def missing(self, number: int) -> list[int]:
        """The ranks that have not called collective `number`; none if it is complete."""
        with self.lock:
            call = self._calls.get(number)
            return [] if call is None else [rank for rank in range(self.size) if rank not in call.ranks]

    def send(self, src: int, dst: int, tag: int, x: Array) -> Test:
        """Posts an array that rank src sends to rank dst."""
        if tag == EAGER_TAG:
            self.mailboxes[dst].append((src, x.copy()))
            return completed
        received: list[bool] = []
        with self.lock:
            self._messages.setdefault((src, dst, tag), deque()).append((x, received))
        return lambda: bool(received)

    def recv(self, src: int, dst: int, tag: int, out: Array) -> Test:
        """Receives into `out` the next array that rank src has sent to rank dst with this tag."""
        done = False

        def test() -> bool:
            nonlocal done
            if not done and (messages := self._messages.get((src, dst, tag))):
                with self.lock:
                    x, received = messages.popleft()
                    if not messages:
                        del self._messages[src, dst, tag]
                np.copyto(out, x)
                received.append(True)
                done = True
            return done

        return test

    def part(self, key: str, size: int) -> ThreadGroup:
        """The shared state of the new communicator `key`, made by the first caller. size: its number of ranks"""
        with self.lock:
            group, ranks = self._groups.pop(key, (ThreadGroup(size), 0))
            if ranks + 1 < size:  # Kept until every rank has got it.
                self._groups[key] = group, ranks + 1
            return group


class ThreadTransport(Transport):
    """One thread's end of a `ThreadGroup`.

    world_notices: exit notices by rank of the world; all communicators share them
    members: for each rank, its rank in the world
    """

    name = "threads"
    combines_in_tree = True
    node = 0

    def __init__(
        self,
        group: ThreadGroup,
        rank: int,
        world_notices: Mapping[int, ExitNotice],
        key: str = "world",
        members: Sequence[int] | None = None,
    ) -> None:
        self.key = key
        self.rank = self.local_rank = rank
        self.size = self.local_size = group.size
        self._group = group
        self._world_notices = world_notices
        self._members = list(range(group.size)) if members is None else members
        self._number = 0

    def _post(self, execute: Execute, x: Any = None, out: Any = None) -> Test:
        number = self._number
        self._number += 1
        return self._group.post(self.rank, number, x, out, execute)

    def late(self) -> Sequence[int]:
        return self._group.missing(self._number - 1)

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Test:
        return self.reduce(x, out, op, 0, epilogue)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        return then(self._post(_reduce(op, [slice(None)] * self.size), x, out), epilogue, out)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
    ) -> Test:
        return then(self._post(_reduce(op, _slices(counts)), x, out), epilogue, out)

    def broadcast(self, x: Array, root: int) -> Test:
        return self._post(_move({root: [slice(None)] * self.size}), x, None if self.rank == root else x)

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int = 0) -> Test:
        return self._post(_move(dict.fromkeys(range(self.size), [slice(None)] * self.size)), x, out)

    all_gather = gather

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        return self._post(_move({root: _slices(counts)}), x, out)

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        return self._post(_move({rank: _slices(sends) for rank, sends in enumerate(table)}), x, out)

    def send(self, x: Array, dst: int, tag: int) -> Test:
        return self._group.send(self.rank, dst, tag, x)

    def recv(self, out: Array, src: int, tag: int) -> Test:
        return self._group.recv(src, self.rank, tag, out)

    def arrived(self) -> tuple[int, Array] | None:
        mailbox = self._group.mailboxes[self.rank]
        return mailbox.popleft() if mailbox else None

    def barrier(self) -> Test:
        return self._post(lambda xs, outs: None)

    def group(self, members: Sequence[int], key: str, number: int) -> Steps[ThreadTransport]:
        part = self._part(members, key)
        yield part.barrier()
        return part

    def _part(self, members: Sequence[int], key: str) -> ThreadTransport:
        group = self._group.part(key, len(members))
        world_ranks = [self._members[rank] for rank in members]
        return ThreadTransport(group, members.index(self.rank), self._world_notices, key, world_ranks)

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return notices_of(self._members, self._world_notices)


def _reduce(op: ReduceOp, parts: Sequence[slice]) -> Execute:
    """Returns a function that reduces all ranks' arrays, and copies to each rank its part of the total."""

    def execute(xs: list[Any], outs: list[Any]) -> None:
        total = combine_in_tree(xs, COMBINE[op])  # Not into an `out`, which may be None or hold only a part.
        for out, part in zip(outs, parts, strict=True):
            if out is not None:
                np.copyto(out, total[part])

    return execute


def _move(sources: Mapping[int, Sequence[slice]]) -> Execute:
    """Returns a function that joins, for each rank, the parts sent to it.

    sources: for each sending rank, the slices of its array, one for each destination
    """

    def execute(xs: list[Any], outs: list[Any]) -> None:
        for dst, out in enumerate(outs):
            if out is not None:
                np.concatenate([xs[src][parts[dst]] for src, parts in sources.items()], out=out)

    return execute


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, start + count) for start, count in zip(offsets(counts), counts, strict=True)]
