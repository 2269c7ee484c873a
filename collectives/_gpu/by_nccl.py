"""Device arrays over NCCL: what NCCL does natively, and how the rest is put together from that.

    mean, scaled sum   AVG and PreMulSum where the library has them, else a kernel after the sum
    complex            the sum of twice as many reals; a product gathers everybody's array (size times the memory)
    int16, uint16      as 32 bits, which wrap to the same 16
    max, min of reals  with a mask of NaNs beside it: NCCL's own prefers numbers, and a NaN must win on every rank
    uneven parts       a group of broadcasts (all_gather), of reduces (reduce_scatter)
    gather and kin     a group of sends and receives

All calls into NCCL are made by the one issuing thread of the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives._gpu.carrier import Rest, parts_of
from collectives._gpu.cuda import Cuda
from collectives._gpu.registered import Memory, Registry
from collectives._nccl.communicator import NcclCommunicator
from collectives._nccl.issuer import Issuer
from collectives._nccl.table import Nccl
from collectives._nccl.watchdog import Watchdog
from collectives.backends.transport import Transport, offsets
from collectives.engine.call import CollectiveOp, Steps
from collectives.errors import CollectivesError
from collectives.flight.recorder import FAILED
from collectives.reduction import ReduceOp, wire_op

_BYTE = np.dtype(np.uint8)
_WIDER: dict[Any, np.dtype[Any]] = {np.dtype(np.int16): np.dtype(np.int32), np.dtype(np.uint16): np.dtype(np.uint32)}
_REALS: dict[Any, np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
_ORDER = (ReduceOp.MAX, ReduceOp.MIN)

Op = Any  # a ReduceOp or a PreMulSum
Issue = Callable[[Any, Any, Op], None]


class Native(NamedTuple):
    """What NCCL is asked to do. pre: every rank's values are multiplied by it first; rest: what is left afterwards."""

    op: ReduceOp
    pre: float | None
    rest: Rest


def natively(op: ReduceOp, factor: Any, size: int, *, real: bool, has_mean: bool, has_pre: bool) -> Native:
    """The most that NCCL can do of a reduction by itself.

    factor: a Python number, a 0-d device array or None; real: the dtype is floating or complex
    """
    known = isinstance(factor, (int, float)) and factor != 1
    if real and has_pre and known and op in (ReduceOp.SUM, ReduceOp.MEAN):
        return Native(ReduceOp.SUM, factor / size if op is ReduceOp.MEAN else factor, Rest(ReduceOp.SUM, None))
    if real and has_mean and op is ReduceOp.MEAN:
        return Native(op, None, Rest(ReduceOp.SUM, factor))
    return Native(wire_op(op), None, Rest(op, factor))


class Passing:
    """An event as the watchdog asks for it: an error raises there, where CuPy would say "not finished" for ever."""

    __slots__ = ("_cuda", "_event")

    def __init__(self, cuda: Cuda, event: Any) -> None:
        self._cuda = cuda
        self._event = event

    @property
    def done(self) -> bool:
        return self._cuda.passed(self._event)


