"""Watches what was put on a device's streams: keeps its buffers, and ends what failed or timed out.

CuPy's memory pool reuses freed memory at once, in the order of one stream, and knows nothing of the others. So whatever
a collective touches is held here until the event behind it has passed.

NCCL does not say when a rank is missing: the stream never passes the operation, and a host that waits for the stream
waits for ever. So the same thread checks time limits, and asks NCCL for asynchronous errors. On failure it marks the
communicator broken and aborts it. The abort completes the events, with anything in the buffers; so the program must
receive the error: from the call of ours that it is in, or from its next one. If it makes none in time, the process
exits, since it computes with damaged numbers or waits where we cannot reach it.
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
from collectives.errors import CollectivesError, CollectiveTimeout, NcclError
from collectives.time_limit import TimeLimit

_POLL = 1e-3  # s; how long a finished collective may keep its buffers
_ASYNC_POLL = 0.1  # s; between polls for asynchronous errors
_SILENCE = 5.0  # s; until a program that has not received a failure is ended
_EXIT_STATUS = 1


class _InFlight(NamedTuple):
    event: Any
    buffers: Any
    call: object
    begun: float
    limit: TimeLimit | None


class Watchdog:
    """Watches what one rank of one communicator has put on its streams.

    passed: whether an event's stream has come to it; raises what has gone wrong on the device
    on_failure: marks the communicator broken, so that its next call raises the error; gets the unfinished calls, too
    enter: called in the thread that watches, before it asks, to set its current device
    silence: s; how long after a failure the program may go on without receiving it
    leave: ends the process at once
    """

    def __init__(
        self,
        rank: int,
        passed: Callable[[Any], bool],
        on_failure: Callable[[Exception, list[object]], object],
        *,
        enter: Callable[[], object] = lambda: None,
        silence: float = _SILENCE,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._rank = rank
        self._passed = passed
        self._on_failure = on_failure
        self._enter = enter
        self._silence = silence
        self._leave = leave
        self._communicator: NcclCommunicator | None = None
        self._changed = threading.Condition()
        self._in_flight: list[_InFlight] = []
        self._leaked: list[Any] = []
        self._failure: Exception | None = None
        self._received = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def guard(self, communicator: NcclCommunicator) -> None:
        """From now on asks this communicator for errors, and aborts it on failure."""
        with self._changed:
            self._communicator = communicator
            self._wake()

    def watch(self, event: Any, buffers: Any, call: object = None, timeout: float | None = None) -> None:
        """Keeps `buffers` until `event` has passed; not one recorded in a capture.

        call: what it stands for; formatted by `str` only when it is late
        timeout: s; until it has to pass, or else the communicator is aborted; None: there is no such limit
        """
        limit = None if timeout is None else TimeLimit(timeout)
        with self._changed:
            self._in_flight.append(_InFlight(event, buffers, call, time.monotonic(), limit))
            if len(self._in_flight) == 1:  # else the thread polls already
                self._wake()

    def leak(self, buffers: Any) -> None:
        """Keeps for ever what a captured graph may use whenever it is launched, or a failed device may still write."""
        self._leaked.append(buffers)

    def fail(self, error: Exception) -> None:
        """Ends the communicator because of `error`; only the first failure counts."""
        with self._changed:
            if self._failure is None and not self._closed:
                self._failure = error
                self._wake()

    def check(self) -> None:
        """Cheap; for every call of ours, and while it waits. Raises: the failure, if there was one."""
        if self._failure is not None:
            self.received()
            raise _copy(self._failure)

    def received(self) -> None:
        """The program has received the failure, or is about to: it need not be ended."""
        self._received.set()

    def in_flight(self) -> list[object]:
        """The calls that are not known to be complete, oldest first: after a failure, what the abort ends."""
        with self._changed:
            return [each.call for each in self._in_flight]

    def close(self) -> None:
        """From now on nothing fails; buffers are still kept until their events have passed.

        Raises: the failure, if there was one that the program has not received.
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
        next_poll, ended = 0.0, False
        while True:
            with self._changed:
                guarded = self._communicator is not None and not self._closed and not ended
                if self._failure is None or ended:
                    if self._closed and not self._in_flight:
                        self._thread = None
                        return
                    self._changed.wait(_POLL if self._in_flight else _ASYNC_POLL if guarded else None)
            try:
                self._enter()
                error = self._sweep()
                if guarded and error is None and time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + _ASYNC_POLL
                    assert self._communicator is not None
                    error = self._communicator.async_error()
            except Exception as trouble:  # a broken device fails every question
                error = NcclError(f"rank {self._rank}: watching its operations failed: {_line(trouble)}")
                if not guarded:  # whether its memory is still written to is not known
                    with self._changed:
                        self._leaked += self._in_flight
                        self._in_flight = []
            if guarded and error is not None:
                self.fail(error)
            if self._failure is not None and not ended:
                ended = True
                self._end(self._failure)

    def _sweep(self) -> Exception | None:
        """Releases what no stream uses any more. Returns: the error of what is late. Raises: of a failed device."""
        with self._changed:
            in_flight = list(self._in_flight)
        passed = {id(each) for each in in_flight if self._passed(each.event)}
        with self._changed:
            self._in_flight = [each for each in self._in_flight if id(each) not in passed]
        for each in in_flight:
            late = each.limit is not None and id(each) not in passed and each.limit.passed()
            if late and not self._passed(each.event):  # asked again: this process may have been stopped in between
                return CollectiveTimeout(
                    f"rank {self._rank}: {each.call} was not complete on the device after "
                    f"{time.monotonic() - each.begun:.3g} s. Every rank must make the same calls in the same order; "
                    "one has not arrived, or cannot be reached over the network"
                )
        return None

    def _end(self, error: Exception) -> None:
        silent_until = time.monotonic() + self._silence
        try:
            self._on_failure(error, self.in_flight())
        except Exception:  # the abort matters all the more
            traceback.print_exc()
        try:
            if self._communicator is not None and not self._communicator.abort(error, self._silence):
                print(f"rank {self._rank}: NCCL's abort has not finished", file=sys.stderr, flush=True)
        except Exception:  # then the process ends if the program goes on
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


def _copy(error: Exception) -> Exception:
    if not isinstance(error, CollectivesError):
        return NcclError(_line(error))
    fresh = type(error)(*error.args)  # one instance would collect every caller's traceback
    fresh.__cause__ = error.__cause__
    return fresh
