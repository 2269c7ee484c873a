"""The planner: decides when the bucket plan changes, and how.

The first plan assumes that gradients come in reversed model order. The first backwards show their real order and times.
After the third backward the plan is made once more, from these and, if no cap was given, from the measured cost of an
all-reduce between these ranks. A given plan is kept, and so is the plan of a single rank. At any other time the plan
changes only by `restore`, or if some rank uses a parameter without a bucket: one that was frozen when the model was
wrapped, or that is not in the restored plan. Such a parameter gets a bucket at the end of the plan.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp._device import capturing, device
from ddp.errors import ParallelError
from ddp.parallel.bucket_plan import Link, Plan, choose_cap, plan_buckets

Array = np.ndarray[Any, Any]
# The cap of buckets (bytes) before anything was measured.
_FIRST_CAP = 4 << 20
#: Number of backwards after which the plan is made anew, from the times of all but the first.
WARM = 3
# All-reduces are assumed to take this many times as long as they did when measured: during training they share the core
# with backward. With too small a factor, a plan would leave the network idle at first, and could not catch up.
_SLOWER = 1.25
# Two all-reduces are measured. The small one is nearly all latency, the large one is like a bucket (about 20 ms at
# 1 Gbit/s). Below are their sizes in bytes, and how often each runs. If all gradients together are smaller than _LARGE,
# the large one has their size, but at least 2 * _SMALL. Short ones are easily disturbed: with more ranks than cores the
# best of 5 took 10 times as long as the best of 20.
_SMALL = 1 << 12
_LARGE = 1 << 21
_REPEATS_SMALL = 20
_REPEATS_LARGE = 5


class Planner:
    """Makes the plans of one model. All ranks make the same calls.

    names, nbytes, dtypes: of each parameter, in model order. Parameters of different dtypes never share a bucket
    trained: whether each parameter requires grad
    cap: maximum bytes of a bucket, None: chosen by measurement; first: maximum bytes of the first bucket
    pinned: a plan to keep; xp: the array module of the gradients

    Raises: ParallelError if a pinned plan does not fit these parameters.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        nbytes: Sequence[int],
        dtypes: Sequence[Hashable],
        trained: Sequence[bool],
        *,
        cap: int | None,
        first: int,
        pinned: Plan | None = None,
        xp: Any = np,
    ) -> None:
        self.assigned = list(trained)  # whether each parameter is in a bucket
        self._comm = comm
        self._names = list(names)
        self._nbytes = list(nbytes)
        self._dtypes = list(dtypes)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._cap = cap
        self._first = first
        self._pinned = pinned
        self._xp = xp
        self._steps = 0
        self._ready: Array = np.full(len(names), np.nan)  # seconds after backward began; nan: never complete
        self._backward = np.nan
        if pinned is not None:
            self._check(pinned)
        self.plan = self._complete(pinned or Plan(buckets=(), nbytes=(), origin="in reversed model order"))

    def state(self) -> dict[str, Any]:
        """The plan, and how far planning has come, as a JSON value: see `restore`."""
        return {"plan": self.plan.state(), "backwards": self._steps}

    def restore(self, state: Mapping[str, Any]) -> Plan:
        """Continues with the plan and the count of backwards in the `state` of a planner of the same parameters.

        Raises: as `read`; nothing has changed then.
        """
        plan, self._steps = self.read(state)
        self.plan = plan
        listed = {name for bucket in plan.buckets for name in bucket}
        self.assigned = [name in listed for name in self._names]
        return plan

    def read(self, state: Mapping[str, Any]) -> tuple[Plan, int]:
        """The plan and the count of backwards in a `state`. Raises: ParallelError if the plan does not fit."""
        plan = Plan.from_state(state["plan"])
        self._check(plan)
        return plan, int(state["backwards"])

    def after_backward(self, timer: ArrivalTimer, used: Sequence[bool]) -> Plan | None:
        """Records a synchronized backward. Returns the new plan, None if it does not change. Collective.

        timer: of this backward, on this rank; used: whether any rank used each parameter
        """
        self._steps += 1
        if 1 < self._steps <= WARM:  # the first is left out: its caches were cold and its memory untouched
            ready, backward = timer.seconds()
            self._ready = np.fmin(self._ready, ready)
            self._backward = np.fmin(self._backward, backward)
        before = self.plan
        assigned = [any(pair) for pair in zip(self.assigned, used, strict=True)]
        changed = assigned != self.assigned
        self.assigned = assigned
        if self._steps == WARM and self._pinned is None and self._comm.size > 1:
            self.plan = self._measured()
        elif changed:
            self.plan = self._complete(before)
        return None if self.plan.buckets == before.buckets else self.plan

    def _measured(self) -> Plan:
        """The plan from the times of the first backwards, the same on all ranks, bit for bit. Collective."""
        # A bucket waits for the slowest rank.
        times_here = np.nan_to_num(np.append(self._ready, self._backward), nan=-1.0)
        latest = self._comm.all_reduce(times_here, ReduceOp.MAX)
        latest[latest < 0] = np.nan
        ready = latest[:-1]
        backward = float(np.nan_to_num(latest[-1]))
        order = arrival_order(ready)
        if self._cap is not None:
            return self._named(self._cut(order, self._cap), "in the order in which gradients came")
        link = measure_link(self._comm, sum(self._nbytes), self._xp)
        times = np.zeros(len(order))
        times[order] = np.maximum.accumulate(np.nan_to_num(ready[order], nan=0.0))
        busy = Link(alpha=_SLOWER * link.alpha, beta=_SLOWER * link.beta)
        cap = choose_cap(lambda cap: self._cut(order, cap), self._nbytes, times.tolist(), busy, backward)
        return self._named(self._cut(order, cap), "chosen from measured times")

    def _cut(self, order: Sequence[int], cap: int) -> list[list[int]]:
        order = [index for index in order if self.assigned[index]]
        return plan_buckets(self._nbytes, cap, min(self._first, cap), self._dtypes, order)

    def _named(self, buckets: Sequence[Sequence[int]], origin: str) -> Plan:
        return Plan(
            buckets=tuple(tuple(self._names[index] for index in bucket) for bucket in buckets),
            nbytes=tuple(sum(self._nbytes[index] for index in bucket) for bucket in buckets),
            origin=origin,
        )

    def _check(self, pinned: Plan) -> None:
        """Checks that `pinned` is a plan of these parameters. Raises: ParallelError if it is not."""
        listed = [name for bucket in pinned.buckets for name in bucket]
        wrong = [f"no parameter is named {name}" for name in listed if name not in self._numbers]
        wrong += [f"{name} is in it twice" for name, count in sorted(Counter(listed).items()) if count > 1]
        for bucket in pinned.buckets if not wrong else ():
            if len({self._dtypes[self._numbers[name]] for name in bucket}) > 1:
                wrong.append(f"{bucket[0]} shares a bucket with a parameter of another dtype")
        if wrong:
            raise ParallelError(f"the given plan does not fit this model: {wrong[0]}")

    def _complete(self, plan: Plan) -> Plan:
        """The plan with just the `assigned` parameters: drops others, and adds buckets for missing ones at its end."""
        listed = [[self._numbers[name] for name in bucket] for bucket in plan.buckets]
        kept = [[index for index in bucket if self.assigned[index]] for bucket in listed]
        planned = set(itertools.chain(*listed))
        missing = [index for index in reversed(range(len(self._names))) if index not in planned]
        return self._named([*filter(None, kept), *self._cut(missing, self._cap or _FIRST_CAP)], plan.origin)


