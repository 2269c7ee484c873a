"""Watches operations on a device's streams: keeps their buffers alive, and aborts NCCL if one failed or timed out.

CuPy's memory pool reuses freed memory at once, in the order of one stream, without regard to other streams. So the
buffers of a collective are kept here until the event after the collective is complete.

NCCL does not report that a rank is missing: the stream never completes the operation, and a host that waits for the
stream hangs. So the watchdog also checks time limits, and polls NCCL for asynchronous errors. On failure it marks the
communicator broken and aborts it. The abort completes the events, with invalid data in the buffers. So the program must
receive the error, from the call that it is in, or from its next call. If the program makes no call in time, the
watchdog ends the process, since the program may compute with invalid numbers, or wait where no error can be raised.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.backends.nccl.nccl_communicator import NcclCommunicator
from collectives.errors import CollectivesError, CollectiveTimeout, NcclError, copy_error
from collectives.time_limit import Deadline

# Interval at which events are queried (s): a finished collective may keep its buffers that long.
_POLL = 1e-3
# Interval at which NCCL is polled for asynchronous errors (s).
_ASYNC_POLL = 0.1
# If no call or wait of the program has raised the failure within this time (s), the watchdog ends the process.
_SILENCE = 5.0
_EXIT_STATUS = 1


class _InFlight(NamedTuple):
    event: Any
    buffers: Any
    call: object
    begun: float
    deadline: Deadline | None


class Watchdog:
    """Watches the operations that one rank of one communicator has put on its streams.

    is_complete: function(event), whether the event is complete; raises if the device has failed
    on_failure: function(error, unfinished calls); marks the communicator broken, so that its next call raises the error
    enter: called in the watching thread before it queries events, to set its current device
    silence: s; how long the program may continue after a failure without receiving it
    leave: function(status), which ends the process immediately
    """

    def __init__(
        self,
        rank: int,
        is_complete: Callable[[Any], bool],
        on_failure: Callable[[Exception, list[object]], object],
        *,
        enter: Callable[[], object] = lambda: None,
        silence: float = _SILENCE,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._rank = rank
        self._is_complete = is_complete
        self._on_failure = on_failure
        self._enter = enter
        self._silence = silence
        self._leave = leave
        self._communicator: NcclCommunicator | None = None
        self._changed = threading.Condition()
        self._in_flight: list[_InFlight] = []
        self._kept_forever: list[Any] = []
        self._failure: Exception | None = None
        self._received = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def guard(self, communicator: NcclCommunicator) -> None:
        """Polls this communicator for errors from now on until `close`, and aborts it on failure."""
        with self._changed:
            self._communicator = communicator
            self._wake()

    def watch(self, event: Any, buffers: Any, call: object = None, timeout: float | None = None) -> None:
        """Keeps `buffers` until `event` is complete. The event must not have been recorded in a capture.

        call: the operation before the event; formatted by `str` only if the event is late
        timeout: s; if the event is not complete by then, the communicator given to `guard` is aborted, except after
        `close`; None: no limit
        """
        deadline = None if timeout is None else Deadline(timeout)
        with self._changed:
            self._in_flight.append(_InFlight(event, buffers, call, time.monotonic(), deadline))
            if len(self._in_flight) == 1:  # Otherwise the thread already polls at short intervals.
                self._wake()

    def keep_forever(self, buffers: Any) -> None:
        """Never frees buffers that a captured graph may use at any launch, or that a failed device may still write."""
        self._kept_forever.append(buffers)

    def fail(self, error: Exception) -> None:
        """Ends the communicator because of `error`. Has no effect after an earlier failure or `close`."""
        with self._changed:
            if self._failure is None and not self._closed:
                self._failure = error
                self._wake()

    def check(self) -> None:
        """Raises the failure, if there was one. Called before every call and wait, so it takes little time."""
        if self._failure is not None:
            self.received()
            failure = self._failure
            if not isinstance(failure, CollectivesError):
                failure = NcclError(_line(failure))
            raise copy_error(failure)

    def received(self) -> None:
        """Called when the program has received the failure, or is about to. Then the process is not ended."""
        self._received.set()

    def in_flight(self) -> list[object]:
        """The calls that are not known to be complete, oldest first. After a failure, the abort ends these calls."""
        with self._changed:
            return [operation.call for operation in self._in_flight]

    def close(self) -> None:
        """Stops looking for failures. Buffers are still kept until their events are complete.

        Raises: the failure, if the program has not received it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if not self._received.is_set():
            self.check()

    def _wake(self) -> None:
        if self._thread is None:
            name = f"collectives-watchdog-{self._rank}"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()
        self._changed.notify()

    def _watch(self) -> None:
        next_poll = 0.0
        ended = False
        while True:
            with self._changed:
                guarded = self._communicator is not None and not self._closed and not ended
                if self._failure is None or ended:
                    if self._closed and not self._in_flight:
                        self._thread = None
                        return
                    pause = _ASYNC_POLL if guarded else None
                    self._changed.wait(_POLL if self._in_flight else pause)
            try:
                self._enter()
                error = self._collect()
                if guarded and error is None and time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + _ASYNC_POLL
                    assert self._communicator is not None
                    error = self._communicator.async_error()
            except Exception as query_error:  # A broken device fails every query.
                error = NcclError(f"rank {self._rank}: watching its operations failed: {_line(query_error)}")
                if not guarded:  # The device may still write to the buffers.
                    with self._changed:
                        self._kept_forever += self._in_flight
                        self._in_flight = []
            if guarded and error is not None:
                self.fail(error)
            if self._failure is not None and not ended:
                ended = True
                self._end(self._failure)

    def _collect(self) -> Exception | None:
        """Releases buffers of complete operations. Returns: the error of a late one. Raises: if the device failed."""
        with self._changed:
            in_flight = list(self._in_flight)
        complete = {id(operation) for operation in in_flight if self._is_complete(operation.event)}
        with self._changed:
            self._in_flight = [operation for operation in self._in_flight if id(operation) not in complete]
        for operation in in_flight:
            late = operation.deadline is not None and id(operation) not in complete and operation.deadline.passed()
            # Queried again, since this process may have been stopped after the first query.
            if late and not self._is_complete(operation.event):
                return CollectiveTimeout(
                    f"rank {self._rank}: {operation.call} was not complete on the device after "
                    f"{time.monotonic() - operation.begun:.3g} s. Every rank must make the same calls in the same "
                    "order; one has not arrived, or cannot be reached over the network"
                )
        return None

    def _end(self, error: Exception) -> None:
        silent_until = time.monotonic() + self._silence
        try:
            self._on_failure(error, self.in_flight())
        except Exception:  # The communicator is aborted in any case.
            traceback.print_exc()
        try:
            if self._communicator is not None and not self._communicator.abort(error, self._silence):
                print(f"rank {self._rank}: NCCL's abort has not finished", file=sys.stderr, flush=True)
        except Exception:  # The process is ended below in any case, unless the program has received the failure.
            traceback.print_exc()
        if not self._received.wait(max(0.0, silent_until - time.monotonic())):
            print(
                f"{_line(error)}\nThe communicator was aborted, and rank {self._rank} has made no further "
                f"call that could raise this within {self._silence:g} s: it ends here, since it may compute with "
                "damaged numbers.",
                file=sys.stderr,
                flush=True,
            )
            self._leave(_EXIT_STATUS)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
