"""An NCCL communicator's handle: how long it lives, who may use it, and how a call on it comes to its end.

NCCL has no time limits. Where the library can (2.14 and newer), communicators are nonblocking: a call that has not
finished says so, and is asked again until its deadline. What may block nevertheless runs in a thread that can be left
behind. An older library's collectives may block in the calling thread; `abort` from another thread ends that.

Calls come from one thread at a time. `abort` and `async_error` may come from any thread at any time: the handle is used
and taken away under a lock, so that it is never used after it was freed.
"""

from __future__ import annotations

import threading
import time
from ctypes import byref, c_int, c_void_p
from typing import Any

from collectives import pausing
from collectives._nccl.limit import StillRunning, within
from collectives._nccl.table import IN_PROGRESS, SUCCESS, TIMEOUT, Nccl
from collectives.errors import CollectivesError, CollectiveTimeout, CommunicatorClosed, NcclError

_SPIN = 50e-6  # s; most calls that are in progress are so for a moment
_PAUSE = 100e-6  # s; a first call, which connects the ranks, takes long enough to sleep
_COURTESY = 2.0  # s; how long an abort lets another thread leave a call or a group, before it takes that for stuck


class Handle:
    """What an `NcclCommunicator` is made of; see there."""

    def __init__(self, nccl: Nccl, handle: c_void_p, rank: int, size: int, timeout: float) -> None:
        self.nccl = nccl
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._pointer = handle  # NCCL may write to it until the communicator is ready
        self._handle: c_void_p | None = handle
        self._taking = threading.Lock()  # held while the handle is used by a call that cannot block, or taken away
        self._calling = threading.RLock()  # held by the thread that calls, for the whole of a group
        self._depth = 0  # of groups
        self._stopped = False  # no further calls; those under way end at their next look
        self._end: Exception = CommunicatorClosed(f"rank {rank}: a call on a closed NCCL communicator")

    def async_error(self) -> NcclError | None:
        """What went wrong since the last call, on the network, say; None if nothing did, or there is no handle left."""
        with self._taking:
            if self._handle is None:
                return None
            name, state = "ncclCommGetAsyncError", c_int()
            result = self.nccl.call(name, self._handle, byref(state))
        if result != SUCCESS:
            return NcclError(self._words(name, result))
        if state.value in (SUCCESS, IN_PROGRESS):
            return None
        return NcclError(self._words("an operation under way", state.value))

    def abort(self, reason: BaseException | None = None, timeout: float = 10.0) -> bool:
        """Ends whatever is under way on this rank, and the communicator. From any thread; may be repeated.

        The buffers of what was under way hold anything, and their events are complete: use neither.
        reason: what later calls raise, and calls under way that this ends
        timeout: s; NCCL itself may hang in it
        Returns: True if NCCL has finished within it.
        """
        if reason is not None and not self._stopped:
            told = f"rank {self.rank}: the NCCL communicator was aborted: {reason!r}"
            self._end = reason if isinstance(reason, CollectivesError) else NcclError(told)
        handle = self._take()
        return handle is None or not handle or self._bounded("ncclCommAbort", handle, timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Finishes what is under way, then frees the communicator; whatever it cannot finish it aborts. Repeatable.

        Every rank should come, in whatever order: NCCL waits for all of them.
        timeout: s; for the waiting, and once more for the abort
        Returns: True if it finished within the limit, in good order.
        """
        deadline = time.monotonic() + timeout
        if self.nccl.has("ncclCommFinalize"):
            if self._handle is None:
                return True
            try:
                self._finalize(timeout, deadline)
            except (CollectivesError, StillRunning):
                self.abort(timeout=timeout)
                return False
        handle = self._take()
        # Before 2.14 it waits for what is under way, and cannot be aborted any more.
        return handle is None or self._bounded("ncclCommDestroy", handle, max(1.0, deadline - time.monotonic()))

    def _finalize(self, timeout: float, deadline: float) -> None:
        name = "ncclCommFinalize"
        if not self._calling.acquire(timeout=timeout):
            raise StillRunning("a call in another thread")
        try:
            handle = self._ready()
            # Blocks where NCCL_COMM_BLOCKING overrides the configuration.
            result = within(timeout, lambda: int(self.nccl.call(name, handle)), f"{name}-{self.rank}")
            self._settle(name, result, deadline)
        finally:
            self._calling.release()

    # Calls ------------------------------------------------------------------------------------------------------------

    def _run(self, name: str, *arguments: Any, stream: int) -> None:
        with self._calling:
            handle = self._ready()
            deadline = time.monotonic() + self.timeout
            result = self.nccl.call(name, *arguments, handle, stream)
            self._ready()  # an abort may have ended this very call, with any result
            if self._depth:
                self._check(name, SUCCESS if result == IN_PROGRESS else result)
            else:
                self._settle(name, result, deadline)

    def _ready(self) -> c_void_p:
        handle = self._handle
        if handle is None or self._stopped:
            fresh = type(self._end)(*self._end.args)  # one instance would collect every caller's traceback
            raise fresh from self._end.__cause__
        return handle

    def _check(self, name: str, result: int) -> None:
        if result == TIMEOUT:
            raise CollectiveTimeout(self._words(name, result))
        if result != SUCCESS:
            raise NcclError(self._words(name, result))

    def _settle(self, name: str, result: int, deadline: float) -> None:
        """Waits until a call that may be in progress is not so any more."""
        spin = time.monotonic() + _SPIN
        paused = pausing.stood_still() if result == IN_PROGRESS else 0.0
        while result == IN_PROGRESS:
            if (now := time.monotonic()) > deadline and not pausing.left(deadline, paused):
                raise self._late(name)
            if now > spin:
                time.sleep(_PAUSE)
            with self._taking:
                ask, state = "ncclCommGetAsyncError", c_int()
                self._check(ask, self.nccl.call(ask, self._ready(), byref(state)))
            result = state.value
        self._check(name, result)

    def _number(self, name: str) -> int:
        number = c_int()
        self._check(name, self.nccl.call(name, self._ready(), byref(number)))
        return number.value

    def _take(self) -> c_void_p | None:
        """The handle, for the one who frees it; None if somebody was first."""
        self._stopped = True
        # An old library's call may be stuck, and only the abort frees it.
        waited = self._calling.acquire(timeout=_COURTESY)
        try:
            with self._taking:
                handle, self._handle = self._handle, None
                return handle
        finally:
            if waited:
                self._calling.release()

    def _bounded(self, name: str, handle: c_void_p, timeout: float) -> bool:
        try:
            return bool(within(timeout, lambda: self.nccl.call(name, handle), f"{name}-{self.rank}") == SUCCESS)
        except StillRunning:
            return False

    def _late(self, name: str) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"rank {self.rank} of {self.size}: {name} was not complete after {self.timeout:g} s. Every rank must make "
            "the same calls in the same order; one has not arrived, or cannot be reached over the network"
        )

    def _words(self, name: str, result: int) -> str:
        return f"rank {self.rank} of {self.size}: {name} returned {self.nccl.explain(result)}"
