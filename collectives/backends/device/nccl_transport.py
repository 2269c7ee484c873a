"""Device arrays over NCCL: what NCCL does natively, and how the rest is put together from that.

    mean, scaled sum   AVG and PreMulSum for reals, else a kernel after the sum
    complex            the sum of twice as many reals; a product gathers all ranks' arrays (size times the memory)
    int16, uint16      as 32 bits, which wrap to the same 16
    max, min of reals  with a mask of NaNs beside it: NCCL's own prefers numbers, and a NaN must win on every rank
    uneven parts       a group of broadcasts (all_gather), of reduces (reduce_scatter)
    gather and kin     a group of sends and receives

All calls into NCCL are made by the one issuing thread of the device.

Memory that NCCL moves without copies of its own is allocated by the library and registered with one communicator.
Registering windows is collective, and taking it back may be. When an array dies differs from rank to rank; so memory is
taken back at a later `empty`, which all ranks call, once its arrays have died on every one.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import Remainder, parts_of
from collectives.backends.nccl import nccl_communicator
from collectives.backends.nccl.issuer import Issuer
from collectives.backends.nccl.nccl_communicator import NcclCommunicator, Registered
from collectives.backends.nccl.watchdog import Watchdog
from collectives.errors import CollectivesError, NcclError
from collectives.reduction import ReduceOp, wire_op
from collectives.transport import Steps, Transport, offsets

_BYTE = np.dtype(np.uint8)
_WIDER: dict[Any, np.dtype[Any]] = {np.dtype(np.int16): np.dtype(np.int32), np.dtype(np.uint16): np.dtype(np.uint32)}
_REALS: dict[Any, np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
_ORDER = (ReduceOp.MAX, ReduceOp.MIN)

#: Starts a reduction: of what, into what, with a ReduceOp or the number of a pre_mul_sum.
Issue = Callable[[Any, Any, Any], None]


class NativeReduction(NamedTuple):
    """What NCCL is asked to do. pre: every rank's values are multiplied by it first; rest: what is left afterwards."""

    op: ReduceOp
    pre: float | None
    rest: Remainder


def plan_native(op: ReduceOp, factor: Any, size: int, *, real: bool) -> NativeReduction:
    """The most that NCCL can do of a reduction by itself.

    factor: a Python number, a 0-d device array or None; real: the dtype is floating or complex
    """
    known = isinstance(factor, (int, float)) and factor != 1
    if real and known and op in (ReduceOp.SUM, ReduceOp.MEAN):
        pre = factor / size if op is ReduceOp.MEAN else factor
        return NativeReduction(ReduceOp.SUM, pre, Remainder(ReduceOp.SUM, None))
    if real and op is ReduceOp.MEAN:
        return NativeReduction(op, None, Remainder(ReduceOp.SUM, factor))
    return NativeReduction(wire_op(op), None, Remainder(op, factor))


