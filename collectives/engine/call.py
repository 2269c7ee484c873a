"""A collective in progress: its name and arguments, its steps, its outcome, and the `Work` that the user holds.

The steps of a collective are a generator, which yields the test of each operation and returns the result. So any thread
can take the next step.
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

from collectives.errors import ROOT, ArgumentError, CollectiveTimeout, copy_error
from collectives.flight.recorder import DONE, FAILED, QUEUED, Recorder
from collectives.reduction import Array, Reduction, check_scale, scale_bits
from collectives.time_limit import Deadline
from collectives.transport import ExitNotice, Signatures, Steps, Test

if TYPE_CHECKING:
    from collectives.engine.queue import CallQueue

T = TypeVar("T")

_log = logging.getLogger("collectives")
_OURS = tuple(os.path.join(ROOT, package) + os.sep for package in ("collectives", "ddp"))
# Prefixes of the paths of files that are skipped in the search for the user's line. contextlib is one of these files,
# since `with model.join():` makes calls at its end, through contextlib.
_SKIPPED = (*_OURS, contextlib.__file__)
# `CallQueue.submit` itself starts collectives on arrays of at most this many bytes: copying a larger array would delay
# the caller. If the transport can have several collectives in flight, it also starts larger ones that are in place.
_SMALL = 1 << 16


def skip_frames(*packages: str) -> None:
    """Makes errors and reports skip the lines of these packages: they name the line that called into a package.

    packages: names of packages or modules that call collectives for their users, as `import` takes them
    Raises: ArgumentError if one of them is not installed, or is a namespace package; ModuleNotFoundError for a
    submodule of a package that is not installed.
    """
    global _SKIPPED
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ArgumentError(f"skip_frames takes packages that are installed; there is no {name!r}")
        folders = spec.submodule_search_locations
        paths = (spec.origin,) if folders is None else tuple(os.path.join(folder, "") for folder in folders)
        _SKIPPED = tuple(dict.fromkeys((*_SKIPPED, *paths)))


@functools.lru_cache(maxsize=4096)
def signature_digest(name: str, more: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> int:
    """A 63-bit hash of what ranks must agree on, the same in every process."""
    text = repr((name, more, None if dtype is None else (dtype.str, dtype.name), shape))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False)
class Plan:
    """What all calls of one collective with the same dtype, shape and other arguments have in common.

    A communicator keeps plans for later calls. Calls change only `recorded`, and the state of `inline`.

    name: the collective's name; more: a text of the arguments that must be equal on all ranks, without array and scale;
    for send and recv, a text of the other rank and the tag
    dtype, shape: dtype and shape of this rank's array; None if it has none
    agreed: the shape, or a part of it, that must be equal on all ranks, and the dtype with it; None: both may differ
    checksum: a number that each rank shows the others, and that may differ: the length along axis 0, or a checksum
    prefix: (n,) uint8 that other ranks can get by `Transport.root_prefix` and `all_prefixes`
    shown: whether other ranks may read the array as soon as they have the signature
    reduction: for reductions: what to compute, and the dtype in which the array is sent
    body: a function that returns the steps that move the array after ranks have compared the call
    layout: a function that describes the result if all arrays travel with the signatures; None if they cannot
    result: the shape of this rank's result, if it is known before the call
    beside: whether the body is a single operation that may run at the same time as the operation of the next call
    depth: at most the number of stack frames between the user's code and the creation of a call
    inline: the fast path for calls whose arrays travel with the signatures, on a transport that has one
    recorded: a dict. Key: the call site, as the id of a code object and an instruction in it. Value: the number of the
    call's text in the flight record, and the code object, which is kept so that its id is not reused
    """

    name: str
    more: str = ""
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    agreed: tuple[int, ...] | None = None
    checksum: int = 0
    prefix: Array | None = None
    shown: bool = True
    reduction: Reduction | None = None
    body: Any = None
    layout: Any = None
    result: tuple[int, ...] | None = None
    beside: bool = False
    depth: int = 2
    digest: int = field(init=False)
    small: bool = field(init=False)  # Whether the calling thread may take the first step of an asynchronous call.
    inline: Any = field(default=None, init=False)
    recorded: dict[tuple[int, int], tuple[int, CodeType]] = field(default_factory=dict, init=False)

    @property
    def wire(self) -> Any:
        """The dtype in which the array is sent."""
        return self.dtype if self.reduction is None else self.reduction.wire

    def __post_init__(self) -> None:
        dtype = None if self.agreed is None else self.dtype
        self.digest = signature_digest(self.name, self.more, dtype, self.agreed)
        self.small = self.shape is None or math.prod(self.shape) * self.dtype.itemsize <= _SMALL


# In a forked child: tests and steps of the parent's calls, kept alive so that they are not closed here.
_parents_steps: list[Any] = []

_FAILED_SCALE = signature_digest("", "a scale that failed", None, None)


class CollectiveOp(Generic[T]):
    """One collective, send or receive on one rank: its arguments, its steps, and its outcome.

    arrays: the object that reads and makes its arrays, a `HostArrays` or `DeviceArrays`; source: the caller's array
    target: the array that receives the result, if known before the call: `out` as an array, the array that a broadcast
    overwrites, or new memory for a reduction on a GPU
    out: as the caller passed it; for a broadcast, x
    scale: the factor of a reduction's result, or a function that returns it. On the host, the function is called before
    ranks compare the call, and is replaced by its result
    preallocated: memory for the result of a gather on a GPU, if its shape is known before the call
    """

    # Without slots, or as a dataclass, creating a call takes half a microsecond longer.
    __slots__ = (
        "_callbacks",
        "arrays",
        "code",
        "deadline",
        "done",
        "ended_by",
        "error",
        "failure",
        "instruction",
        "number",
        "out",
        "peers",
        "plan",
        "posted",
        "preallocated",
        "queue",
        "record",
        "recorder",
        "result",
        "scale",
        "signatures",
        "source",
        "state",
        "steps",
        "target",
        "test",
        "timeout",
        "waited_for",
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
        preallocated: Any = None,
    ) -> None:
        self.plan = plan
        self.timeout = timeout
        self.arrays = arrays
        self.source = source
        self.target = target
        self.out = out
        self.scale = scale
        self.preallocated = preallocated
        # Whether a thread waits for this call, or has waited.
        self.waited_for = False
        self.steps: Steps[T] | None = None
        # Whether the call's operation has been started, and the next call may start before the operation is complete.
        self.posted = False
        # The operation's test. Kept, since a backend's request owns the buffers that it still reads and writes.
        self.test: Test | None = None
        # The deadline of `test`, set once `test` has been False for a while.
        self.deadline: Deadline | None = None
        # For a send, a receive or create_group: the ranks that can answer the call, and a function that returns the
        # ranks whose exit ends it. None for collectives.
        self.peers: Sequence[int] | None = None
        self.ended_by: Callable[[Mapping[int, ExitNotice]], list[int]] | None = None
        # The exception that the function given as scale has raised, or the error for a result that is not a number.
        self.failure: Exception | None = None
        # The signatures of all ranks, once they have been compared.
        self.signatures: Signatures | None = None
        # The queue that the call was added to, and the call's number there.
        self.queue: CallQueue | None = None
        self.number = -1
        # The flight recorder, and the call's index there. The state is QUEUED until the call's turn comes, although its
        # operation may be under way before that.
        self.recorder: Recorder | None = None
        self.record = -1
        self.state = QUEUED
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = False
        self._callbacks: list[Callable[[], object]] | None = None
        try:
            frame = sys._getframe(plan.depth + 1)
        except ValueError:  # The interpreter itself has called the public method, while it exits.
            frame = sys._getframe(plan.depth)
        while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
            frame = frame.f_back
        # The call site: the user's code object, and the instruction in it. Finding the line takes much longer.
        self.code = frame.f_code
        self.instruction = frame.f_lasti

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def more(self) -> str:
        """As text: the arguments that must be equal on all ranks, without array and scale, and whether scale failed."""
        return self.plan.more if self.failure is None else f"{self.plan.more} with a scale that failed"

    @property
    def line(self) -> int:
        """The call's line in the user's file."""
        for start, stop, line in self.code.co_lines():
            if start <= self.instruction < stop and line is not None:
                return line
        return self.code.co_firstlineno

    @property
    def site(self) -> str:
        """The place of the call in the user's code: `train.py:88`."""
        return f"{os.path.basename(self.code.co_filename)}:{self.line}"

    @property
    def array(self) -> str:
        """The array's dtype and shape: `float32 (512, 10)`; "" without an array."""
        return "" if self.plan.dtype is None else f"{self.plan.dtype} {self.plan.shape}"

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.name} #{self.number} ({self.site})", self.more, self.array)))

    def compute_scale(self) -> None:
        """Calls the function given as scale. An exception is stored, and becomes part of what ranks compare."""
        try:
            self.scale = check_scale(np.dtype(np.float64), contextvars.copy_context().run(self.scale))
            if self.scale is None:
                raise ArgumentError("it returned no number")
        except Exception as error:
            self.scale = None
            self.failure = error

    @property
    def digest(self) -> int:
        """A hash of what ranks compare."""
        digest = self.plan.digest
        if self.scale is not None and not callable(self.scale):
            digest ^= scale_bits(self.scale)
        return digest if self.failure is None else digest ^ _FAILED_SCALE

    def set_outcome(self, result: T | None, error: BaseException | None) -> None:
        """Releases the call's arrays, publishes the outcome, and runs the done callbacks. Does so only once."""
        if self.done:
            return
        self.steps = self.source = self.target = self.preallocated = self.out = self.scale = None
        self.result = result
        self.error = error
        if self.recorder is not None:
            self.recorder.end(self.record, DONE if error is None else FAILED)
        self.done = True
        if self._callbacks:
            self._run_callbacks()

    def abandon(self, error: BaseException) -> None:
        """In a forked child: ends the parent's call here, without touching the parent's flight record and callbacks."""
        self.recorder = None
        self._callbacks = None
        _parents_steps.append((self.test, self.steps))
        self.set_outcome(None, error)

    def add_done_callback(self, fn: Callable[[], object]) -> None:
        """Calls fn once the outcome is known, in the thread that publishes it; immediately if it is known already."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(fn)
        if self.done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        assert self._callbacks is not None
        while True:
            try:
                # `set_outcome` and `add_done_callback` may run at once; each callback runs in one of their threads.
                fn = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                contextvars.copy_context().run(fn)
            except (Exception, SystemExit):  # These would end the helper thread.
                _log.exception("a done callback of %s raised", self)

    def outcome(self) -> T:
        """The result of a finished call. Raises: the call's error."""
        if self.error is not None:
            assert self.queue is not None
            self.queue.notify()
            raise copy_error(self.error)
        return self.result  # type: ignore[return-value]  # A finished call without an error has a result.


