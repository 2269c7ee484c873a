"""One rank's end of an NCCL communicator: the collectives on raw pointers, groups, scaled sums, splits.

Calls come from one thread at a time, in the same order on every rank, and none blocks without limit (`handle`).
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from typing import Any, NamedTuple

import numpy as np

from collectives._nccl.config import NcclConfig, configuration
from collectives._nccl.handle import Handle
from collectives._nccl.limit import StillRunning, within
from collectives._nccl.table import (
    HOST_IMMEDIATE,
    IN_PROGRESS,
    NO_COLOR,
    SUCCESS,
    SYMMETRIC,
    UNIQUE_ID_BYTES,
    Nccl,
    UniqueId,
)
from collectives.errors import ArgumentError, CollectivesError, CommunicatorClosed, NcclError
from collectives.reduction import ReduceOp

Dtype = np.dtype[Any]


def unique_id(nccl: Nccl) -> bytes:
    """128 bytes that one rank makes and all ranks of a new communicator need. Raises: NcclError."""
    made = UniqueId()
    result = nccl.call("ncclGetUniqueId", byref(made))
    if result != SUCCESS:
        raise NcclError(f"ncclGetUniqueId returned {nccl.explain(result)}")
    return ctypes.string_at(byref(made), UNIQUE_ID_BYTES)


def allocate(nccl: Nccl, nbytes: int) -> int:
    """Memory on the current device that NCCL can share between ranks. Returns: its address. Raises: NcclError."""
    made = c_void_p()
    result = nccl.call("ncclMemAlloc", byref(made), nbytes)
    if result != SUCCESS or not made.value:
        raise NcclError(f"ncclMemAlloc of {nbytes} bytes returned {nccl.explain(result)}")
    return made.value


def give_back(nccl: Nccl, pointer: int) -> None:
    """Memory of `allocate`, which nothing uses any more. Raises: NcclError."""
    result = nccl.call("ncclMemFree", pointer)
    if result != SUCCESS:
        raise NcclError(f"ncclMemFree returned {nccl.explain(result)}")


class Registered(NamedTuple):
    """What NCCL calls memory that it was told of, as a window or alone."""

    window: bool
    handle: c_void_p


class PreMulSum:
    """A sum whose terms are multiplied by a factor first, made by `NcclCommunicator.pre_mul_sum`. A context manager.

    It may be closed as soon as the last call that was given it (or that call's group) has returned.
    """

    def __init__(self, communicator: NcclCommunicator, code: int) -> None:
        self._communicator = communicator
        self._code: int | None = code

    @property
    def code(self) -> int:
        """NCCL's number of it. Raises: CommunicatorClosed after `close`."""
        if self._code is None:
            raise CommunicatorClosed("a PreMulSum was used after its close")
        return self._code

    def close(self) -> None:
        """Gives it back; may be repeated. Raises: NcclError."""
        code, self._code = self._code, None
        if code is not None:
            self._communicator.destroy_op(code)

    def __enter__(self) -> PreMulSum:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NcclCommunicator(Handle):
    """One rank's end of an NCCL communicator. Made by `connect` and `split`.

    rank, size: this rank and how many there are
    timeout: s; no call blocks longer (a call of a library older than 2.14 may, until `abort`)

    Pointers and streams are plain integers (device addresses, `cudaStream_t`); counts are values, not bytes, and may
    pass 2**31; `dtype` is a NumPy dtype, bfloat16 that of ml_dtypes. The buffers must live until the stream has passed
    the operation. A collective returns when its operation is enqueued on the stream; an event recorded on the stream
    after that is complete when the operation is.

    Raises, every call: NcclError with NCCL's own words; CollectiveTimeout past the limit, or where NCCL says so;
    BackendError for what the library is too old for; DtypeError for dtypes NCCL has not; CommunicatorClosed after
    `close`; what `abort` was given, after `abort`.
    """

    @classmethod
    def connect(
        cls,
        nccl: Nccl,
        unique_id: bytes,
        rank: int,
        size: int,
        *,
        timeout: float,
        enter: Callable[[], object] = lambda: None,
        config: NcclConfig | None = None,
    ) -> NcclCommunicator:
        """Meets the other ranks of a new communicator. Collective.

        unique_id: (128,) bytes of `unique_id`, the same on all ranks
        timeout: s; for the meeting, and for every later call
        enter: called in the thread that calls NCCL, to set the current device there (`cupy.cuda.Device(i).use`)
        config: the same on all ranks
        Raises: CollectiveTimeout if not all ranks have come by then; BackendError if the library is too old for what is
        configured.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ArgumentError(f"a unique id has {UNIQUE_ID_BYTES} bytes, this one {len(unique_id)}")
        deadline = time.monotonic() + timeout
        handle, structure = c_void_p(), configuration(config, nccl.version)
        name, more = "ncclCommInitRank", ()
        if nccl.has("ncclCommInitRankConfig"):
            name, more = "ncclCommInitRankConfig", (byref(structure),)  # type: ignore[assignment]
        communicator = cls(nccl, handle, rank, size, timeout)

        def meet() -> int:
            enter()
            given = UniqueId.from_buffer_copy(unique_id)
            return int(nccl.call(name, byref(handle), size, given, rank, *more))

        try:
            # Without limit in an old library, and where NCCL_COMM_BLOCKING overrides the configuration.
            result = within(timeout, meet, f"nccl-connect-{rank}")
        except StillRunning:
            communicator._handle = None  # nobody may touch what is still being made
            raise communicator._late(name) from None
        try:
            communicator._settle(name, result, deadline)
        except BaseException as error:
            communicator.abort(error)
            raise
        return communicator

    def __repr__(self) -> str:
        return f"<NcclCommunicator rank {self.rank} of {self.size}, {self.nccl!r}>"

    # Collectives -----------------------------------------------------------------------------------------------------

    def all_reduce(self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp | PreMulSum, stream: int) -> None:
        """The reduction of all ranks' `send` into every rank's `recv`; in place if they are the same.

        send, recv: (count,) dtype
        """
        self._run("ncclAllReduce", send, recv, _natural(count), self._type(dtype), self._op(op), stream=stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp | PreMulSum, root: int, stream: int
    ) -> None:
        """The reduction of all ranks' `send` into the root's `recv`.

        send: (count,) dtype; recv: (count,) dtype on the root, 0 elsewhere
        """
        self._run("ncclReduce", send, recv, _natural(count), self._type(dtype), self._op(op), root, stream=stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """The root's `send` into every rank's `recv`.

        send: (count,) dtype on the root, 0 elsewhere; recv: (count,) dtype
        """
        self._run("ncclBroadcast", send, recv, _natural(count), self._type(dtype), root, stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: Dtype, stream: int) -> None:
        """All ranks' `send` joined in rank order.

        send: (count,) dtype; recv: (size * count,) dtype; in place if send is recv's own part
        """
        self._run("ncclAllGather", send, recv, _natural(count), self._type(dtype), stream=stream)

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp | PreMulSum, stream: int
    ) -> None:
        """The reduction of all ranks' `send`, of which rank r receives part r.

        send: (size * count,) dtype; recv: (count,) dtype; in place if recv is send's own part
        """
        self._run("ncclReduceScatter", send, recv, _natural(count), self._type(dtype), self._op(op), stream=stream)

    def send(self, pointer: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """(count,) dtype to `peer`, which receives as many. Several at once must be in a `group`."""
        self._run("ncclSend", pointer, _natural(count), self._type(dtype), peer, stream=stream)

    def recv(self, pointer: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """(count,) dtype from `peer`, which sends as many. Several at once must be in a `group`."""
        self._run("ncclRecv", pointer, _natural(count), self._type(dtype), peer, stream=stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Calls of the body, on this communicator alone, are started together at its end, as one operation.

        The group is ended also if the body raises: what it called until then is started, and other ranks may wait for
        the rest, so the communicator should be aborted.
        """
        with self._calling:
            self._ready()
            self._check("ncclGroupStart", self.nccl.call("ncclGroupStart"))
            self._depth += 1
            ended = False
            try:
                yield
                ended = True
            finally:
                self._depth -= 1
                deadline = time.monotonic() + self.timeout
                result = self.nccl.call("ncclGroupEnd")
                try:
                    self._ready()
                    if self._depth == 0:
                        self._settle("ncclGroupEnd", result, deadline)
                except CollectivesError:
                    if ended:  # else the body's error says more
                        raise

    def pre_mul_sum(self, factor: float, dtype: Dtype) -> PreMulSum:
        """A sum of arrays of `dtype` whose terms are multiplied by `factor` first; for this communicator alone.

        Raises: BackendError before NCCL 2.11.
        """
        code = c_int()
        scalar = np.array([factor], dtype)
        with self._calling:
            arguments = (byref(code), scalar.ctypes.data, self._type(dtype), HOST_IMMEDIATE, self._ready())
            self._check("ncclRedOpCreatePreMulSum", self.nccl.call("ncclRedOpCreatePreMulSum", *arguments))
        return PreMulSum(self, code.value)

    def destroy_op(self, code: int) -> None:
        """Gives a PreMulSum back, by its number; one of an aborted or closed communicator went with it."""
        with self._calling:
            if self._handle is not None:
                self._check("ncclRedOpDestroy", self.nccl.call("ncclRedOpDestroy", code, self._handle))

    def register(self, pointer: int, nbytes: int) -> Registered:
        """Tells NCCL of memory of `allocate` that collectives will use: it then moves it without copies of its own.

        As a window where the library has them: that is collective, with as many bytes on every rank.
        Raises: BackendError before NCCL 2.19.
        """
        window = self.nccl.has("ncclCommWindowRegister")
        name, more = ("ncclCommWindowRegister", (SYMMETRIC,)) if window else ("ncclCommRegister", ())
        made, deadline = c_void_p(), time.monotonic() + self.timeout
        with self._calling:
            result = self.nccl.call(name, self._ready(), pointer, nbytes, byref(made), *more)
            self._settle(name, result, deadline)
        return Registered(window, made)

    def deregister(self, what: Registered) -> None:
        """Takes that back; collective for windows. No call that uses the memory may be under way."""
        name, deadline = "ncclCommWindowDeregister" if what.window else "ncclCommDeregister", time.monotonic()
        with self._calling:
            self._settle(name, self.nccl.call(name, self._ready(), what.handle), deadline + self.timeout)

    def split(self, color: int | None, key: int) -> NcclCommunicator | None:
        """A communicator of the ranks that give the same color, ordered by key; None if color is None. Collective.

        color: not negative
        Raises: BackendError before NCCL 2.18.
        """
        if color is not None and color < 0:
            raise ArgumentError(f"color should be a natural number or None, is {color}")
        deadline = time.monotonic() + self.timeout
        made = c_void_p()
        with self._calling:
            arguments = (self._ready(), NO_COLOR if color is None else color, key, byref(made), None)
            result = self.nccl.call("ncclCommSplit", *arguments)
            self._settle("ncclCommSplit", result, deadline)  # the new handle is written by then
        if color is None:
            return None
        child = NcclCommunicator(self.nccl, made, self.rank, self.size, self.timeout)  # its own are asked below
        try:
            child._settle("ncclCommSplit", IN_PROGRESS, deadline)
            child.rank, child.size = child._number("ncclCommUserRank"), child._number("ncclCommCount")
        except BaseException as error:
            child.abort(error)
            raise
        return child

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _type(self, dtype: Dtype) -> int:
        return self.nccl.dtype_code(dtype)

    def _op(self, op: ReduceOp | PreMulSum) -> int:
        return op.code if isinstance(op, PreMulSum) else self.nccl.op_code(op)


def _natural(count: int) -> int:
    assert count >= 0, count  # ctypes would make a huge one of it
    return count
