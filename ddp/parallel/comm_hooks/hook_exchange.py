"""Communication hooks: a user's function, instead of an all-reduce, makes of each bucket what its gradients become.

A hook that takes several rounds (round, exchange, sum, exchange) would block backward if it waited between them. So it
is a generator that yields what it waits for, and is resumed when that is there and backward polls.

Ranks see their buckets fill, and their rounds end, at different times, and must make the same calls in the same order
all the same. So each round of a hook (a phase) has a communicator of its own, and in each phase buckets go in the order
of the plan: the third bucket's second round never overtakes the second's.

    bucket 0   phase 0 ──── phase 1 ──── done
    bucket 1        phase 0 ──── phase 1 ──── done        down each column the order is 0, 1, 2 on every rank;
    bucket 2             phase 0 ──── phase 1 ──── done   how the columns interleave is each rank's own

On a GPU the hook's kernels, and its waits for communication, go on a stream of their own: behind the kernels that made
the bucket, before those that read it when backward has ended. The host waits for neither. A bucket begins when the one
before it is through, since NCCL's communicators share the device, where all calls should come in one order on every
rank. It costs next to nothing there: a round is through for the host when it has been handed to the device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from collectives import Communicator, Work
from collectives.errors import CollectivesError
from ddp._device import device_of
from ddp.errors import ArgumentError, DdpError, DtypeError, ParallelError
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Hook, Steps
from ddp.parallel.control import ControlMessage
from ddp.parallel.error_context import error_context
from ddp.parallel.exchange import Times

Array = Any  # numpy.ndarray or cupy.ndarray
_PAUSE = 50e-6  # s; between two looks at what is under way, once backward has nothing else to do


class _BucketRun:
    """One bucket's way through the hook."""

    __slots__ = ("bucket", "done", "launched", "mark", "steps", "work")

    def __init__(self, mark: Any) -> None:
        self.mark = mark  # behind the kernels that made the bucket
        self.bucket: GradBucket
        self.steps: Steps | None = None
        self.work: Work[Any] | None = None  # what it waits for; None once the hook is done with it
        self.launched = self.done = 0  # ns


