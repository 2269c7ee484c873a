"""Looks after what was issued on a communicator, and ends what failed or came to nothing.

NCCL tells nobody when a rank is missing: the stream never passes the operation, and a host that waits for the stream
waits for ever. One thread a communicator polls the events behind its operations, and NCCL's asynchronous errors. On
failure it writes the flight record, marks the communicator broken and aborts it. The abort completes the events, with
anything in the buffers; so the program must hear of it: at the call of ours that it is in, or at its next one. If it
comes to none in time, the process exits, since it computes with damaged numbers or waits where we cannot reach it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from collectives import pausing
from collectives._nccl.limit import within
from collectives.errors import CollectivesError, CollectiveTimeout, NcclError

_POLL = 0.01  # s; between looks at unfinished events
_POLL_INTERVAL = 0.1  # s; between looks for asynchronous errors
_SILENCE = 5.0  # s; until a program that has not heard of a failure is ended
_EXIT_STATUS = 1


class Event(Protocol):
    """Completion of what was issued before it, as `cupy.cuda.Event` tells it; never one recorded in a capture."""

    @property
    def done(self) -> bool:
        """True once everything before it on its stream is complete."""


class Aborts(Protocol):
    """What the watchdog needs of a communicator: `NcclCommunicator` has it."""

    rank: int

    def async_error(self) -> Exception | None:
        """What went wrong outside any call; None if nothing did."""

    def abort(self, reason: BaseException | None = None, timeout: float = ...) -> bool:
        """Ends whatever is under way."""


class _Watched(NamedTuple):
    event: Event
    describe: object
    begun: float
    deadline: float
    paused: float


class Watchdog:
    """Watches one communicator until `close`.

    record: writes the flight record; called first, once, in a thread of its own, and not waited for without limit
    on_failure: marks the communicator broken, so that its next call raises the error; called second, once
    silence: s; how long after a failure the program may go without hearing of it
    leave: ends the process at once
    """

    def __init__(
        self,
        communicator: Aborts,
        *,
        record: Callable[[], object],
        on_failure: Callable[[Exception], object],
        silence: float = _SILENCE,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._communicator = communicator
        self._record = record
        self._on_failure = on_failure
        self._silence = silence
        self._leave = leave
        self._changed = threading.Condition()
        self._watched: deque[_Watched] = deque()
        self._failure: Exception | None = None
        self._heard = threading.Event()
        self._closed = False
        name = f"nccl-watchdog-{communicator.rank}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: Event, describe: object, deadline: float) -> None:
        """Has `event` complete by `deadline`, or else the communicator aborted. Events of one stream, in its order.

        describe: what it stands for; put into words by `str` only when it is late
        deadline: s, of `time.monotonic`
        Raises: the failure, if there was one.
        """
        self.check()
        with self._changed:
            assert not self._closed
            self._watched.append(_Watched(event, describe, time.monotonic(), deadline, pausing.stood_still()))
            if len(self._watched) == 1:
                self._changed.notify()

    def fail(self, error: Exception) -> None:
        """Ends the communicator because of `error`, found by somebody else; only the first failure counts."""
        with self._changed:
            if self._failure is None and not self._closed:
                self._failure = error
                self._changed.notify()

    def check(self) -> None:
        """Cheap; for every call of ours, and while it waits. Raises: the failure, if there was one."""
        if self._failure is not None:
            self.heard()
            raise _again(self._failure)

    def heard(self) -> None:
        """The program knows of the failure, or is about to: it need not be ended."""
        self._heard.set()

    @property
    def failure(self) -> Exception | None:
        """What ended the communicator; None while it is well."""
        return self._failure

    def idle(self) -> bool:
        """True if everything that was to be watched is complete."""
        with self._changed:
            return not self._watched

    def unfinished(self) -> list[object]:
        """What was watched and is not known to be complete, oldest first: after a failure, what the abort ends."""
        with self._changed:
            return [each.describe for each in self._watched]

    def close(self, timeout: float = 5.0) -> bool:
        """Stops watching; what is unfinished is nobody's concern any more.

        Returns: False if it takes longer than `timeout` seconds
        Raises: the failure, if there was one that the program has not heard of.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if not self._heard.is_set():
            self.check()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        look = 0.0
        while True:
            with self._changed:
                if self._failure is None and not self._closed:
                    self._changed.wait(_POLL if self._watched else _POLL_INTERVAL)
                if self._closed and self._failure is None:
                    return
            if self._failure is None:
                try:
                    error = self._overdue()
                    if error is None and time.monotonic() >= look:
                        look = time.monotonic() + _POLL_INTERVAL
                        error = self._communicator.async_error()
                except Exception as trouble:  # a broken device fails every question
                    rank = self._communicator.rank
                    error = NcclError(f"rank {rank}: watching its operations failed: {_line(trouble)}")
                if error is None:
                    continue
                self.fail(error)
                if self._failure is None:
                    return  # closed meanwhile: nobody's concern any more
            self._end()
            return

    def _overdue(self) -> Exception | None:
        """Forgets what is complete. Returns: the error of what is late."""
        watched = self._watched
        while watched and watched[0].event.done:
            with self._changed:
                watched.popleft()
        now = time.monotonic()
        for each in list(watched):
            if now > each.deadline and not pausing.left(each.deadline, each.paused) and not each.event.done:
                return CollectiveTimeout(
                    f"rank {self._communicator.rank}: {each.describe} was not complete on the device after "
                    f"{now - each.begun:.3g} s. Every rank must make the same calls in the same order; one has not "
                    "arrived, or cannot be reached over the network"
                )
        return None

    def _end(self) -> None:
        error = self._failure
        assert error is not None
        limit = time.monotonic() + self._silence
        steps: tuple[Callable[[], object], ...] = (self._write_record, lambda: self._on_failure(error), self._abort)
        for step in steps:
            try:
                step()
            except Exception:  # the next one matters all the more
                traceback.print_exc()
        if not self._heard.wait(max(0.0, limit - time.monotonic())):
            print(
                f"{_line(error)}\nThe communicator was aborted, and rank {self._communicator.rank} has made no further "
                f"call that could raise this within {self._silence:g} s: it ends here, since it may compute with "
                "damaged numbers.",
                file=sys.stderr,
                flush=True,
            )
            self._leave(_EXIT_STATUS)

    def _write_record(self) -> None:
        within(
            self._silence / 2, self._record, "nccl-flight-record"
        )  # a disk that hangs must not keep the rest waiting

    def _abort(self) -> None:
        if not self._communicator.abort(self._failure, self._silence):
            print(f"rank {self._communicator.rank}: NCCL's abort has not finished", file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _again(error: Exception) -> Exception:
    if not isinstance(error, CollectivesError):
        return NcclError(_line(error))
    fresh = type(error)(*error.args)  # one instance would collect every caller's traceback
    fresh.__cause__ = error.__cause__
    return fresh
