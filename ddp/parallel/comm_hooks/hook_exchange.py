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
before it is done, since NCCL's communicators share the device, where all calls should come in one order on every
rank. It costs next to nothing there: a round is done for the host when it has been handed to the device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from collectives import Communicator, Work
from collectives.errors import CollectivesError
from ddp._device import CPU, device, device_of
from ddp.errors import ArgumentError, DdpError, DtypeError, ParallelError
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Hook, Steps
from ddp.parallel.control import ControlMessage
from ddp.parallel.exchange import Exchange, Times

Array = Any  # numpy.ndarray or cupy.ndarray
_PAUSE = 50e-6  # s; between two looks at what is under way, once backward has nothing else to do

#: Which exchange uses each hook that has a state, by the hook's id, unique while the exchange, which holds it, lives.
_users: WeakValueDictionary[int, HookExchange] = WeakValueDictionary()
_lock = threading.Lock()  # never held during a collective: simulated ranks share it


def hook_settings(hook: Any) -> dict[str, Any]:
    """What ranks have to agree on: the hook's name, its phases, and what its attribute `same_on_all_ranks` lists.

    Raises: ArgumentError for a hook that cannot be called, or a number of phases that is none.
    """
    if hook is None:
        return {"comm_hook": None}
    if isinstance(hook, type):
        raise ArgumentError(f"comm_hook should be an object, {hook.__name__}(...), not the class")
    if not callable(hook):
        raise ArgumentError(f"comm_hook should be a function of a GradBucket, is {hook!r:.60}")
    phases, settings = getattr(hook, "phases", 1), getattr(hook, "same_on_all_ranks", {})
    if not isinstance(phases, int) or phases < 1:
        raise ArgumentError(f"a hook's phases should be how often it yields, at least 1, is {phases!r}")
    if not isinstance(settings, Mapping):
        raise ArgumentError(f"a hook's same_on_all_ranks should be a dict of settings, is {settings!r:.60}")
    name = _name(hook)
    listed = {f"comm_hook {name}: {key}": value for key, value in settings.items()}
    return {"comm_hook": name, f"comm_hook {name}: phases": phases, **listed}


def _name(hook: Hook) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


class _BucketRun:
    """One bucket in the hook. steps: the hook's run; phase: how many phases it has entered

    work: what it waits for, None before it begins and once the hook is done with it; launched, done: ns, or 0
    """

    __slots__ = ("bucket", "done", "launched", "phase", "steps", "work")

    def __init__(self) -> None:
        self.bucket: GradBucket
        self.steps: Steps
        self.work: Work[Any] | None = None
        self.phase = self.launched = self.done = 0


