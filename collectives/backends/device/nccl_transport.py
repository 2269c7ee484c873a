"""Device arrays over NCCL: each collective is one group of NCCL calls, which the issuer of the device makes.

Collectives that NCCL lacks are composed of NCCL calls:

    complex            SUM and MEAN on pairs of real numbers
    uneven parts       all_gather: a group of broadcasts; reduce_scatter: a group of reduces
    gather and others  a group of sends and receives

NCCL cannot reduce some dtypes, and computes some ops differently from NumPy. For these `reduces` returns False, and the
caller has each rank combine a part.

One thread per device, the issuer, makes the NCCL calls of all communicators of the device, one collective after the
other, in the order in which they are submitted. All ranks must submit the collectives of different communicators in the
same order: otherwise NCCL can deadlock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import DeviceTransport
from collectives.backends.nccl.library import DTYPES
from collectives.backends.nccl.nccl_communicator import NcclCommunicator
from collectives.backends.nccl.watchdog import Watchdog
from collectives.errors import CollectivesError
from collectives.reduction import ReduceOp
from collectives.time_limit import carry_out
from collectives.transport import Steps, parts_of

T = TypeVar("T")

_BYTE = np.dtype(np.uint8)
_REALS: dict[Any, Any] = {np.dtype(np.complex64): np.float32, np.dtype(np.complex128): np.float64}


_issuers: dict[int, Issuer] = {}
_lock = threading.Lock()


def issuer_of(device: int, enter: Callable[[], object] = lambda: None) -> Issuer:
    """The issuer of a device, created by the first call for this device. It lives as long as the process.

    enter: called once in the issuer's thread, to make the device current (`cupy.cuda.Device(i).use`)
    """
    with _lock:
        if device not in _issuers:
            _issuers[device] = Issuer(f"nccl-issuer-{device}", enter)
        return _issuers[device]


class Issuer:
    """A thread that makes the submitted calls one after the other."""

    def __init__(self, name: str, enter: Callable[[], object] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._enter = enter
        threading.Thread(target=self._issue, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues `call`. Returns: a future with its result or exception."""
        outcome: Future[T] = Future()
        self._queue.put((outcome, call))
        return outcome

    def _issue(self) -> None:
        entered: Future[Any] = Future()
        carry_out(self._enter, entered)
        while True:
            outcome, call = self._queue.get()
            if entered.exception() is None:
                carry_out(call, outcome)
            else:
                error = RuntimeError("the issuing thread could not enter its device")
                error.__cause__ = entered.exception()
                outcome.set_exception(error)
            del outcome, call  # An idle thread must not keep the arrays of the last call alive.


class NcclTransport(DeviceTransport):
    """The device transport over NCCL. watchdog: aborts the communicator if an operation fails"""

    name = "NCCL"
    averages = True

    def __init__(self, cuda: Cuda, communicator: NcclCommunicator, issuer: Issuer, watchdog: Watchdog) -> None:
        super().__init__(cuda)
        self._nccl = communicator
        self._issuer = issuer
        self._watchdog = watchdog
        watchdog.guard(communicator)

    @property
    def timeout(self) -> float:  # type: ignore[override]  # Read again for each collective.
        return self._nccl.timeout

    def reduces(self, dtype: Any, op: ReduceOp) -> bool:
        if dtype.kind == "c":
            return op is not ReduceOp.PROD
        # With a NaN, NCCL's max and min return another rank's number, but the result must be NaN.
        return dtype in DTYPES and not (dtype.kind == "f" and op in (ReduceOp.MAX, ReduceOp.MIN))

    def all_reduce(self, x: Any, out: Any, op: ReduceOp) -> Steps[None]:
        x = _reals(x)
        out = _reals(out)
        return self._issue(
            lambda: self._nccl.all_reduce(_address(x), _address(out), x.size, x.dtype, op, self.stream.ptr)
        )

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> Steps[None]:
        x = _reals(x)
        out = _reals(out)
        return self._issue(lambda: self._reduce(x, out, op, root))

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> Steps[None]:
        reals = _reals(x)
        counts = [count * reals.size // x.size for count in counts] if x.size else counts
        x = reals
        out = _reals(out)

        def launch() -> None:
            if len(set(counts)) == 1:
                self._nccl.reduce_scatter(_address(x), _address(out), counts[0], x.dtype, op, self.stream.ptr)
                return
            for root, part in enumerate(parts_of(x, counts)):
                self._reduce(part, out if root == self._nccl.rank else None, op, root)

        return self._issue(launch)

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        return self._issue(lambda: self._broadcast(x, x, root))

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        return self._exchange([(root, x)], _numbered(out, counts))

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        def launch() -> None:
            if len(set(counts)) == 1:
                self._nccl.all_gather(_address(x), _address(out), counts[0], _BYTE, self.stream.ptr)
                return
            for root, part in enumerate(parts_of(out, counts)):
                self._broadcast(x, part, root)

        return self._issue(launch)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        return self._exchange(_numbered(x, counts), [(root, out)])

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        rank = self._nccl.rank
        return self._exchange(_numbered(x, table[rank]), _numbered(out, [row[rank] for row in table]))

    def close(self) -> None:
        self._nccl.close()

    # NCCL calls. Both sides know which parts are empty, and skip them -------------------------------------------------

    def _reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> None:
        if x.size:
            self._nccl.reduce(_address(x), _address(out), x.size, x.dtype, op, root, self.stream.ptr)

    def _broadcast(self, x: Any, out: Any, root: int) -> None:
        if out.size:
            send = _address(x if self._nccl.rank == root else None)
            self._nccl.broadcast(send, _address(out), out.size, _BYTE, root, self.stream.ptr)

    def _exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Steps[None]:
        """Sends arrays of bytes to ranks, and receives arrays from ranks, both as (rank, array)."""

        def launch() -> None:
            for start, parts in ((self._nccl.send, sends), (self._nccl.recv, receives)):
                for peer, part in parts:
                    if part.size:
                        start(_address(part), part.size, _BYTE, peer, self.stream.ptr)

        return self._issue(launch)

    def _issue(self, launch: Callable[[], None]) -> Steps[None]:
        def grouped() -> None:
            with self._nccl.group():
                launch()

        issued = self._issuer.submit(grouped)
        yield issued.done
        try:
            issued.result()
        except CollectivesError as error:
            # Part of the collective may have started, and other ranks may wait for the rest. So the communicator is
            # aborted.
            self._watchdog.fail(error)
            self._watchdog.received()
            raise


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _reals(array: Any) -> Any:
    return array if array is None else array.view(_REALS.get(array.dtype, array.dtype))


def _numbered(joined: Any | None, counts: Sequence[int]) -> list[tuple[int, Any]]:
    """Splits `joined` by `counts`, and returns pairs of (rank, part); an empty list if `joined` is None."""
    return [] if joined is None else list(enumerate(parts_of(joined, counts)))
