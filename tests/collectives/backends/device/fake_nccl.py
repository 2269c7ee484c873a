"""NCCL on a `Machine`: the interface of `NcclCommunicator`, among ranks that are threads.

An operation waits on its stream until every rank's is at the head of its own; then all of them are done at once, from
the memory that the pointers name at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from collectives.backends.nccl.library import DTYPES
from collectives.errors import CollectivesError, NcclError
from collectives.reduction import COMBINE, ReduceOp, wire_op
from tests.collectives.backends.device.machine import Machine, Meeting


class FakeLibrary:
    """`Nccl`."""

    version = (2, 32, 3)


class Hub:
    """Where the ranks' operations find each other."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lock = threading.Lock()
        self.meetings: dict[tuple[bytes, int], Meeting] = {}
        self.captures: Any = None  # of a CuPy that captures graphs: `tests.gpu.capturing.Captures`
        self.ids = 0
        self.ends: list[FakeNccl] = []

    def unique_id(self, nccl: Any) -> bytes:
        with self.lock:
            self.ids += 1
            return self.ids.to_bytes(128, "little")

    def meeting(self, key: tuple[bytes, int], size: int) -> Meeting:
        with self.lock:
            return self.meetings.setdefault(key, Meeting(size, carry_out))


class FakeNccl:
    """`NcclCommunicator`."""

    def __init__(self, hub: Hub, nccl: Any, unique_id: bytes, rank: int, size: int, timeout: float) -> None:
        self.hub = hub
        self.nccl = nccl
        self.id = unique_id
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.number = 0
        hub.ends.append(self)
        self.group_of: list[tuple[Any, ...]] | None = None
        self.stream: int | None = None
        self.trouble: Exception | None = None
        self.aborted = self.closed = False
        self.reason: CollectivesError = NcclError("aborted")

    def all_reduce(self, send: int, recv: int, count: int, dtype: Any, op: Any, stream: int) -> None:
        self._add(stream, "all_reduce", send, recv, count, dtype, op)

    def reduce(self, send: int, recv: int, count: int, dtype: Any, op: Any, root: int, stream: int) -> None:
        self._add(stream, "reduce", send, recv, count, dtype, op, root)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: Any, op: Any, stream: int) -> None:
        self._add(stream, "reduce_scatter", send, recv, count, dtype, op)

    def broadcast(self, send: int, recv: int, count: int, dtype: Any, root: int, stream: int) -> None:
        self._add(stream, "broadcast", send, recv, count, dtype, None, root)

    def all_gather(self, send: int, recv: int, count: int, dtype: Any, stream: int) -> None:
        self._add(stream, "all_gather", send, recv, count, dtype)

    def send(self, pointer: int, count: int, dtype: Any, peer: int, stream: int) -> None:
        self._add(stream, "send", pointer, 0, count, dtype, None, peer)

    def recv(self, pointer: int, count: int, dtype: Any, peer: int, stream: int) -> None:
        self._add(stream, "recv", 0, pointer, count, dtype, None, peer)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        assert self.group_of is None
        self.group_of = []
        yield
        grouped = self.group_of
        self.group_of = None
        if self.stream is not None:
            self._start(self.stream, grouped)

    def async_error(self) -> Exception | None:
        return self.trouble

    def abort(self, reason: BaseException | None = None, timeout: float = 10.0) -> bool:
        self.aborted = True
        if isinstance(reason, CollectivesError):
            self.reason = reason
        return True

    def close(self, timeout: float = 10.0) -> bool:
        self.closed = True
        return True

    def _add(self, stream: int, *operation: Any) -> None:
        if self.aborted:
            raise self.reason
        padded = (*operation, *[None] * (7 - len(operation)))
        self.stream = stream
        if self.group_of is None:
            self._start(stream, [padded])
        else:
            self.group_of.append(padded)

    def _start(self, stream: int, operations: list[tuple[Any, ...]]) -> None:
        machine = self.hub.machine
        captures = self.hub.captures
        kind = f"nccl {' '.join(sorted({operation[0] for operation in operations}))}".strip()

        def meet() -> Meeting:
            meeting = self.hub.meeting((self.id, self.number), self.size)
            self.number += 1
            meeting.brought[self.rank] = operations
            return meeting

        with machine.lock:
            if captures is not None and captures.takes(stream):
                captures.add(stream, kind, None, meet)  # the ranks meet anew at each launch
            else:
                machine.put(stream, kind, meeting=meet())


def at(pointer: int, count: int, dtype: Any) -> Any:
    """The memory that a pointer names."""
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


def carry_out(brought: dict[int, list[tuple[Any, ...]]]) -> None:
    """Does what all ranks brought."""
    size = len(brought)
    letters: dict[tuple[int, int], list[Any]] = {}
    lines = {
        rank: [operation for operation in operations if operation[0] not in ("send", "recv")]
        for rank, operations in brought.items()
    }
    assert len({tuple((each[0], each[3], each[4], each[6]) for each in line) for line in lines.values()}) == 1, lines
    for step in range(len(lines[0])):
        collective([lines[rank][step] for rank in range(size)])
    for rank, operations in brought.items():
        for name, send, _, count, dtype, _, peer in operations:
            if name == "send":
                letters.setdefault((rank, peer), []).append(at(send, count, dtype).copy())
    for rank, operations in brought.items():
        for name, _, recv, count, dtype, _, peer in operations:
            if name == "recv":
                at(recv, count, dtype)[:] = letters[peer, rank].pop(0)
    assert not any(letters.values()), "sent, and never received"


def collective(each: list[tuple[Any, ...]]) -> None:
    name, _, _, count, dtype, _, root = each[0]
    size = len(each)
    if name == "broadcast":
        sent = at(each[root][1], count, dtype).copy()
        for one in each:
            at(one[2], count, dtype)[:] = sent
        return
    if name == "all_gather":
        whole = np.concatenate([at(one[1], count, dtype) for one in each])
        for one in each:
            at(one[2], count * size, dtype)[:] = whole
        return
    length = count * size if name == "reduce_scatter" else count
    assert dtype in DTYPES, f"NCCL has no {dtype}"
    assert dtype.kind != "f" or each[0][5] not in (ReduceOp.MAX, ReduceOp.MIN), "numbers win over a NaN there"
    total = reduced([at(one[1], length, dtype) for one in each], each[0][5])
    for rank, one in enumerate(each):
        if name == "reduce_scatter":
            at(one[2], count, dtype)[:] = total[rank * count : (rank + 1) * count]
        elif name == "all_reduce" or rank == root:
            at(one[2], count, dtype)[:] = total


def reduced(arrays: list[Any], op: ReduceOp) -> Any:
    with np.errstate(all="ignore"):
        total = arrays[0].copy()
        for array in arrays[1:]:
            COMBINE[wire_op(op)](total, array, out=total)
        return total / total.dtype.type(len(arrays)) if op is ReduceOp.MEAN else total
