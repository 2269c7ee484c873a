"""Communication hooks: a user's function, instead of an all-reduce, makes of each bucket what its gradients become.

A hook that takes several rounds (round, exchange, sum, exchange) would block backward if it waited between them. So it
is a generator that yields what it waits for, and is gone on with when that is there and backward has a moment.

Ranks see their buckets fill, and their rounds end, at different times, and must make the same calls in the same order
all the same. So each round of a hook (a phase) has a communicator of its own, and in each phase buckets go in the order
of the plan: the third bucket's second round never overtakes the second's.

    bucket 0   phase 0 ──── phase 1 ──── done
    bucket 1        phase 0 ──── phase 1 ──── done        down each column the order is 0, 1, 2 on every rank;
    bucket 2             phase 0 ──── phase 1 ──── done   how the columns interleave is each rank's own

On a GPU a bucket begins when the one before it is through. NCCL's communicators share the device, where a kernel that
waits for other ranks may keep another one out; so all calls of a device should come in one order on every rank. It
costs next to nothing there, since a round is through for the host when it has been handed to the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from collectives import Communicator, Work
from collectives.errors import CollectivesError
from ddp._device import device_of
from ddp.errors import ArgumentError, DdpError, DtypeError, ParallelError
from ddp.parallel.comm_hooks import claims
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Hook, Steps
from ddp.parallel.comm_hooks.lane import HostLane, Lane, lane_of
from ddp.parallel.control import ControlMessage
from ddp.parallel.exchange import Buckets, Times
from ddp.parallel.naming import naming

Array = Any  # numpy.ndarray or cupy.ndarray
_PAUSE = 50e-6  # s; between two looks at what is under way, once backward has nothing else to do


class _Run:
    """One bucket's way through the hook."""

    __slots__ = ("bucket", "done", "launched", "mark", "steps", "work")

    def __init__(self, mark: Any) -> None:
        self.mark = mark  # behind the kernels that made the bucket
        self.bucket: GradBucket
        self.steps: Steps | None = None
        self.work: Work[Any] | None = None  # what it waits for; None once the hook is done with it
        self.launched = self.done = 0  # ns


class Hooked:
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
        claims.agree(comm, self, hook, self._name, self._phases)
        self._comms = [comm.duplicate() for _ in range(self._phases)]
        self._runs: list[_Run] = []
        self._next = [0] * (self._phases + 1)  # for each phase, and the end: which bucket comes to it next
        self._scale: float | None = None  # None until the control message has arrived
        self._used: dict[str, bool] = {}
        self._control: ControlMessage
        self._buckets: Buckets
        self._xp: Any = None
        self._lane: Lane = HostLane()

    def close(self) -> None:
        """Gives the communicators back; the hook may serve another model."""
        claims.give_up(self, self.hook)
        for comm in self._comms:
            comm.close()

    def follow(self, buckets: Buckets) -> None:
        self._buckets = buckets
        if self._xp is None and buckets.memory.buffers:
            # One lane for ever: what a hook remembers lies in memory that is freed in that lane's order.
            self._xp = device_of(buckets.memory.buffers[0]).xp
            self._lane = lane_of(self._xp)
        self._runs = []

    def begin(self, control: ControlMessage) -> None:
        self._control = control
        self._scale = None
        self._runs = []
        self._next = [0] * (self._phases + 1)

    def launch(self, index: int) -> None:
        assert index == len(self._runs)
        self._runs.append(_Run(self._lane.mark()))
        self.poll()

    def poll(self) -> None:
        self._advance()

    def finish(self) -> None:
        self._control.wait()
        while self._next[-1] < len(self._runs):
            if not self._advance():
                time.sleep(_PAUSE)
        self._lane.join()

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
            one_by_one = self._lane.one_by_one and self._phases > 1
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
        self._lane.after(run.mark)
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

    def _resume(self, index: int, run: _Run, work: Work[Any], phase: int) -> None:
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

    def _go_on(self, index: int, run: _Run, result: Any) -> None:
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

    def _end(self, run: _Run, done: int = 0) -> None:
        run.work = run.steps = None
        run.done = done or time.monotonic_ns()

    @contextlib.contextmanager
    def _inside(self, index: int) -> Iterator[None]:
        """Where the hook's code runs. What it raises names the bucket; errors of ours keep their type."""
        try:
            with self._lane.inside(), naming(self._where(index)):
                yield
        except CollectivesError:
            raise
        except DdpError as error:
            raise type(error)(f"rank {self._rank}: {self._where(index)}: {error}") from error
        except Exception as error:
            raise ParallelError(f"rank {self._rank}: {self._where(index)}: {type(error).__name__}: {error}") from error

    def _where(self, index: int) -> str:
        return f"communication hook {self._name} on {self._buckets.words(index)}"

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