class HookExchange:
    """The exchange that has a communication hook reduce the buckets. See `ddp.parallel.comm_hooks`.

    hook: what `Hook` says; one with a state (a `state_dict`) serves one model at a time
    comm: duplicated once for each phase. Collective.
    names: of all parameters that the control message speaks of

    Raises: ArgumentError for a hook that cannot be called, or a number of phases that is none; ParallelError on every
    rank if ranks bring different hooks, or on one of them its state is another model's.
    """

    def __init__(self, hook: Hook, comm: Communicator, names: Sequence[str]) -> None:
        if isinstance(hook, type):
            raise ArgumentError(f"comm_hook should be an object, {hook.__name__}(...), not the class")
        if not callable(hook):
            raise ArgumentError(f"comm_hook should be a function of a GradBucket, is {hook!r:.60}")
        self.hook = hook
        self._phases = _phases(hook)
        self._name = str(getattr(hook, "__name__", type(hook).__name__))
        self._rank = comm.rank
        self._names = tuple(names)
        agree_on_hook(comm, self, hook, self._name, self._phases)
        self._comms = [comm.duplicate() for _ in range(self._phases)]
        self._runs: list[_BucketRun] = []
        self._next = [0] * (self._phases + 1)  # for each phase, and the end: which bucket comes to it next
        self._scale: float | None = None  # None until the control message has arrived
        self._used: dict[str, bool] = {}
        self._control: ControlMessage
        self._buckets: Buckets
        self._xp: Any = None
        self._stream: HookStream = HostHookStream()

    def close(self) -> None:
        """Gives the communicators back; the hook may serve another model."""
        release_hook(self, self.hook)
        for comm in self._comms:
            comm.close()

    def set_buckets(self, buckets: Buckets) -> None:
        self._buckets = buckets
        if self._xp is None and buckets.memory.buffers:
            # One stream for ever: what a hook remembers lies in memory that is freed in that stream's order.
            self._xp = device_of(buckets.memory.buffers[0]).xp
            self._stream = hook_stream(self._xp)
        self._runs = []

    def begin(self, control: ControlMessage) -> None:
        self._control = control
        self._scale = None
        self._runs = []
        self._next = [0] * (self._phases + 1)

    def launch(self, index: int) -> None:
        assert index == len(self._runs)
        self._runs.append(_BucketRun(self._stream.mark()))
        self.poll()

    def poll(self) -> None:
        self._advance()

    def finish(self) -> None:
        self._control.wait()
        while self._next[-1] < len(self._runs):
            if not self._advance():
                time.sleep(_PAUSE)
        self._stream.join()

    def times(self) -> list[Times | None]:
        return [(run.launched, run.done) if run.done else None for run in self._runs]

    def _advance(self) -> bool:
        """Takes every bucket as far as it can go without waiting. False if none could go on."""
        if self._scale is None:
            if not self._control.done():
                return False
            self._control.wait()  # raises what ended it
            self._scale = self._control.scale()
            self._used = dict(zip(self._names, self._control.used(), strict=True))
        moved = False
        # Infinities and NaN are values here: whoever scales a loss looks for them afterwards.
        with np.errstate(all="ignore"):
            swept = True
            while swept:
                swept = False
                for phase in range(self._phases + 1):
                    while self._passes(self._next[phase], phase):
                        swept = moved = True
                        self._next[phase] += 1
        return moved

    def _passes(self, index: int, phase: int) -> bool:
        """Takes a bucket into that phase, unless it is not its turn yet."""
        if phase == 0:
            one_by_one = self._stream.one_by_one and self._phases > 1
            if index == len(self._runs) or (one_by_one and index != self._next[-1]):
                return False
            self._start(index)
            return True
        if index == self._next[phase - 1]:
            return False
        run = self._runs[index]
        if run.work is None:  # it needed fewer phases
            return True
        if not run.work.done():
            return False
        self._resume(index, run, run.work, phase)
        return True

    def _start(self, index: int) -> None:
        memory, members = self._buckets.memory, self._buckets.members[index]
        assert self._scale is not None
        run = self._runs[index]
        names = [self._buckets.names[each] for each in members]
        run.bucket = GradBucket(
            index=index,
            count=len(self._buckets.members),
            buffer=memory.buffers[index],
            names=names,
            gradients=[memory.views[each] for each in members],
            used=[self._used[name] for name in names],
            scale=self._scale,
            comms=self._comms,
        )
        run.launched = time.monotonic_ns()
        self._stream.after(run.mark)
        with self._inside(index):
            given = self.hook(run.bucket)
        if isinstance(given, Generator):
            run.steps = given
            self._go_on(index, run, None)
        elif isinstance(given, Work):
            run.work = given
        elif given is None:
            self._end(run)
        else:
            raise self._wrong(index, f"returned {type(given).__name__}", "a Work, None, or be a generator")

    def _resume(self, index: int, run: _BucketRun, work: Work[Any], phase: int) -> None:
        with self._inside(index):
            result = work.wait()
        run.bucket._phase = phase
        if run.steps is not None:
            self._go_on(index, run, result)
            return
        if not _shares(result, run.bucket.buffer):
            raise ParallelError(
                f"rank {self._rank}: {self._where(index)}: the Work that it returned does not leave its result in "
                "bucket.buffer: call the collective with out=bucket.buffer, or yield the Work and copy what comes"
            )
        times = work.times()
        self._end(run, 0 if times is None else times[2])

    def _go_on(self, index: int, run: _BucketRun, result: Any) -> None:
        assert run.steps is not None
        run.work = None
        with self._inside(index):
            try:
                given = run.steps.send(result)
            except StopIteration:
                self._end(run)
                return
        if not isinstance(given, Work):
            run.steps.close()
            raise self._wrong(index, f"yielded {type(given).__name__}", "a Work: call collectives with async_op=True")
        if run.bucket._phase == self._phases:
            run.steps.close()
            raise ParallelError(
                f"rank {self._rank}: {self._where(index)}: it yields more often than it has phases ({self._phases}): "
                "set its attribute phases to how often it yields"
            )
        run.work = given

    def _end(self, run: _BucketRun, done: int = 0) -> None:
        run.work = run.steps = None
        run.done = done or time.monotonic_ns()

    @contextlib.contextmanager
    def _inside(self, index: int) -> Iterator[None]:
        """Where the hook's code runs. What it raises names the bucket; errors of ours keep their type."""
        try:
            with self._stream.inside(), error_context(self._where(index)):
                yield
        except CollectivesError:
            raise
        except DdpError as error:
            raise type(error)(f"rank {self._rank}: {self._where(index)}: {error}") from error
        except Exception as error:
            raise ParallelError(f"rank {self._rank}: {self._where(index)}: {type(error).__name__}: {error}") from error

    def _where(self, index: int) -> str:
        return f"communication hook {self._name} on {self._buckets.describe(index)}"

    def _wrong(self, index: int, what: str, expected: str) -> DtypeError:
        return DtypeError(f"rank {self._rank}: {self._where(index)}: it {what}, should be {expected}")


def _phases(hook: Hook) -> int:
    phases = getattr(hook, "phases", 1)
    if not isinstance(phases, int) or phases < 1:
        raise ArgumentError(f"a hook's phases should be how often it yields, at least 1, is {phases!r}")
    return phases