class HookExchange(Exchange):
    """The exchange that has a communication hook reduce the buckets. See `ddp.parallel.comm_hooks`.

    hook: the same on all ranks, see `hook_settings`; one with a state (a `state_dict`) serves one model at a time
    comm: duplicated once for each phase. Collective.
    names: of all parameters that the control message speaks of; where: their device

    Raises: ParallelError on every rank if on one of them the hook serves another model.
    """

    def __init__(self, hook: Hook, comm: Communicator, names: Sequence[str], where: device = CPU) -> None:
        super().__init__(comm)
        self.hook = hook
        self._rank = comm.rank
        self._names = tuple(names)
        self._claim(comm)
        self._phases: int = getattr(hook, "phases", 1)
        self._comms = [comm.duplicate() for _ in range(self._phases)]
        self._runs: list[_BucketRun] = []
        self._finished = 0  # runs: they end in order
        self._scale: float | None = None  # None until the control message has arrived
        self._used: dict[str, bool] = {}
        # One stream for ever: what a hook remembers lies in memory that is freed in that stream's order.
        self._stream = HookStream(None if where.type == "cpu" else where.xp.cuda)

    def _claim(self, comm: Communicator) -> None:
        mine = True
        if hasattr(self.hook, "state_dict"):
            with _lock:
                mine = _users.setdefault(id(self.hook), self) is self
        used = np.flatnonzero(comm.all_gather(np.array([not mine]), lengths="equal")).tolist()
        if used:
            self.release()
            raise ParallelError(
                f"comm_hook {_name(self.hook)} serves another model already, on rank {', '.join(map(str, used))}, and "
                "remembers that one's gradients: each model needs a hook object of its own, or close() of the other "
                "one comes first"
            )

    def release(self) -> None:
        """Lets the hook serve another model."""
        with _lock:
            if _users.get(id(self.hook)) is self:
                del _users[id(self.hook)]

    def close(self) -> None:
        """Gives the communicators back; the hook may serve another model."""
        self.release()
        for comm in self._comms:
            comm.close()

    def set_buckets(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        self._runs, self._finished = [], 0

    def begin(self, control: ControlMessage) -> None:
        super().begin(control)
        self._runs, self._finished, self._scale = [], 0, None

    def launch(self, index: int) -> None:
        assert index == len(self._runs)
        run = _BucketRun()
        run.steps = self._run(run, index, self._stream.mark())
        self._runs.append(run)
        self.poll()

    def poll(self) -> None:
        self._advance()

    def finish(self) -> None:
        self._control.wait()
        while self._finished < len(self._runs):
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
        before = end = self._phases + 1  # phases that the bucket before has entered; the last one is its end
        # Infinities and NaN are values here: a GradScaler looks for them afterwards.
        with np.errstate(all="ignore"):
            for index in range(self._finished, len(self._runs)):
                run = self._runs[index]
                while run.phase < before and self._may_enter(run, before == end):
                    if run.phase == 0 or run.work is not None:  # without a Work it needed fewer phases
                        self._resume(run, index)
                    run.phase += 1
                    moved = True
                before = run.phase
                self._finished += before == end
                if before == 0:  # none behind it has begun, or may begin
                    break
        return moved

    def _may_enter(self, run: _BucketRun, before_is_done: bool) -> bool:
        """Whether a bucket can enter its next phase, or end, without waiting."""
        if run.phase == 0:
            return before_is_done or self._phases == 1 or not self._stream.one_by_one
        return run.work is None or run.work.done()

    def _resume(self, run: _BucketRun, index: int) -> None:
        """Goes on with the hook where its Work is done."""
        with self._stream.inside(), self._errors(index):
            result = None
            if run.phase > 0 and run.work is not None:
                result, run.bucket._phase, run.work = run.work.wait(), run.phase, None
            try:
                run.work = run.steps.send(result)
            except StopIteration:
                run.done = time.monotonic_ns()

    def _run(self, run: _BucketRun, index: int, mark: Any) -> Steps:
        """Runs the hook on a bucket: yields each Work that it waits for, and checks what it gives.

        mark: behind the kernels that made the bucket
        """
        memory, members = self._buckets.memory, self._buckets.members[index]
        assert self._scale is not None
        names = tuple(self._buckets.names[each] for each in members)
        bucket = run.bucket = GradBucket(
            index=index,
            count=len(self._buckets.members),
            buffer=memory.buffers[index],
            names=names,
            gradients=tuple(memory.views[each] for each in members),
            used=tuple(self._used[name] for name in names),
            scale=self._scale,
            _comms=self._comms,
        )
        run.launched = time.monotonic_ns()
        self._stream.after(mark)
        made = self.hook(bucket)
        if isinstance(made, Work):
            result = yield made
            if not _shares(result, bucket.buffer):
                raise ParallelError(
                    "the Work that it returned does not leave its result in bucket.buffer: call the collective with "
                    "out=bucket.buffer, or yield the Work and copy its result"
                )
        elif isinstance(made, Generator):
            result = None
            with contextlib.suppress(StopIteration), contextlib.closing(made):
                while True:
                    work = made.send(result)
                    if not isinstance(work, Work):
                        raise DtypeError(
                            f"it yielded {type(work).__name__}, should be a Work: call collectives with async_op=True"
                        )
                    if bucket._phase == self._phases:
                        raise ParallelError(
                            f"it yields more often than it has phases ({self._phases}): set its attribute phases to "
                            "how often it yields"
                        )
                    result = yield work
        elif made is not None:
            raise DtypeError(f"it returned {type(made).__name__}, should be a Work, None, or be a generator")

    @contextlib.contextmanager
    def _errors(self, index: int) -> Iterator[None]:
        """Names the hook and the bucket in errors; errors of ours keep their type."""
        where = f"communication hook {_name(self.hook)} on {self._buckets.describe(index)}"
        try:
            yield
        except CollectivesError as error:
            raise type(error)(f"{where}: {error}") from error.__cause__
        except DdpError as error:
            raise type(error)(f"rank {self._rank}: {where}: {error}") from error
        except Exception as error:
            raise ParallelError(f"rank {self._rank}: {where}: {type(error).__name__}: {error}") from error


def _shares(result: Any, buffer: Array) -> bool:
    """Whether a collective's result lies in the bucket."""
    if result is buffer:
        return True
    xp = device_of(buffer).xp
    return isinstance(result, xp.ndarray) and bool(buffer.size == 0 or xp.may_share_memory(result, buffer))


class HookStream:
    """Where a hook computes: on a stream of its own, or for host arrays in the thread that runs backward.

    cuda: the module cupy.cuda, None for host arrays
    one_by_one: communicators share what is below them, and need one order of all calls
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._stream = None if cuda is None else cuda.Stream(non_blocking=True)
        self.one_by_one = cuda is not None

    def mark(self) -> Any:
        """What the calling thread's stream holds now."""
        return None if self._cuda is None else self._marked(self._cuda.get_current_stream())

    def after(self, mark: Any) -> None:
        """What is launched on the hook's stream from now on runs behind that."""
        if self._stream is not None:
            self._stream.wait_event(mark)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, this thread computes on the hook's stream."""
        if self._stream is None:
            yield
            return
        before = self._cuda.get_current_stream()
        try:
            with self._stream:
                yield
        finally:
            before.use()  # CuPy's context ends on the stream whose context is around it, and `before` may be another

    def join(self) -> None:
        """What is launched on the calling thread's stream from now on runs behind all that is on the hook's stream."""
        if self._stream is not None:
            self._cuda.get_current_stream().wait_event(self._marked(self._stream))

    def _marked(self, stream: Any) -> Any:
        event = self._cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event