def arrival_order(ready: Array) -> list[int]:
    """The parameters in the order in which their gradients were complete.

    ready: (parameters,) when each was complete; nan if it never was. Such a parameter follows its predecessor in
    reversed model order

    `arrival_order([3.0, nan, 1.0]) == [2, 1, 0]`
    """
    before = -np.inf
    keys: list[tuple[float, int, int]] = []
    for index in reversed(range(len(ready))):
        if not np.isnan(ready[index]):
            before = float(ready[index])
        keys.append((before, len(keys), index))
    return [index for _, _, index in sorted(keys)]


def measure_link(comm: Communicator, most: int, xp: Any = np) -> Link:
    """Measures the cost of an all-reduce over `comm`. The result is the same on every rank, bit for bit. Collective.

    comm: no other call of it may be in progress; most: bytes of the largest all-reduce of interest; xp: the array
    module of the gradients

    Two float32 arrays, of 4 KiB and of at most 2 MiB, are summed as the reducer does it. For each array the time is
    that of the fastest run, on the slowest rank.
    """
    large = min(max(most, 2 * _SMALL), _LARGE)
    memory = comm.empty(large // 4, np.float32, like=xp.empty(0))
    _seconds(comm, memory[:1])  # the first call makes the connections
    sizes = [_SMALL] * _REPEATS_SMALL, [large] * _REPEATS_LARGE
    fastest = [min(_seconds(comm, memory[: size // 4]) for size in repeats) for repeats in sizes]
    quick, slow = comm.all_reduce(np.array(fastest), ReduceOp.MAX).tolist()
    if quick >= slow:  # the measurement was disturbed; with beta = 0 the plan would be one bucket
        quick = slow / 2
    beta = (slow - quick) / (large - _SMALL)
    return Link(alpha=max(0.0, quick - beta * _SMALL), beta=beta)


def _seconds(comm: Communicator, array: Any) -> float:
    """Seconds of one all-reduce on this rank, called and waited for as by the reducer."""
    begun = time.perf_counter()
    comm.all_reduce(array, ReduceOp.SUM, out=array, async_op=True).wait()
    array[0].item()  # on a GPU the wait above makes the stream wait, not this thread
    return time.perf_counter() - begun


class ArrivalTimer:
    """Measures when gradients are complete, in the first backwards.

    count: the number of gradients; device: the gradients' device

    On a GPU the host runs ahead, so times are events in the stream. Reading them waits for the device.
    """

    def __init__(self, count: int, device: device) -> None:
        self._count = count
        self._cuda = None if device.type == "cpu" else device.xp.cuda
        self._left = WARM
        self._moments: dict[int, Any] = {}
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        """Called when backward begins. Drops the times of the last one. In the first backwards, records the time."""
        self._moments = {}
        self._begun = None
        self._ended = None
        if self._left > 0 and capturing.now is None:  # an event of a capture may not be queried
            self._left -= 1
            self._begun = self._now()

    def ready(self, index: int) -> None:
        """Called when gradient number `index` is complete."""
        if self._begun is not None:
            self._moments[index] = self._now()

    def end(self) -> None:
        """Called when backward has been computed (on a GPU: launched)."""
        if self._begun is not None:
            self._ended = self._now()

    def seconds(self) -> tuple[Array, float]:
        """(seconds from begin to each gradient: (count,), seconds from begin to end). nan for what was not timed."""
        seconds = np.full(self._count, np.nan)
        for index, moment in self._moments.items():
            seconds[index] = self._since_begin(moment)
        return seconds, np.nan if self._ended is None else self._since_begin(self._ended)

    def _now(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event()
        event.record()
        return event

    def _since_begin(self, moment: Any) -> float:
        if self._cuda is None:
            return float(moment - self._begun)
        moment.synchronize()
        return 1e-3 * float(self._cuda.get_elapsed_time(self._begun, moment))