def _shares(result: Any, buffer: Array) -> bool:
    """Whether a collective's result lies in the bucket."""
    if result is buffer:
        return True
    xp = device_of(buffer).xp
    return isinstance(result, xp.ndarray) and bool(buffer.size == 0 or xp.may_share_memory(result, buffer))


#: Who uses each hook that has a state, by the hook's id, which is nobody else's while a user lives, and holds the hook.
_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = threading.Lock()  # never held during a collective: simulated ranks share it


class HookDescription(NamedTuple):
    """What a rank brings, as it tells the others.

    settings: in words, by name; free: nobody else on this rank uses the hook
    """

    name: str
    phases: int
    settings: Mapping[str, str]
    free: bool


def agree_on_hook(comm: Communicator, user: Any, hook: Hook, name: str, phases: int) -> None:
    """Makes the hook `user`'s own, if it has a state, until `release_hook`. Collective.

    Raises: ParallelError on every rank if ranks bring different hooks, or one of them is in use.
    """
    settings = getattr(hook, "same_on_all_ranks", {})
    if not isinstance(settings, Mapping):
        raise ArgumentError(f"a hook's same_on_all_ranks should be a dict of settings, is {settings!r:.60}")
    words = {str(key): repr(value) for key, value in settings.items()}
    try:
        with error_context("DataParallel, comparing the ranks' communication hooks"):
            everyones = comm.all_gather_object(tuple(HookDescription(name, phases, words, _claim(user, hook))))
        _check([HookDescription(*each) for each in everyones])
    except BaseException:
        release_hook(user, hook)
        raise


def release_hook(user: Any, hook: Hook) -> None:
    """The hook, if it is `user`'s, may be another's."""
    with _lock:
        if _users.get(id(hook)) is user:
            del _users[id(hook)]


def _claim(user: Any, hook: Hook) -> bool:
    if not hasattr(hook, "state_dict"):
        return True
    with _lock:
        return _users.setdefault(id(hook), user) is user


def _check(everyones: Sequence[HookDescription]) -> None:
    first = everyones[0]
    if any((each.name, each.phases) != (first.name, first.phases) for each in everyones):
        listed = [
            f"rank {rank} gives {each.name} with {each.phases} phase{'' if each.phases == 1 else 's'}"
            for rank, each in enumerate(everyones)
        ]
        raise ParallelError(f"all ranks should give the same comm_hook: {', '.join(listed)}")
    for rank, each in enumerate(everyones):
        for name in sorted({*first.settings, *each.settings}):
            zeros, theirs = first.settings.get(name, "missing"), each.settings.get(name, "missing")
            if zeros != theirs:
                raise ParallelError(
                    f"comm_hook {first.name}: {name} is {zeros:.60} on rank 0, but {theirs:.60} on rank {rank}: all "
                    "ranks have to give the same"
                )
    used = [str(rank) for rank, each in enumerate(everyones) if not each.free]
    if used:
        raise ParallelError(
            f"comm_hook {first.name} serves another model already, on rank {', '.join(used)}, and remembers that one's "
            "gradients: each model needs a hook object of its own, or close() of the other one comes first"
        )


class HookStream(Protocol):
    """Where a hook computes. one_by_one: communicators share what is below them, and want one order of all calls"""

    one_by_one: bool

    def mark(self) -> Any:
        """What the calling thread's stream holds now."""

    def after(self, mark: Any) -> None:
        """What comes on the stream from now on comes behind that."""

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread computes on the stream."""

    def join(self) -> None:
        """What comes on the calling thread's stream from now on comes behind all that is on the stream."""


class HostHookStream:
    """For host arrays."""

    one_by_one = False

    def mark(self) -> None:
        return None

    def after(self, mark: None) -> None:
        return

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def join(self) -> None:
        return


class DeviceHookStream:
    """For arrays of CuPy (`xp`), on its current device."""

    one_by_one = True

    def __init__(self, xp: Any) -> None:
        self._cuda = xp.cuda
        self._stream = xp.cuda.Stream(non_blocking=True)

    def mark(self) -> Any:
        return self._marked(self._cuda.get_current_stream())

    def after(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before = self._cuda.get_current_stream()
        try:
            with self._stream:
                yield
        finally:
            before.use()  # CuPy's context ends on the stream whose context is around it, and `before` may be another

    def join(self) -> None:
        self._cuda.get_current_stream().wait_event(self._marked(self._stream))

    def _marked(self, stream: Any) -> Any:
        event = self._cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event


def hook_stream(xp: Any) -> HookStream:
    """The stream for arrays of that module."""
    return HostHookStream() if xp is np else DeviceHookStream(xp)