class ByNccl:
    """The carrier over NCCL.

    failed: called by the watchdog when what was issued has failed, before it aborts the communicator
    """

    name = "NCCL"
    capturable = True

    def __init__(
        self, cuda: Cuda, communicator: NcclCommunicator, issuer: Issuer, failed: Callable[[Exception], object]
    ) -> None:
        self._cuda = cuda
        self._comm = communicator
        self._issuer = issuer
        self._watchdog = Watchdog(communicator, record=self._record, on_failure=failed)
        self.stream = cuda.stream()
        self._registry = Registry(cuda, communicator, self._hand_over)

    @property
    def issuer(self) -> Issuer:
        """The thread that makes all calls into NCCL."""
        return self._issuer

    @property
    def nccl(self) -> Nccl:
        """The library."""
        return self._comm.nccl

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Rest]:
        def issue(send: Any, recv: Any, native: Op) -> None:
            self._comm.all_reduce(_at(send), _at(recv), send.size, send.dtype, native, self.stream.ptr)

        def product(everyones: Any) -> None:
            self._multiply(everyones, out)

        return (yield from self._reduce(x, out, op, factor, issue, product))

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, root: int) -> Steps[Rest]:
        def issue(send: Any, recv: Any, native: Op) -> None:
            to = 0 if recv is None else _at(recv)
            self._comm.reduce(_at(send), to, send.size, send.dtype, native, root, self.stream.ptr)

        def product(everyones: Any) -> None:
            if out is not None:
                self._multiply(everyones, out)

        return (yield from self._reduce(x, out, op, factor, issue, product))

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Rest]:
        starts, rank = offsets(counts), self._comm.rank

        def issue(send: Any, recv: Any, native: Op) -> None:
            each = send.size // sum(counts)  # 2 reals a complex number
            if len(set(counts)) == 1:
                self._comm.reduce_scatter(_at(send), _at(recv), counts[0] * each, send.dtype, native, self.stream.ptr)
                return
            for root, (start, count) in enumerate(zip(starts, counts, strict=True)):
                if count:
                    part, to = send[start * each : (start + count) * each], _at(recv) if root == rank else 0
                    self._comm.reduce(_at(part), to, part.size, send.dtype, native, root, self.stream.ptr)

        def product(everyones: Any) -> None:
            self._multiply(everyones[:, starts[rank] : starts[rank] + counts[rank]], out)

        return (yield from self._reduce(x, out, op, factor, issue, product))

    def _reduce(
        self, x: Any, out: Any, op: ReduceOp, factor: Any, issue: Issue, product: Callable[[Any], None]
    ) -> Steps[Rest]:
        if not x.size:
            return Rest(op, factor)
        if x.dtype in _REALS and op is ReduceOp.PROD:
            everyones = self._empty((self._comm.size, x.size), x.dtype)
            count = x.size * x.itemsize
            yield from self._issue(lambda: self._comm.all_gather(_at(x), _at(everyones), count, _BYTE, self.stream.ptr))
            product(everyones)
            return Rest(op, factor, (everyones,))
        if x.dtype in _WIDER:
            wide = self._cast(x, _WIDER[x.dtype])
            total = None if out is None else wide if out.size == x.size else self._empty(out.shape, wide.dtype)
            yield from self._issue(lambda: issue(wide, total, wire_op(op)))
            if out is not None:
                self._copy(out, total)
            return Rest(op, factor, (wide, total))
        if x.dtype.kind == "f" and op in _ORDER:
            return (yield from self._reduce_with_nans(x, out, op, factor, issue))
        real = x.dtype.kind in "fc"
        nccl = self.nccl
        has_mean, has_pre = nccl.has_op(ReduceOp.MEAN), nccl.has("ncclRedOpCreatePreMulSum")
        native = natively(op, factor, self._comm.size, real=real, has_mean=has_mean, has_pre=has_pre)
        dtype = _REALS.get(x.dtype, x.dtype)
        send, recv = x.view(dtype), None if out is None else out.view(dtype)

        def scaled() -> None:
            assert native.pre is not None
            # Closed after the group that uses it.
            with self._comm.pre_mul_sum(native.pre, dtype) as op, self._comm.group():
                issue(send, recv, op)

        if native.pre is None:
            yield from self._issue(lambda: issue(send, recv, native.op))
        else:
            yield from self._hand_over(scaled)
        return native.rest

    def _reduce_with_nans(self, x: Any, out: Any, op: ReduceOp, factor: Any, issue: Issue) -> Steps[Rest]:
        xp = self._cuda.xp
        with self._cuda.on(self.stream):
            mine = xp.isnan(x).view(np.uint8)
            lost = None if out is None else mine if out.size == x.size else xp.empty(out.shape, np.uint8)

        def launch() -> None:
            issue(x, out, op)
            issue(mine, lost, ReduceOp.MAX)

        yield from self._issue(launch)
        if out is not None and lost is not None:
            with self._cuda.on(self.stream):
                xp.copyto(out, out.dtype.type(np.nan), where=lost.view(np.bool_))
        return Rest(op, factor, (mine, lost))

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        if x.size:
            send = _at(x) if self._comm.rank == root else 0
            yield from self._issue(lambda: self._comm.broadcast(send, _at(x), x.size, _BYTE, root, self.stream.ptr))

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        sends = {root: x}
        receives = {} if out is None else parts_of(out, counts)
        yield from self._exchange(sends, receives)

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        if not sum(counts):
            return
        if len(set(counts)) == 1:
            yield from self._issue(lambda: self._comm.all_gather(_at(x), _at(out), counts[0], _BYTE, self.stream.ptr))
            return

        def launch() -> None:
            for root, part in parts_of(out, counts).items():
                if part.size:
                    send = _at(x) if root == self._comm.rank else 0
                    self._comm.broadcast(send, _at(part), part.size, _BYTE, root, self.stream.ptr)

        yield from self._issue(launch)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        yield from self._exchange({} if x is None else parts_of(x, counts), {root: out})

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        rank = self._comm.rank
        yield from self._exchange(parts_of(x, table[rank]), parts_of(out, [row[rank] for row in table]))

    def split(self, color: int | None, key: int) -> Steps[NcclCommunicator | None]:
        """A communicator of the ranks that give the same color, ordered by key; None if color is None. Collective."""
        # NCCL wants nothing under way on the communicator that is split.
        yield functools.partial(self._cuda.passed, self._cuda.mark(self.stream))
        made: list[NcclCommunicator | None] = []
        yield from self._hand_over(lambda: made.append(self._comm.split(color, key)))
        return made[0]

    def memory(self, nbytes: int, transport: Transport) -> Steps[Memory | None]:
        """Memory that NCCL moves without copies of its own; None where the library has none. Collective."""
        if self._comm.size == 1 or not self.nccl.has("ncclMemAlloc"):
            return None
        return (yield from self._registry.empty(nbytes, transport))

    # Life ------------------------------------------------------------------------------------------------------------

    def watch(self, event: Any, call: object) -> None:
        self._watchdog.watch(Passing(self._cuda, event), call, time.monotonic() + self._comm.timeout)

    def check(self) -> None:
        self._watchdog.check()

    def close(self) -> None:
        try:
            self._watchdog.close()
        finally:
            self._comm.close()

    def _record(self) -> None:
        """Corrects the flight record: what was called done, since it was on its stream, has come to nothing."""
        for call in self._watchdog.unfinished():
            if isinstance(call, CollectiveOp) and call.recorder is not None:
                call.recorder.end(call.record, FAILED)

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _issue(self, launch: Callable[[], None]) -> Steps[None]:
        def grouped() -> None:
            with self._comm.group():
                launch()

        yield from self._hand_over(grouped)

    def _hand_over(self, job: Callable[[], None]) -> Steps[None]:
        issued = self._issuer.submit(job)
        yield issued.done
        try:
            issued.result()
        except CollectivesError as error:
            # Part of it may have been started, and other ranks wait for the rest: the abort tells them.
            self._watchdog.fail(error)
            self._watchdog.heard()
            raise

    def _exchange(self, sends: dict[int, Any], receives: dict[int, Any]) -> Steps[None]:
        """Arrays of bytes to some ranks and from some; both sides know which are empty."""

        def launch() -> None:
            for peer, part in sends.items():
                if part.size:
                    self._comm.send(_at(part), part.size, _BYTE, peer, self.stream.ptr)
            for peer, part in receives.items():
                if part.size:
                    self._comm.recv(_at(part), part.size, _BYTE, peer, self.stream.ptr)

        yield from self._issue(launch)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        with self._cuda.on(self.stream):
            return self._cuda.empty(shape, dtype)

    def _cast(self, x: Any, dtype: Any) -> Any:
        wide = self._empty(x.shape, dtype)
        self._copy(wide, x)
        return wide

    def _copy(self, target: Any, source: Any) -> None:
        with self._cuda.on(self.stream):
            self._cuda.xp.copyto(target, source, casting="unsafe")

    def _multiply(self, everyones: Any, out: Any) -> None:
        """The product of the ranks' arrays in their order. everyones: (size, n)"""
        xp = self._cuda.xp
        with self._cuda.on(self.stream):
            xp.copyto(out, everyones[0])
            for row in everyones[1:]:
                xp.multiply(out, row, out=out)


def _at(array: Any) -> int:
    return int(array.data.ptr)
