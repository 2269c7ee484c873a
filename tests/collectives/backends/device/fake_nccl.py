"""NCCL on a `Machine`: the interface of `NcclCommunicator`, among ranks that are threads.

An operation waits on its stream until every rank's is at the head of its own; then all of them are done at once, from
the memory that the pointers name at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collectives.backends.nccl.nccl_communicator import Registered
from collectives.errors import CollectivesError, NcclError
from collectives.reduction import COMBINE, ReduceOp
from tests.collectives.backends.device.machine import GARBAGE, Machine, Meeting


class FakeLibrary:
    """`Nccl`. lacks: functions that an older one has not"""

    def __init__(self, version: tuple[int, int, int] = (2, 32, 3), lacks: tuple[str, ...] = ()) -> None:
        self.version = version
        self.lacks = lacks
        self.memory: dict[int, Any] = {}
        self.freed: list[int] = []

    def has(self, name: str) -> bool:
        return name not in self.lacks

    def checked(self, name: str, *arguments: Any) -> None:
        """Memory of NCCL's own: kept until the end, so that a stray pointer hits garbage and no other process."""
        if name == "ncclMemAlloc":
            made, nbytes = arguments
            raw = np.full(nbytes, GARBAGE, np.uint8)
            self.memory[raw.ctypes.data] = raw
            made._obj.value = raw.ctypes.data
        else:
            assert name == "ncclMemFree"
            self.memory[arguments[0]].fill(GARBAGE)
            self.freed.append(arguments[0])


class Hub:
    """Where the ranks' operations find each other."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lock = threading.Lock()
        self.meetings: dict[tuple[bytes, int], Meeting] = {}
        self.captures: Any = None  # of a CuPy that captures graphs: `tests.gpu.capturing.Captures`
        self.calls: list[tuple[int, str]] = []  # (rank, what NCCL was asked for)
        self.ids = 0
        self.ends: list[FakeNccl] = []
        self.changed = threading.Condition()
        self.splits: dict[tuple[bytes, int], dict[int, tuple[int | None, int]]] = {}

    def unique_id(self, nccl: Any) -> bytes:
        with self.lock:
            self.ids += 1
            return self.ids.to_bytes(128, "little")

    def meeting(self, key: tuple[bytes, int], size: int) -> Meeting:
        with self.lock:
            return self.meetings.setdefault(key, Meeting(size, carry_out))


class PreMul:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.open = True

    def __enter__(self) -> PreMul:
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False


class FakeNccl:
    """`NcclCommunicator`."""

    def __init__(self, hub: Hub, nccl: Any, unique_id: bytes, rank: int, size: int, timeout: float) -> None:
        self.hub, self.nccl, self.id = hub, nccl, unique_id
        self.rank, self.size, self.timeout = rank, size, timeout
        self.number = self.split_number = 0
        hub.ends.append(self)
        self.group_of: list[tuple[Any, ...]] | None = None
        self.stream: int | None = None
        self.trouble: Exception | None = None
        self.aborted = self.closed = False
        self.reason: CollectivesError = NcclError("aborted")
        self.threads: set[str] = set()

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
        grouped, self.group_of = self.group_of, None
        assert all(not isinstance(each[5], PreMul) or each[5].open for each in grouped), "closed within its group"
        if self.stream is not None:
            self._start(self.stream, grouped)

    def pre_mul_sum(self, factor: float, dtype: Any) -> PreMul:
        assert self.group_of is None, "made and closed around the group"
        return PreMul(factor)

    def split(self, color: int | None, key: int) -> FakeNccl | None:
        assert self.group_of is None
        self.hub.calls.append((self.rank, "split"))
        with self.hub.changed:
            asked = self.hub.splits.setdefault((self.id, self.split_number), {})
            asked[self.rank] = color, key
            self.hub.changed.notify_all()
            assert self.hub.changed.wait_for(lambda: len(asked) == self.size, 20), f"only {sorted(asked)} split"
        self.split_number += 1
        if color is None:
            return None
        members = sorted((key, rank) for rank, (other, key) in asked.items() if other == color)
        name = self.id[:32] + bytes([self.split_number, color + 1]).ljust(96, b"s")
        return FakeNccl(self.hub, self.nccl, name, members.index((key, self.rank)), len(members), self.timeout)

    def register(self, pointer: int, nbytes: int) -> Registered:
        self.hub.calls.append((self.rank, "register"))
        assert pointer in self.nccl.memory
        return Registered(True, ctypes.c_void_p(pointer))

    def deregister(self, what: Registered) -> None:
        self.hub.calls.append((self.rank, "deregister"))

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
        self.threads.add(threading.current_thread().name)
        padded = (*operation, *[None] * (7 - len(operation)))
        name, op = padded[0], padded[5]
        said = "premul" if isinstance(op, PreMul) else op.value if isinstance(op, ReduceOp) else ""
        self.hub.calls.append((self.rank, f"{name} {said}".strip()))
        self.stream = stream
        if self.group_of is None:
            self._start(stream, [padded])
        else:
            self.group_of.append(padded)

    def _start(self, stream: int, operations: list[tuple[Any, ...]]) -> None:
        machine, captures = self.hub.machine, self.hub.captures
        kind = f"nccl {' '.join(sorted({each[0] for each in operations}))}".strip()

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
        rank: [each for each in operations if each[0] not in ("send", "recv")] for rank, operations in brought.items()
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
    total = reduced([at(one[1], length, dtype) for one in each], [one[5] for one in each])
    for rank, one in enumerate(each):
        if name == "reduce_scatter":
            at(one[2], count, dtype)[:] = total[rank * count : (rank + 1) * count]
        elif name == "all_reduce" or rank == root:
            at(one[2], count, dtype)[:] = total


def reduced(arrays: list[Any], ops: list[Any]) -> Any:
    """The reduction as NCCL does it: numbers win over NaN, which is why nobody may lean on it."""
    with np.errstate(all="ignore"):
        if isinstance(ops[0], PreMul):
            arrays = [array * array.dtype.type(op.factor) for array, op in zip(arrays, ops, strict=True)]
            combine: Callable[..., Any] = np.add
        else:
            numbers_win = {ReduceOp.MAX: np.fmax, ReduceOp.MIN: np.fmin, ReduceOp.MEAN: np.add}
            combine = numbers_win.get(ops[0]) or COMBINE[ops[0]]
        total = arrays[0].copy()
        for array in arrays[1:]:
            combine(total, array, out=total)
        if ops[0] is ReduceOp.MEAN:
            total = total / total.dtype.type(len(arrays))
        return total