class NcclTransport:
    """The device transport over NCCL. watchdog: aborts the communicator when what was issued has failed"""

    name = "NCCL"
    capturable = True

    def __init__(self, cuda: Cuda, communicator: NcclCommunicator, issuer: Issuer, watchdog: Watchdog) -> None:
        self._cuda = cuda
        self._nccl = communicator
        self.issuer = issuer
        self._watchdog = watchdog
        self.stream = cuda.stream()
        self._memory = RegisteredMemory(cuda, communicator, self._submit)
        watchdog.guard(communicator)

    @property
    def timeout(self) -> float | None:
        return self._nccl.timeout

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Remainder]:
        def issue(send: Any, recv: Any, op: Any) -> None:
            self._nccl.all_reduce(_address(send), _address(recv), send.size, send.dtype, op, self.stream.ptr)

        return (yield from self._reduce(x, out, op, factor, issue, slice(None)))

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int, factor: Any) -> Steps[Remainder]:
        def issue(send: Any, recv: Any, op: Any) -> None:
            self._nccl.reduce(_address(send), _address(recv), send.size, send.dtype, op, root, self.stream.ptr)

        return (yield from self._reduce(x, out, op, factor, issue, slice(None)))

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Remainder]:
        starts, rank = offsets(counts), self._nccl.rank

        def issue(send: Any, recv: Any, op: Any) -> None:
            each, stream = send.size // sum(counts), self.stream.ptr  # 2 reals a complex number
            if len(set(counts)) == 1:
                target = _address(recv)
                self._nccl.reduce_scatter(_address(send), target, counts[0] * each, send.dtype, op, stream)
                return
            for root, (start, count) in enumerate(zip(starts, counts, strict=True)):
                if count:
                    part, target = send[start * each : (start + count) * each], _address(recv if root == rank else None)
                    self._nccl.reduce(_address(part), target, part.size, send.dtype, op, root, stream)

        mine = slice(starts[rank], starts[rank] + counts[rank])
        return (yield from self._reduce(x, out, op, factor, issue, mine))

    def _reduce(
        self, x: Any, out: Any | None, op: ReduceOp, factor: Any, issue: Issue, mine: slice
    ) -> Steps[Remainder]:
        """mine: the part of x's positions that arrives in `out`."""
        if not x.size:
            return Remainder(op, factor)
        if x.dtype in _REALS and op is ReduceOp.PROD:
            return (yield from self._complex_product(x, out, factor, mine))
        if x.dtype in _WIDER:
            wide = self._empty(x.shape, _WIDER[x.dtype])
            self._cuda.copy(wide, x, self.stream)
            total = None if out is None else wide if out.size == x.size else self._empty(out.shape, wide.dtype)
            yield from self._issue(lambda: issue(wide, total, wire_op(op)))
            if out is not None:
                self._cuda.copy(out, total, self.stream)
            return Remainder(op, factor, (wide, total))
        if x.dtype.kind == "f" and op in _ORDER:
            return (yield from self._order_with_nans(x, out, op, factor, issue))
        native = plan_native(op, factor, self._nccl.size, real=x.dtype.kind in "fc")
        dtype = _REALS.get(x.dtype, x.dtype)
        send, recv = x.view(dtype), None if out is None else out.view(dtype)

        def scaled(pre: float) -> None:
            # Given back after the group that uses it.
            with self._nccl.pre_mul_sum(pre, dtype) as op, self._nccl.group():
                issue(send, recv, op)

        if native.pre is None:
            yield from self._issue(lambda: issue(send, recv, native.op))
        else:
            yield from self._submit(functools.partial(scaled, native.pre))
        return native.rest

    def _complex_product(self, x: Any, out: Any | None, factor: Any, mine: slice) -> Steps[Remainder]:
        """The product of the ranks' arrays, in their order."""
        everyones = self._empty((self._nccl.size, x.size), x.dtype)
        yield from self.all_gather(x.view(np.uint8), everyones.reshape(-1).view(np.uint8), [x.nbytes] * len(everyones))
        if out is not None:
            rows = everyones[:, mine]
            with self._cuda.on(self.stream):
                self._cuda.xp.copyto(out, rows[0])
                for row in rows[1:]:
                    self._cuda.xp.multiply(out, row, out=out)
        return Remainder(ReduceOp.PROD, factor, (everyones,))

    def _order_with_nans(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, issue: Issue) -> Steps[Remainder]:
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
        return Remainder(op, factor, (mine, lost))

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        if x.size:
            yield from self._issue(lambda: self._broadcast(x, x, root))

    def _broadcast(self, x: Any, out: Any, root: int) -> None:
        send = _address(x if self._nccl.rank == root else None)
        self._nccl.broadcast(send, _address(out), out.size, _BYTE, root, self.stream.ptr)

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        yield from self._exchange({root: x}, {} if out is None else parts_of(out, counts))

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        def launch() -> None:
            if len(set(counts)) == 1:
                self._nccl.all_gather(_address(x), _address(out), counts[0], _BYTE, self.stream.ptr)
                return
            for root, part in parts_of(out, counts).items():
                if part.size:
                    self._broadcast(x, part, root)

        if sum(counts):
            yield from self._issue(launch)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        yield from self._exchange({} if x is None else parts_of(x, counts), {root: out})

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        rank = self._nccl.rank
        yield from self._exchange(parts_of(x, table[rank]), parts_of(out, [row[rank] for row in table]))

    # Life ------------------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> Steps[NcclCommunicator | None]:
        """A communicator of the ranks that give the same color, ordered by key; None if color is None. Collective."""
        # NCCL wants nothing under way on the communicator that is split.
        yield functools.partial(self._cuda.passed, self._cuda.mark(self.stream))
        made: list[NcclCommunicator | None] = []
        yield from self._submit(lambda: made.append(self._nccl.split(color, key)))
        return made[0]

    def memory(self, nbytes: int, transport: Transport) -> Steps[NcclMemory | None]:
        """Memory that NCCL moves without copies of its own; None where the library has none. Collective."""
        if self._nccl.size == 1 or not self._nccl.nccl.has("ncclMemAlloc"):
            return None
        return (yield from self._memory.allocate(nbytes, transport))

    def close(self) -> None:
        self._nccl.close()

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _issue(self, launch: Callable[[], None]) -> Steps[None]:
        def grouped() -> None:
            with self._nccl.group():
                launch()

        yield from self._submit(grouped)

    def _submit(self, job: Callable[[], None]) -> Steps[None]:
        issued = self.issuer.submit(job)
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
                    self._nccl.send(_address(part), part.size, _BYTE, peer, self.stream.ptr)
            for peer, part in receives.items():
                if part.size:
                    self._nccl.recv(_address(part), part.size, _BYTE, peer, self.stream.ptr)

        yield from self._issue(launch)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        with self._cuda.on(self.stream):
            return self._cuda.empty(shape, dtype)


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


