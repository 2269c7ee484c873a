"""A collective under way: what it is called and with what, its steps, its outcome, and the user's hold on it.

Its steps are a generator that yields each operation's test and returns the result, so that one description serves the
calling thread and the helper thread alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from collectives.errors import ArgumentError, CollectiveTimeout, WorldError
from collectives.exit_notice import ExitNotice
from collectives.flight.recorder import DONE, FAILED, Recorder
from collectives.reduction import Array
from collectives.time_limit import TimeLimit
from collectives.transport import Signatures, Steps, Test

T = TypeVar("T")

_log = logging.getLogger("collectives")
_event_lock = threading.Lock()
#: What a cached call returns that has not been carried out.
MISS: Any = object()


class CallArguments:
    """A call's dtype, shape and options, put into words only when an error needs them."""

    __slots__ = ("dtype", "more", "shape")

    def __init__(self, x: Array | None, more: str) -> None:
        self.dtype = None if x is None else x.dtype
        self.shape = None if x is None else x.shape
        self.more = more

    def __str__(self) -> str:
        array = "" if self.dtype is None else f"{self.dtype} {self.shape}"
        return " ".join(part for part in (self.more, array) if part)


class CollectiveOp(Generic[T]):
    """One collective on one rank: what it is called, its steps, and its outcome."""

    __slots__ = (
        "_callbacks",
        "_done",
        "_event",
        "drive",
        "error",
        "gone",
        "look",
        "name",
        "number",
        "pause",
        "peers",
        "pid",
        "record",
        "recorder",
        "result",
        "signatures",
        "site",
        "steps",
        "test",
        "timeout",
        "what",
    )

    def __init__(self, name: str, what: CallArguments, timeout: float, site: CallSite | None = None) -> None:
        self.name = name
        self.peers: Sequence[int] | None = None  # of a send or receive: the ranks that can answer it
        self.gone: Callable[[Mapping[int, ExitNotice]], list[int]] | None = None  # and those whose leaving ends it
        self.pause: Callable[[], float] | None = None  # s; between two tests of a wait that lasts
        # Waits in the thread that asks for the outcome, up to so many seconds; None: that thread blocks.
        self.drive: Callable[[float | None], bool] | None = None
        self.what = what
        self.site = user_site() if site is None else site
        self.steps: Steps[T]
        # Raises what has broken the communicator from elsewhere.
        self.look: Callable[[CollectiveOp[Any]], None] | None = None
        self.test: Test | None = None  # kept, since a backend's request owns what it still reads and writes
        self.timeout = timeout
        self.number = -1
        self.record = -1  # its index in the flight record
        self.recorder: Recorder | None = None
        self.signatures: Signatures | None = None  # of all ranks, once they have met
        self.result: T | None = None
        self.error: BaseException | None = None
        self.pid = os.getpid()
        self._done = False
        self._event: threading.Event | None = None  # made by the first thread that blocks: most calls need none
        self._callbacks: deque[Callable[[], object]] = deque()

    def __str__(self) -> str:
        return f"{self.name} #{self.number} ({self.site}) {self.what}".rstrip()

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """Publishes the outcome, once: wakes the threads that wait for it, then runs the done callbacks."""
        if self._done:
            return
        self.result, self.error = result, error
        if self.recorder is not None:
            self.recorder.end(self.record, DONE if error is None else FAILED)
        self._done = True
        self.drive = None  # it refers to the call, whose arrays should be freed with the last reference to it
        if self._event is not None:
            self._event.set()
        if self._callbacks:
            self._run_callbacks()

    def finished(self) -> bool:
        """True once the outcome is known; in a forked child that it will never know it."""
        return self._done or self.pid != os.getpid()

    def add_done_callback(self, fn: Callable[[], object]) -> None:
        """Calls fn once the outcome is known, in the thread that publishes it; now if it is known already."""
        self._callbacks.append(fn)
        if self._done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while True:
            try:
                fn = self._callbacks.popleft()  # by one thread, should `finish` and `add_done_callback` meet
            except IndexError:
                return
            try:
                fn()
            except Exception:
                _log.exception("a done callback of %s raised", self)

    def join(self, timeout: float | None) -> bool:
        """Waits for the outcome; False if it is not known after `timeout` seconds."""
        if self.finished():
            return True
        drive = self.drive  # which another thread may clear now
        return self.block(timeout) if drive is None else drive(timeout)

    def block(self, timeout: float | None) -> bool:
        """`join`, while another thread drives the call."""
        with _event_lock:
            event = self._event = self._event or threading.Event()
        if self._done:  # `finish` sets this before it looks for the event
            return True
        if timeout is None:
            return event.wait()
        limit = TimeLimit(timeout)
        while not event.wait(limit.remaining()):
            if limit.passed():
                return False
        return True

    def outcome(self) -> T:
        """The result. Raises: the error that ended the call; WorldError in a child forked before it ended."""
        if not self._done:
            raise WorldError(f"{self} goes on in process {self.pid}, of which this one was forked: wait for it there")
        if self.error is not None:
            raise copy_error(self.error)
        return self.result  # type: ignore[return-value]  # a finished call without an error has its result


class Work(Generic[T]):
    """A collective under way, as `async_op=True` returns it. It keeps its arrays alive.

    Until `wait` returns, the arrays given to the collective must be neither changed nor, if they are written, read.
    """

    __slots__ = ("_call",)

    def __init__(self, call: CollectiveOp[T]) -> None:
        self._call = call

    def done(self) -> bool:
        """True once `wait` would return, or raise, at once."""
        return self._call.finished()

    def wait(self, timeout: float | None = None) -> T:
        """The collective's result; may be called again.

        timeout: seconds that this call waits at most; the collective's own time limit holds besides
        Raises: CollectiveTimeout if it is not complete by then (a limit given here leaves the communicator usable);
        whatever ended the collective.
        """
        if not self._call.join(timeout):
            raise CollectiveTimeout(f"{self._call} was not complete after waiting {timeout:g} s; it goes on")
        return self._call.outcome()

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Calls fn(work) once the collective is complete or has failed; at once if it is.

        fn: runs in the thread that completed the call, usually a helper thread, after threads in `wait` were woken;
        callbacks run in the order in which they were added. It may start calls with `async_op=True`, but not wait for
        another call of the same communicator, whose helper thread it holds up: that raises CollectivesError. What it
        raises is logged, and changes nothing.
        Raises: ArgumentError if fn cannot be called.
        """
        if not callable(fn):
            raise ArgumentError(f"a done callback should be a function of one argument, is {fn!r}")
        self._call.add_done_callback(lambda: fn(self))

    def times(self) -> tuple[int, int, int] | None:
        """When it was asked for, started and complete on this rank: nanoseconds of `time.monotonic_ns()`, 0: not yet.

        None where the flight record has forgotten it: over a thousand later calls have begun. On a GPU complete means
        handed to the device.
        """
        call = self._call
        return None if call.recorder is None else call.recorder.times(call.record)

    def __repr__(self) -> str:
        return f"<Work {self._call}: {'done' if self.done() else 'under way'}>"


def copy_error(error: BaseException) -> BaseException:
    # A fresh exception: one instance raised at several places would collect all their tracebacks.
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_ROOT, package) + os.sep for package in ("collectives", "ddp"))
_PASSED = (*_OURS, contextlib.__file__)  # `with model.join():` calls from its end, through there


class CallSite:
    """A file and a line, put into words only when asked."""

    __slots__ = ("file", "line")

    def __init__(self, file: str, line: int) -> None:
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def user_site() -> CallSite:
    """The innermost caller outside our own packages, and not in a context manager of theirs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
