"""A collective under way: what it is called and with what, its steps, its outcome, and the user's hold on it.

Its steps are a generator that yields each operation's test and returns the result, so that one description serves
whichever thread takes the next step.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from collectives.errors import ArgumentError, CollectiveTimeout
from collectives.flight.recorder import DONE, FAILED, QUEUED, ROOT, Recorder
from collectives.reduction import Array, Reduction, check_scale, scale_bits
from collectives.time_limit import TimeLimit
from collectives.transport import ExitNotice, Signatures, Steps, Test

if TYPE_CHECKING:
    from collectives.engine.queue import CallQueue

T = TypeVar("T")

_log = logging.getLogger("collectives")
_OURS = tuple(os.path.join(ROOT, package) + os.sep for package in ("collectives", "ddp"))
# Where calls are never said to be made. `with model.join():` calls from its end, through contextlib.
_SKIPPED = (*_OURS, contextlib.__file__)
# bytes; larger arrays are left to the helper thread, since to convert and copy them would hold the caller up.
_SMALL = 1 << 16


def skip_frames(*packages: str) -> None:
    """Errors and reports name the line of the user that led to a call through these packages, not their own lines.

    packages: names of packages or modules that call collectives for their users, as `import` takes them
    Raises: ArgumentError if one of them is not installed.
    """
    global _SKIPPED
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ArgumentError(f"skip_frames takes packages that are installed; there is no {name!r}")
        folders = spec.submodule_search_locations
        places = (spec.origin,) if folders is None else tuple(os.path.join(folder, "") for folder in folders)
        _SKIPPED = tuple(dict.fromkeys((*_SKIPPED, *places)))


@functools.lru_cache(maxsize=4096)
def signature_hash(name: str, more: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> int:
    """A hash, the same in every process, of what ranks must agree on; 63 bits."""
    text = repr((name, more, None if dtype is None else (dtype.str, dtype.name), shape))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False)
class Plan:
    """What all calls of one kind have in common: made at the first of them, and changed by none.

    name, more: the collective, and its other arguments as text; dtype, shape: of its array, None without one
    agreed: what ranks must agree on beside the dtype: the shape, or a part of it; None: they may bring any array
    rows: a number that each rank shows the others: its length along axis 0, or a checksum of what may differ
    prefix: (n,) uint8 that is shown with the array; shown: the others may read the array as soon as this rank has come
    reduction: what a reduction does, with the dtype in which the array travels
    body: the steps that move the array once ranks have compared the call
    layout: what the result is made of where all arrays travel with the headers; None: not known for this collective
    result: the shape of this rank's result, where it is known before the call
    depth: how many functions of ours have called each other where a call is made, up to the public method at least
    inline: carries out calls whose arrays travel with the headers, on a transport that can
    recorded: its signatures in the flight record, by place of the call: the id of the code and the instruction. With
    the code, which must live as long as its id stands here
    """

    name: str
    more: str = ""
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    agreed: tuple[int, ...] | None = None
    rows: int = 0
    prefix: Array | None = None
    shown: bool = True
    reduction: Reduction | None = None
    body: Any = None
    layout: Any = None
    result: tuple[int, ...] | None = None
    depth: int = 2
    digest: int = field(init=False)
    small: bool = field(init=False)  # the thread that asks for a call may take its first step
    inline: Any = field(default=None, init=False)
    recorded: dict[tuple[int, int], tuple[int, CodeType]] = field(default_factory=dict, init=False)

    @property
    def wire(self) -> Any:
        """The dtype in which the array travels."""
        return self.dtype if self.reduction is None else self.reduction.wire

    def __post_init__(self) -> None:
        dtype = None if self.agreed is None else self.dtype
        self.digest = signature_hash(self.name, self.more, dtype, self.agreed)
        self.small = self.shape is None or math.prod(self.shape) * self.dtype.itemsize <= _SMALL


_parents: list[Any] = []  # in a forked child: the steps of calls that go on in the parent

_FAILED_SCALE = signature_hash("", "a scale that failed", None, None)


class CollectiveOp(Generic[T]):
    """One collective, send or receive on one rank: what it is called, its steps, and its outcome.

    arrays: what reads and makes its arrays: see `HostArrays`; source: the caller's array
    target: `out` as an array, if the result shall be there; out: as the caller gave it
    scale: the number by which a reduction's result is multiplied, or the function that gives it until that is asked
    early: memory for the result, where it was made before the call
    """

    # A class without slots, or a dataclass, takes half a microsecond longer.
    __slots__ = (
        *("plan", "timeout", "arrays", "source", "target", "out", "scale", "early", "code", "instruction"),
        *("waited_for", "steps", "test", "limit", "peers", "gone", "failure", "signatures", "queue", "number"),
        *("recorder", "record", "state", "result", "error", "done", "_callbacks"),
    )

    def __init__(
        self,
        plan: Plan,
        timeout: float,
        arrays: Any = None,
        source: Any = None,
        target: Any = None,
        out: Any = None,
        scale: Any = None,
        early: Any = None,
    ) -> None:
        self.plan = plan
        self.timeout = timeout
        self.arrays = arrays
        self.source = source
        self.target = target
        self.out = out
        self.scale = scale
        self.early = early
        self.waited_for = False  # by a thread that has nothing else to do
        self.steps: Steps[T] | None = None
        self.test: Test | None = None  # kept, since a backend's request owns what it still reads and writes
        self.limit: TimeLimit | None = None  # of the test, once it has not been True for a while
        self.peers: Sequence[int] | None = None  # of a send or receive: the ranks that can answer it,
        self.gone: Callable[[Mapping[int, ExitNotice]], list[int]] | None = None  # and those whose leaving ends it
        self.failure: Exception | None = None  # of the function given as scale
        self.signatures: Signatures | None = None  # of all ranks, once they have been compared
        self.queue: CallQueue | None = None  # that it was entered into, under this number,
        self.number = -1
        self.recorder: Recorder | None = None  # and in the flight record at this index
        self.record = -1
        self.state = QUEUED  # as it was entered there
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = False
        self._callbacks: list[Callable[[], object]] | None = None
        try:
            frame = sys._getframe(plan.depth + 1)
        except ValueError:  # the interpreter itself has called the public method, at its end
            frame = sys._getframe(plan.depth)
        while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
            frame = frame.f_back
        self.code = frame.f_code  # the user's code that called, and where in it: to find the line takes much longer
        self.instruction = frame.f_lasti

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def more(self) -> str:
        """Its other arguments as text."""
        return self.plan.more if self.failure is None else f"{self.plan.more} with a scale that failed"

    @property
    def line(self) -> int:
        """The line of the user's file."""
        for start, stop, line in self.code.co_lines():
            if start <= self.instruction < stop and line is not None:
                return line
        return self.code.co_firstlineno

    @property
    def site(self) -> str:
        """`train.py:88`"""
        return f"{os.path.basename(self.code.co_filename)}:{self.line}"

    @property
    def array(self) -> str:
        """`float32 (512, 10)`; "" without an array."""
        return "" if self.plan.dtype is None else f"{self.plan.dtype} {self.plan.shape}"

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.name} #{self.number} ({self.site})", self.more, self.array)))

    def ask_scale(self) -> None:
        """Asks the function given as scale; what it raises is kept, and becomes part of what ranks compare."""
        try:
            self.scale = check_scale(np.dtype(np.float64), contextvars.copy_context().run(self.scale))
            if self.scale is None:
                raise ArgumentError("it returned no number")
        except Exception as error:
            self.scale, self.failure = None, error

    @property
    def digest(self) -> int:
        """What ranks compare, in one number."""
        digest = self.plan.digest
        if self.scale is not None and not callable(self.scale):
            digest ^= scale_bits(self.scale)
        return digest if self.failure is None else digest ^ _FAILED_SCALE

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """Lets its arrays go and publishes the outcome, once, then runs the done callbacks."""
        if self.done:
            return
        self.steps = self.source = self.target = self.early = self.out = self.scale = None
        self.result = result
        self.error = error
        if self.recorder is not None:
            self.recorder.end(self.record, DONE if error is None else FAILED)
        self.done = True
        if self._callbacks:
            self._run_callbacks()

    def abandon(self, error: BaseException) -> None:
        """In a forked child: this call goes on in the parent, whose flight record and callbacks it has."""
        self.recorder = None
        self._callbacks = None
        _parents.append((self.test, self.steps))  # which must not be closed here
        self.finish(None, error)

    def add_done_callback(self, fn: Callable[[], object]) -> None:
        """Calls fn once the outcome is known, in the thread that publishes it; now if it is known already."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(fn)
        if self.done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        assert self._callbacks is not None
        while True:
            try:
                fn = self._callbacks.pop(0)  # by one thread, should `finish` and `add_done_callback` run at once
            except IndexError:
                return
            try:
                contextvars.copy_context().run(fn)
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
        call = self._call
        if not call.done and call.queue is not None:
            call.queue.help()
        return call.done

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
        self.done()

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
