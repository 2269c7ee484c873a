"""The exchange with a communication hook: a user's function reduces each bucket, instead of an all-reduce.

A hook of several rounds (such as an exchange, a sum and another exchange) would block backward if it waited between
them. So it is a generator that yields each Work that it waits for. `poll` resumes it when the Work is complete; at the
end of backward `finish` waits for the rest.

The times at which buckets fill and rounds end differ between ranks, but all ranks must make the same calls in the same
order. So rounds are made in the order of a pipeline: bucket k begins, then bucket k - 1 makes its second round, then
bucket k - 2 its third. While one round is on the network, the next one is queued behind it.

    bucket 0 round 0 | bucket 1 round 0, bucket 0 round 1 | bucket 2 round 0, bucket 1 round 1, bucket 0 round 2 | ...

On a GPU the hook's kernels and its waits for communication run on a stream of their own: after the kernels that wrote
the bucket, and before those that read it when backward has ended. With NCCL the host does not wait for them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from collectives import Communicator, Work
from collectives.errors import CollectivesError, name_ranks
from ddp._device import CPU, device, device_of
from ddp.errors import ArgumentError, DdpError, DtypeError, ParallelError
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Hook, Steps
from ddp.parallel.control import ControlMessage
from ddp.parallel.exchange import Exchange, Times

Array = Any  # numpy.ndarray or cupy.ndarray

# Key: the id of a hook with state. Value: the exchange that uses it, which keeps the hook alive: ids stay unique.
_users: WeakValueDictionary[int, HookExchange] = WeakValueDictionary()
# Never held during a collective: ranks may be threads of this process, and would wait for each other.
_lock = threading.Lock()


def hook_settings(hook: Any) -> dict[str, Any]:
    """The settings that must be equal on all ranks: the hook's name, and those in its attribute `same_on_all_ranks`.

    Raises: ArgumentError for a hook that is a class, or not callable.
    """
    if hook is None:
        return {"comm_hook": None}
    if isinstance(hook, type) or not callable(hook):
        raise ArgumentError(f"comm_hook should be a function of a GradBucket, or an object like one, is {hook!r:.60}")
    name = _name(hook)
    settings = getattr(hook, "same_on_all_ranks", {})
    return {"comm_hook": name, **{f"comm_hook {name}: {key}": value for key, value in settings.items()}}


def _name(hook: Hook) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


class HookExchange(Exchange):
    """Reduces buckets by a communication hook. See `ddp.parallel.comm_hooks`.

    hook: the same on all ranks, see `hook_settings`; one with a `state_dict` serves one model at a time
    names: of all parameters, in the order of the control message; device: of the parameters
    replaced: if a module is wrapped again, the exchange of its old wrapper; the hook passes from there to this exchange

    Raises: ParallelError on every rank if on one of them the hook serves another model. Collective.
    """

    def __init__(
        self,
        hook: Hook,
        comm: Communicator,
        names: Sequence[str],
        device: device = CPU,
        replaced: HookExchange | None = None,
    ) -> None:
        super().__init__(comm)
        self.hook = hook
        self._names = tuple(names)
        self._claim(replaced)
        # The same stream for all steps: a hook's state is in memory that is freed in that stream's order.
        self._stream = HookStream(None if device.type == "cpu" else device.xp.cuda)
        self._reset()

    def _reset(self) -> None:
        self._marks: list[Any] = []  # for each full bucket, an event after the kernels that wrote it
        self._launched: list[int] = []  # when the hook began with each bucket, ns
        self._done: dict[int, int] = {}  # when each bucket was reduced, ns
        self._rounds = self._pipeline()
        self._returned: dict[int, Work[Any]] = {}  # the Works that hooks have returned, by bucket
        self._used: dict[str, bool] | None = None  # None until the control message has arrived

    def _claim(self, replaced: HookExchange | None) -> None:
        claimed = True
        if hasattr(self.hook, "state_dict"):
            with _lock:
                claimed = _users.setdefault(id(self.hook), self) in (self, replaced)
        used = np.flatnonzero(self._comm.all_gather(np.array([not claimed]), lengths="equal")).tolist()
        if used:
            self.release()
            raise ParallelError(
                f"comm_hook {_name(self.hook)} serves another model already, on {name_ranks(used)}, and "
                "remembers that one's gradients: each model needs a hook object of its own, or close() of the other "
                "one comes first"
            )
        with _lock:
            if id(self.hook) in _users:
                _users[id(self.hook)] = self

    def release(self) -> None:
        """Lets the hook serve another model."""
        with _lock:
            if _users.get(id(self.hook)) is self:
                del _users[id(self.hook)]

    def set_buckets(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        self._reset()

    def begin(self, control: ControlMessage) -> None:
        super().begin(control)
        self._reset()

    def launch(self, index: int) -> None:
        self._marks.append(self._stream.mark())
        self.poll()

    def poll(self) -> None:
        if self._used is not None or self._control.done():
            next(self._rounds, None)

    def finish(self) -> None:
        with self._stream.inside():
            for index, work in self._rounds:
                with self._errors(index):
                    work.wait()
            for index, work in self._returned.items():
                with self._errors(index):
                    if not _shares(work.wait(), self._buckets.memory.buffers[index]):
                        raise ParallelError(
                            "the Work that it returned does not leave its result in bucket.buffer: call the collective "
                            "with out=bucket.buffer, or yield the Work and copy its result"
                        )
                times = work.times()
                self._done[index] = time.monotonic_ns() if times is None else times[2]
        self._stream.join()

    def times(self) -> list[Times | None]:
        return [(launched, self._done[index]) for index, launched in enumerate(self._launched)]

    def _pipeline(self) -> Iterator[tuple[int, Any]]:
        """Runs the hook on all buckets. To wait, yields (bucket, Work); (bucket, None) if the bucket is not full."""
        self._control.wait()
        self._used = dict(zip(self._names, self._control.used(), strict=True))
        runs: dict[int, tuple[Steps, Work[Any] | None]] = {}  # by bucket: its run, and the Work that it waits for
        for tick in itertools.count():
            if tick < len(self._buckets.members):
                while tick == len(self._marks):
                    yield tick, None
                self._launched.append(time.monotonic_ns())
                runs[tick] = self._run(tick), None
            elif not runs:
                return
            for index in sorted(runs, reverse=True):
                steps, work = runs[index]
                while work is not None and not work.done():
                    yield index, work
                # Infinities and NaN are values here: a GradScaler looks for them afterwards.
                with np.errstate(all="ignore"), self._stream.inside(), self._errors(index):
                    try:
                        runs[index] = steps, steps.send(None if work is None else work.wait())
                    except StopIteration:
                        del runs[index]
                        self._done[index] = time.monotonic_ns()

    def _run(self, index: int) -> Steps:
        """Runs the hook on a bucket, and yields each Work that the hook waits for.

        Raises: DtypeError if the hook yields something other than a Work, or returns something that `Hook` does not
        allow.
        """
        memory = self._buckets.memory
        members = self._buckets.members[index]
        assert self._used is not None
        names = tuple(self._buckets.names[member] for member in members)
        bucket = GradBucket(
            index=index,
            count=len(self._buckets.members),
            buffer=memory.buffers[index],
            names=names,
            gradients=tuple(memory.views[member] for member in members),
            used=tuple(self._used[name] for name in names),
            scale=self._control.scale(),
            comm=self._comm,
        )
        self._stream.after(self._marks[index])
        returned = self.hook(bucket)
        if isinstance(returned, Work):
            self._returned[index] = returned
        elif isinstance(returned, Generator):
            result = None
            with contextlib.suppress(StopIteration), contextlib.closing(returned):
                while True:
                    work = returned.send(result)
                    if not isinstance(work, Work):
                        raise DtypeError(
                            f"it yielded {type(work).__name__}, should be a Work: call collectives with async_op=True"
                        )
                    result = yield work
        elif returned is not None:
            raise DtypeError(f"it returned {type(returned).__name__}, should be a Work, None, or be a generator")

    @contextlib.contextmanager
    def _errors(self, index: int) -> Iterator[None]:
        """Puts the names of the hook and the bucket before the messages of errors in the block.

        Errors of `ddp` and `collectives` keep their type. Other errors become a ParallelError.
        """
        try:
            yield
        except Exception as error:
            origin = f"communication hook {_name(self.hook)} on {self._buckets.describe(index)}"
            if isinstance(error, CollectivesError):
                raise type(error)(f"{origin}: {error}") from error.__cause__
            origin = f"rank {self._comm.rank}: {origin}"
            if isinstance(error, DdpError):
                raise type(error)(f"{origin}: {error}") from error
            raise ParallelError(f"{origin}: {type(error).__name__}: {error}") from error


def _shares(result: Any, buffer: Array) -> bool:
    """Whether a collective's result is in the bucket's memory."""
    if result is buffer:
        return True
    xp = device_of(buffer).xp
    return isinstance(result, xp.ndarray) and bool(buffer.size == 0 or xp.may_share_memory(result, buffer))


class HookStream:
    """The CUDA stream of a hook. For host arrays there is none, and methods do nothing.

    cuda: the module cupy.cuda, None for host arrays
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._stream = None if cuda is None else cuda.Stream(non_blocking=True)

    def mark(self) -> Any:
        """Records an event after all work that is on the calling thread's stream now. Returns: the event"""
        return None if self._cuda is None else self._marked(self._cuda.get_current_stream())

    def after(self, mark: Any) -> None:
        """Makes later work on the hook's stream wait for the event `mark`."""
        if self._stream is not None:
            self._stream.wait_event(mark)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which this thread computes on the hook's stream."""
        if self._stream is None:
            yield
            return
        before = self._cuda.get_current_stream()
        try:
            with self._stream:
                yield
        finally:
            before.use()  # CuPy may restore another stream: see `ddp._cuda.stream_order.StreamGuard`

    def join(self) -> None:
        """Makes later work on the calling thread's stream wait for all that is on the hook's stream."""
        if self._stream is not None:
            self._cuda.get_current_stream().wait_event(self._marked(self._stream))

    def _marked(self, stream: Any) -> Any:
        event = self._cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event
