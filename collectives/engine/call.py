"""A collective under way: what it is called and with what, its steps, its outcome, and the user's hold on it.

Its steps are a generator that yields each operation's test and returns the result, so that one description serves
whichever thread takes the next step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from collectives.errors import ArgumentError, CollectiveTimeout
from collectives.flight.recorder import DONE, FAILED, ROOT, Recorder
from collectives.time_limit import TimeLimit
from collectives.transport import ExitNotice, Signatures, Steps, Test

if TYPE_CHECKING:
    from collectives.engine.queue import CallQueue

T = TypeVar("T")

_log = logging.getLogger("collectives")
_OURS = tuple(os.path.join(ROOT, package) + os.sep for package in ("collectives", "ddp"))
_SKIPPED = (*_OURS, contextlib.__file__)  # `with model.join():` calls from its end, through there
# bytes; larger arrays are left to the helper thread, since to convert and copy them would hold the caller up.
_SMALL = 1 << 16
#: What a cached call returns that has not been carried out.
MISS: Any = object()


@dataclass(slots=True, eq=False, repr=False)
class CollectiveOp(Generic[T]):
    """One collective, send or receive on one rank: what it is called, its steps, and its outcome.

    x: its array, None without one; more: its other arguments as text; file, line: of the user's code
    scale: the number by which a reduction's result is multiplied, None where there is none yet
    """

    name: str
    x: InitVar[Any]
    more: str
    timeout: float
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    file: str = ""
    line: int = 0
    scale: float | None = None
    small: bool = True  # its caller may take the first step
    steps: Steps[T] = field(init=False)
    test: Test | None = None  # kept, since a backend's request owns what it still reads and writes
    limit: TimeLimit | None = None  # of the test, once it has not been True for a while
    peers: Sequence[int] | None = None  # of a send or receive: the ranks that can answer it
    gone: Callable[[Mapping[int, ExitNotice]], list[int]] | None = None  # and those whose leaving ends it
    plan: Callable[[Signatures], Any] | None = None  # makes the plan by which the call cache carries out the next one
    signatures: Signatures | None = None  # of all ranks, once they have been compared
    queue: CallQueue | None = None  # that it was entered into, under this number,
    number: int = -1
    recorder: Recorder | None = None  # and in the flight record at this index
    record: int = -1
    result: T | None = None
    error: BaseException | None = None
    done: bool = False
    _callbacks: deque[Callable[[], object]] = field(default_factory=deque)

    def __post_init__(self, x: Any) -> None:
        if x is not None:
            self.dtype, self.shape, self.small = x.dtype, x.shape, x.nbytes <= _SMALL
        frame = sys._getframe(2)  # of the caller of `__init__`; then the innermost outside our own packages
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            frame = frame.f_back
        self.file, self.line = frame.f_code.co_filename, frame.f_lineno

    @property
    def site(self) -> str:
        """`train.py:88`"""
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def signature(self) -> tuple[str, Any, tuple[int, ...] | None, str, str, int]:
        """All that the flight record has of calls like this one: see `Recorder.intern`."""
        return self.name, self.dtype, self.shape, self.more, self.file, self.line

    @property
    def array(self) -> str:
        """`float32 (512, 10)`; "" without an array."""
        return "" if self.dtype is None else f"{self.dtype} {self.shape}"

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.name} #{self.number} ({self.site})", self.more, self.array)))

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """Publishes the outcome, once, then runs the done callbacks."""
        if self.done:
            return
        self.result, self.error = result, error
        if self.recorder is not None:
            self.recorder.end(self.record, DONE if error is None else FAILED)
        self.done = True
        if self._callbacks:
            self._run_callbacks()

    def abandon(self, error: BaseException) -> None:
        """In a forked child: this call goes on in the parent, whose flight record and callbacks it has."""
        self.recorder = None
        self._callbacks.clear()
        self.finish(None, error)

    def add_done_callback(self, fn: Callable[[], object]) -> None:
        """Calls fn once the outcome is known, in the thread that publishes it; now if it is known already."""
        self._callbacks.append(fn)
        if self.done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while True:
            try:
                fn = self._callbacks.popleft()  # by one thread, should `finish` and `add_done_callback` run at once
            except IndexError:
                return
            try:
                fn()
            except (Exception, SystemExit):  # which would end the helper thread
                _log.exception("a done callback of %s raised", self)

    def outcome(self) -> T:
        """The result of a finished call. Raises: the error that ended it."""
        if self.error is not None:
            raise copy_error(self.error)
        return self.result  # type: ignore[return-value]  # a finished call without an error has its result


class Work(Generic[T]):
    """A collective under way, as `async_op=True` returns it. It keeps its arrays alive until it is complete.

    Until `wait` returns, the arrays given to the collective must be neither changed nor, if they are written, read.
    """

    __slots__ = ("_call",)

    def __init__(self, call: CollectiveOp[T]) -> None:
        self._call = call

    def done(self) -> bool:
        """True once `wait` would return, or raise, at once."""
        return self._call.done

    def wait(self, timeout: float | None = None) -> T:
        """The collective's result; may be called again.

        timeout: seconds that this call waits at most; the collective's own time limit holds besides
        Raises: CollectiveTimeout if it is not complete by then (a limit given here leaves the communicator usable);
        whatever ended the collective.
        """
        call = self._call
        if not call.done:
            assert call.queue is not None
            if not call.queue.wait(call, timeout):
                raise CollectiveTimeout(f"{call} was not complete after waiting {timeout:g} s; it goes on")
        return call.outcome()

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Calls fn(work) once the collective is complete or has failed; at once if it is.

        fn: runs in the thread that completed the call: a helper thread, or one that waits for a call of the same
        communicator; callbacks run in the order in which they were added. It may start calls with `async_op=True`, but
        not wait for another call of the same communicator, which it holds up: that raises CollectivesError. What it
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
    """A fresh exception: one instance raised at several places would collect all their tracebacks."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