# Registered memory ---------------------------------------------------------------------------------------------------

_ALIGNMENT = 4096  # bytes: NCCL_WIN_REQUIRED_ALIGNMENT
logger = logging.getLogger("collectives")

#: Has the thread that makes all calls into NCCL do a job.
Submit = Callable[[Callable[[], None]], Steps[None]]


class NcclMemory:
    """Some of it, as an array holds it. pointer: its address; nbytes: its size"""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes


class RegisteredMemory:
    """The registered memory of one rank's end of an NCCL communicator."""

    def __init__(self, cuda: Cuda, communicator: NcclCommunicator, submit: Submit) -> None:
        self._cuda, self._nccl, self._submit = cuda, communicator, submit
        # In the order in which they were made, the same on every rank: address, registration, and a reference that
        # gives None once no array holds the memory any more.
        self._segments: list[tuple[int, Registered, weakref.ref[NcclMemory]]] = []

    def allocate(self, nbytes: int, transport: Transport) -> Steps[NcclMemory | None]:
        """Memory of at least `nbytes`; None on every rank if one of them could not have it. Collective.

        Raises: NcclError if it cannot be registered.
        """
        yield from self._sweep(transport)
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        found: list[int] = []

        def allocate() -> None:
            try:
                found.append(nccl_communicator.allocate(self._nccl.nccl, size))
            except NcclError as error:
                logger.info("rank %d: memory for NCCL comes from CuPy: %s", self._nccl.rank, error)

        yield from self._submit(allocate)
        had = yield from _everyones(np.array([bool(found)]), transport)
        if not had.all():
            if found:
                yield from self._submit(functools.partial(nccl_communicator.free, self._nccl.nccl, found[0]))
            return None
        segment, made = NcclMemory(found[0], size), list[Registered]()
        yield from self._submit(lambda: made.append(self._nccl.register(segment.pointer, size)))
        self._segments.append((segment.pointer, made[0], weakref.ref(segment)))
        return segment

    def _sweep(self, transport: Transport) -> Steps[None]:
        """Gives back what no array holds any more, on any rank."""
        if not self._segments:
            return
        dead = yield from _everyones(np.array([held() is None for _, _, held in self._segments]), transport)
        over = [each for each, gone in zip(self._segments, dead.all(axis=0), strict=True) if gone]
        if not over:
            return
        self._segments = [each for each in self._segments if each not in over]

        def free() -> None:
            self._cuda.synchronize()  # kernels of any stream may still use what Python has let go of
            for pointer, registered, _ in over:
                if registered.handle.value:  # else the library could not register it
                    self._nccl.deregister(registered)
                nccl_communicator.free(self._nccl.nccl, pointer)

        yield from self._submit(free)


def _everyones(mine: Any, transport: Transport) -> Steps[Any]:
    """(size, n) bool of all ranks' (n,) bool. Collective."""
    everyones = np.empty(transport.size * len(mine), np.uint8)
    yield transport.all_gather(mine.view(np.uint8), everyones, [len(mine)] * transport.size)
    return everyones.reshape(transport.size, len(mine)).view(bool)