class Work(Generic[T]):
    """A collective in progress, as `async_op=True` returns it. It keeps its arrays alive until it is complete.

    Until `wait` returns, the arrays passed to the collective must not be changed, and output arrays not be read.
    """

    __slots__ = ("_call",)

    def __init__(self, call: CollectiveOp[T]) -> None:
        self._call = call

    def done(self) -> bool:
        """True if `wait` would return or raise immediately."""
        call = self._call
        if not call.done and call.queue is not None:
            call.queue.wake_helper()
        return call.done

    def wait(self, timeout: float | Deadline | None = None) -> T:
        """Waits until the collective is complete, and returns its result. May be called again.

        timeout: seconds that this call waits at most, or a deadline that several calls share; the collective's own
        time limit holds as well
        Raises: CollectiveTimeout if it is not complete in time (after a timeout given here, the communicator is still
        usable); the error of the collective, if it failed; CollectivesError if it is not complete, and a done callback,
        signal handler or finalizer calls this in the thread that has to complete it.
        """
        call = self._call
        if not call.done:
            assert call.queue is not None
            deadline = timeout if timeout is None or isinstance(timeout, Deadline) else Deadline(timeout)
            if not call.queue.wait(call, deadline):
                assert deadline is not None
                raise CollectiveTimeout(f"{call} was not complete after waiting {deadline.seconds:g} s; it goes on")
        return call.outcome()

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Calls fn(work) once the collective is complete or has failed; immediately if it already is.

        fn: runs in the thread that completes the call: a helper thread, or one that starts or waits for a call of the
        same communicator. Callbacks run in the order in which they were added. They may start calls with
        `async_op=True`. A callback that runs in such a thread must not wait for a call of the same communicator that is
        not complete: this raises CollectivesError, since the call cannot continue before the callback returns.
        Exceptions of callbacks are logged and otherwise ignored.
        Raises: ArgumentError if fn is not callable.
        """
        if not callable(fn):
            raise ArgumentError(f"a done callback should be a function of one argument, is {fn!r}")
        self._call.add_done_callback(lambda: fn(self))
        self.done()

    def times(self) -> tuple[int, int, int] | None:
        """When the call was made, started and completed on this rank, in ns of `time.monotonic_ns()`; 0: not yet.

        None if a thousand later calls of this process have overwritten the call in the flight record; in a forked child
        also for a call that was in progress. On a GPU, a call counts as completed once it is handed to the device.
        """
        call = self._call
        return None if call.recorder is None else call.recorder.times(call.record)

    def __str__(self) -> str:
        return str(self._call)

    def __repr__(self) -> str:
        return f"<Work {self._call}: {'done' if self.done() else 'under way'}>"
