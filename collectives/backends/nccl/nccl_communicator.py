"""One rank's end of an NCCL communicator: collectives on raw pointers, groups, and its life cycle.

NCCL's calls take no time limit, so communicators are nonblocking: a call that has not finished returns ncclInProgress,
and its state is polled until its time limit. Connecting and freeing a communicator may still block, so both are done in
a thread that can be abandoned. If the user sets NCCL_COMM_BLOCKING=1, the other calls may block, too, without a limit.

Calls come from one thread at a time, in the same order on every rank. `abort` and `async_error` may come from any
thread at any time. Locks guard each use of the handle, and its removal before it is freed. So no call uses a freed
handle, except a call that is stuck in NCCL, which the abort ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from typing import Any

import numpy as np

from collectives.backends.nccl.library import (
    IN_PROGRESS,
    OPS,
    SUCCESS,
    TIMEOUT,
    UNIQUE_ID_BYTES,
    Nccl,
    NcclConfig,
    UniqueId,
    configuration,
)
from collectives.errors import (
    ArgumentError,
    CollectivesError,
    CollectiveTimeout,
    CommunicatorClosed,
    NcclError,
    copy_error,
)
from collectives.reduction import ReduceOp
from collectives.time_limit import Deadline, StillRunning, run_within

# Poll without a pause for this long (s): most calls are in progress only briefly.
_SPIN = 50e-6
# Then sleep for this long between polls (s). Only long calls get there, such as the first, which connects the ranks.
_PAUSE = 100e-6
# How long an abort waits for another thread to leave a call or a group, before that thread counts as stuck (s).
_GRACE = 2.0

Dtype = np.dtype[Any]


def unique_id(nccl: Nccl) -> bytes:
    """128 bytes that one rank creates and all ranks of a new communicator need. Raises: NcclError if NCCL fails."""
    created = UniqueId()
    nccl.checked("ncclGetUniqueId", byref(created))
    return ctypes.string_at(byref(created), UNIQUE_ID_BYTES)


class NcclCommunicator:
    """One rank's end of an NCCL communicator. Created by `connect`.

    rank, size: this rank and the number of ranks
    timeout: s; the time limit of each call
    enter: called in each thread that is started for a call, to set its current device

    Pointers and streams are plain integers (device addresses, `cudaStream_t`). Counts are numbers of values, not bytes,
    and may exceed 2**31. `dtype` is a NumPy dtype; bfloat16 is that of ml_dtypes. The buffers must live until the
    stream has completed the operation. A collective returns when its operation is enqueued on the stream; in a `group`,
    it returns earlier, and the end of the group enqueues the operation. To learn when the operation is complete, record
    an event on the stream afterwards.

    Every collective raises: NcclError with NCCL's own text; CollectiveTimeout after the time limit, or if NCCL reports
    a timeout; DtypeError for dtypes that NCCL lacks; CommunicatorClosed after `close`; after `abort`, its reason, or
    CommunicatorClosed if it had none.
    """

    def __init__(
        self,
        nccl: Nccl,
        handle: c_void_p,
        rank: int,
        size: int,
        timeout: float,
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        self.nccl = nccl
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._enter = enter
        self._handle: c_void_p | None = handle  # NCCL may write to it until the communicator is ready.
        # Held while the handle is taken away, or used by a call that cannot block.
        self._handle_lock = threading.Lock()
        self._call_lock = threading.RLock()  # Held during each call, and during a whole group.
        self._grouped = False
        self._stopped = False  # Then no further calls start; those in progress end at their next poll.
        self._final_error: Exception = CommunicatorClosed(f"rank {rank}: a call on a closed NCCL communicator")

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
        """Connects to the other ranks of a new communicator. Collective.

        unique_id: (128,) bytes of `unique_id`, the same on all ranks
        timeout: s; for the connection, and for every later call
        enter: called in each thread that is started for a call, to set its current device (`cupy.cuda.Device(i).use`)
        config: the same on all ranks
        Raises: CollectiveTimeout if not all ranks have connected within the timeout; NcclError if NCCL fails;
        ArgumentError for a unique_id of another length.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ArgumentError(f"a unique id has {UNIQUE_ID_BYTES} bytes, this one {len(unique_id)}")
        deadline = Deadline(timeout)
        handle = c_void_p()
        structure = configuration(config)
        name = "ncclCommInitRankConfig"
        communicator = cls(nccl, handle, rank, size, timeout, enter)

        def initialize() -> int:
            enter()
            id_structure = UniqueId.from_buffer_copy(unique_id)
            return int(nccl.call(name, byref(handle), size, id_structure, rank, byref(structure)))

        try:
            # The call blocks if NCCL_COMM_BLOCKING overrides the configuration.
            result = run_within(timeout, initialize, f"nccl-connect-{rank}")
        except StillRunning:
            communicator._handle = None  # NCCL may still be writing to it.
            raise communicator._timed_out(name) from None
        try:
            communicator._settle(name, result, deadline)
        except BaseException as error:
            communicator.abort(error)
            raise
        return communicator

    def __repr__(self) -> str:
        return f"<NcclCommunicator rank {self.rank} of {self.size}, {self.nccl!r}>"

    # Collectives -----------------------------------------------------------------------------------------------------

    def all_reduce(self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp, stream: int) -> None:
        """Reduces all ranks' `send` into every rank's `recv`; in place if the two are equal.

        send, recv: (count,) dtype
        """
        self._run("ncclAllReduce", send, recv, *self._typed(count, dtype), OPS[op], stream=stream)

    def reduce(self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp, root: int, stream: int) -> None:
        """Reduces all ranks' `send` into the root's `recv`.

        send: (count,) dtype; recv: (count,) dtype on the root, 0 elsewhere
        """
        self._run("ncclReduce", send, recv, *self._typed(count, dtype), OPS[op], root, stream=stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """Copies the root's `send` into every rank's `recv`.

        send: (count,) dtype on the root, 0 elsewhere; recv: (count,) dtype
        """
        self._run("ncclBroadcast", send, recv, *self._typed(count, dtype), root, stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: Dtype, stream: int) -> None:
        """Joins all ranks' `send` in rank order, in every rank's `recv`.

        send: (count,) dtype; recv: (size * count,) dtype; in place if send is this rank's part of recv
        """
        self._run("ncclAllGather", send, recv, *self._typed(count, dtype), stream=stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: Dtype, op: ReduceOp, stream: int) -> None:
        """Reduces all ranks' `send`; rank r receives part r.

        send: (size * count,) dtype; recv: (count,) dtype; in place if recv is this rank's part of send
        """
        self._run("ncclReduceScatter", send, recv, *self._typed(count, dtype), OPS[op], stream=stream)

    def send(self, pointer: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Sends (count,) dtype to `peer`, which receives as many. Simultaneous transfers need one `group`."""
        self._run("ncclSend", pointer, *self._typed(count, dtype), peer, stream=stream)

    def recv(self, pointer: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Receives (count,) dtype from `peer`, which sends as many. Simultaneous transfers need one `group`."""
        self._run("ncclRecv", pointer, *self._typed(count, dtype), peer, stream=stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Starts all calls of the body together, as one operation, when the body ends.

        All calls must be on this communicator. If the body raises, the calls made until then are started, too. Other
        ranks may wait for the rest, so the communicator should be aborted.
        """
        with self._call_lock:
            self._ready()
            self._check("ncclGroupStart", self.nccl.call("ncclGroupStart"))
            self._grouped = True
            ended = False
            try:
                yield
                ended = True
            finally:
                self._grouped = False
                deadline = Deadline(self.timeout)
                result = self.nccl.call("ncclGroupEnd")
                try:
                    self._ready()
                    self._settle("ncclGroupEnd", result, deadline)
                except CollectivesError:
                    if ended:  # Otherwise the body's error says more.
                        raise

    # Life ------------------------------------------------------------------------------------------------------------

    def async_error(self) -> NcclError | None:
        """The error that NCCL reports for work under way, for example of the network, or the error of this query.

        None if there is no error, or the communicator was closed or aborted.
        """
        with self._handle_lock:
            if self._handle is None:
                return None
            name = "ncclCommGetAsyncError"
            state = c_int()
            result = self.nccl.call(name, self._handle, byref(state))
        if result != SUCCESS:
            return NcclError(self._describe(name, result))
        if state.value in (SUCCESS, IN_PROGRESS):
            return None
        return NcclError(self._describe("an operation under way", state.value))

    def abort(self, reason: BaseException | None = None, timeout: float = 10.0) -> bool:
        """Ends everything in progress on this rank, and frees the communicator. Any thread may call this, repeatedly.

        The buffers of operations in progress are invalid afterwards, although their events are complete.
        reason: the error that the ended calls and later calls raise; an NcclError describes it if it is not a
        CollectivesError. Ignored if an earlier `abort` or `close` came first
        timeout: s; how long to wait for NCCL, which may hang in its abort
        Returns: whether NCCL has finished without an error within the timeout; True if an earlier `abort` or `close`
        has begun to free the communicator.
        """
        if reason is not None and not self._stopped:
            text = f"rank {self.rank}: the NCCL communicator was aborted: {reason!r}"
            self._final_error = reason if isinstance(reason, CollectivesError) else NcclError(text)
        return self._free("ncclCommAbort", timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Completes the calls in progress, then frees the communicator. May be repeated.

        Calls that do not complete in time are aborted.

        Every rank should call this, in any order: NCCL waits for all ranks.
        timeout: s; for the waiting, and once more for the abort
        Returns: whether the communicator was closed within the limit, without an abort; True if an earlier `abort` or
        `close` has begun to free it.
        """
        if self._handle is None:
            return True
        name = "ncclCommFinalize"
        deadline = Deadline(timeout)
        if not self._call_lock.acquire(timeout=timeout):  # Another thread is in a call.
            self.abort(timeout=timeout)
            return False
        try:
            handle = self._ready()
            # The call blocks if NCCL_COMM_BLOCKING overrides the configuration.
            self._settle(name, self._call_within(timeout, name, handle), deadline)
        except (CollectivesError, StillRunning):
            self.abort(timeout=timeout)
            return False
        finally:
            self._call_lock.release()
        return self._free("ncclCommDestroy", max(1.0, deadline.remaining()))

    def _free(self, name: str, timeout: float) -> bool:
        """Takes the handle away, and frees it by NCCL's function `name`. Returns: False if that has not succeeded."""
        self._stopped = True
        # A thread may be stuck in a call that only the abort ends.
        waited = self._call_lock.acquire(timeout=_GRACE)
        with self._handle_lock:
            handle = self._handle
            self._handle = None
        if waited:
            self._call_lock.release()
        try:
            return not handle or self._call_within(timeout, name, handle) == SUCCESS
        except StillRunning:
            return False

    def _call_within(self, timeout: float, name: str, handle: c_void_p) -> int:
        """The result of a call that may block, made in its own thread. Raises: StillRunning after `timeout` seconds."""

        def call() -> int:
            with contextlib.suppress(Exception):  # The communicator of a broken device must be freed too.
                self._enter()
            return int(self.nccl.call(name, handle))

        return run_within(timeout, call, name)

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _typed(self, count: int, dtype: Dtype) -> tuple[int, int]:
        """Count and dtype as NCCL takes them."""
        assert count >= 0, count  # ctypes would convert a negative count to a huge one.
        return count, self.nccl.dtype_code(dtype)

    def _run(self, name: str, *arguments: Any, stream: int) -> None:
        with self._call_lock:
            handle = self._ready()
            deadline = Deadline(self.timeout)
            result = self.nccl.call(name, *arguments, handle, stream)
            self._ready()  # An abort may have ended this call, with any result.
            if self._grouped:
                self._check(name, SUCCESS if result == IN_PROGRESS else result)
            else:
                self._settle(name, result, deadline)

    def _ready(self) -> c_void_p:
        handle = self._handle
        if handle is None or self._stopped:
            raise copy_error(self._final_error)
        return handle

    def _check(self, name: str, result: int) -> None:
        if result == TIMEOUT:
            raise CollectiveTimeout(self._describe(name, result))
        if result != SUCCESS:
            raise NcclError(self._describe(name, result))

    def _settle(self, name: str, result: int, deadline: Deadline) -> None:
        """Waits until a call is no longer in progress, and checks its result."""
        spin = time.monotonic() + _SPIN
        while result == IN_PROGRESS:
            if deadline.passed():
                raise self._timed_out(name)
            if time.monotonic() > spin:
                time.sleep(_PAUSE)
            with self._handle_lock:
                poll = "ncclCommGetAsyncError"
                state = c_int()
                self._check(poll, self.nccl.call(poll, self._ready(), byref(state)))
            result = state.value
        self._check(name, result)

    def _timed_out(self, name: str) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"rank {self.rank} of {self.size}: {name} was not complete after {self.timeout:g} s. Every rank must make "
            "the same calls in the same order; one has not arrived, or cannot be reached over the network"
        )

    def _describe(self, name: str, result: int) -> str:
        return f"rank {self.rank} of {self.size}: {name} returned {self.nccl.explain(result)}"
