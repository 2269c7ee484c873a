"""The planner: when the bucket plan changes, and what it becomes.

The first plan guesses that gradients come in reversed model order. The first backward shows their real order, which
later plans follow: rank 0's, so that all ranks have one. With a cap "auto" the cap is chosen once, after the fourth
backward, from the times at which gradients came and from what an all-reduce costs between these ranks. A parameter that
was frozen gets a bucket when some rank first uses it; one that no rank has used for a while loses its place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp._device import capturing
from ddp.errors import ParallelError
from ddp.parallel.bucket_plan import Link, Plan, choose_cap, forecast, plan_buckets

Array = np.ndarray[Any, Any]
_FIRST_CAP = 4 << 20  # bytes; of the plan before anything was measured
_WARM = 4  # backwards after which the cap is chosen, from the times of all but the first
_IDLE = 10  # backwards in a row, of others, without a gradient on any rank, after which a parameter loses its place
_LAUNCH = 50e-6  # s of the computing thread for one more bucket
# How much slower than it was alone the wire is thought to be when buckets are chosen: it shares the core with backward,
# and a plan that leaves the wire idle at first cannot catch up.
_SLOWER = 1.25
# Bytes of the all-reduces that are measured. Up to _SMALL repeating costs next to nothing, and short times are easily
# disturbed.
_SMALLEST, _SMALL, _LARGEST, _GROWTH = 1 << 12, 1 << 16, 1 << 24, 4
_REPEATS, _REPEATS_SMALL = 3, 10
_LONG = 0.01  # s; the next size would take _GROWTH times as long


class Planner:
    """Makes the plans of one model; all ranks make the same calls.

    names, nbytes, kinds: of each parameter, in model order; kinds never share a bucket
    cap: bytes of a bucket, None: chosen by measurement; first: bytes of the first one; pinned: a plan to keep
    xp: the array module of the gradients
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        nbytes: Sequence[int],
        kinds: Sequence[Hashable],
        *,
        cap: int | None,
        first: int,
        pinned: Plan | None = None,
        xp: Any = np,
    ) -> None:
        self.plan: Plan
        self.assigned: list[bool] = []  # the parameter is in a bucket
        self._comm = comm
        self._names, self._nbytes, self._kinds = list(names), list(nbytes), list(kinds)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._cap, self._first, self._pinned, self._xp = cap, first, pinned, xp
        self._link: Link | None = None
        self._steps = 0
        self._idle = [0] * len(names)
        self._returned = [False] * len(names)  # came back once, and keeps its place from then on
        self._ready: Array = np.full(len(names), np.nan)  # s after backward began; nan: never came
        self._backward = np.nan

    def begin(self, trained: Sequence[bool]) -> Plan:
        """The plan before the first backward. trained: the parameter requires grad.

        Raises: ParallelError if a pinned plan is not one of these parameters.
        """
        self.assigned = list(trained)
        if self._pinned is not None:
            self.plan = self._complete(self._pinned)
        else:
            order = list(reversed(range(len(self._names))))
            self.plan = self._by_cap(order, self._cap or _FIRST_CAP, "in reversed model order")
        return self.plan

    def state(self) -> dict[str, Any]:
        """The plan, and how far planning has come, as a JSON value: see `restore`."""
        return {
            "plan": self.plan.state(),
            "backwards": self._steps,
            "idle": {name: count for name, count in zip(self._names, self._idle, strict=True) if count},
            "returned": [name for name, returned in zip(self._names, self._returned, strict=True) if returned],
        }

    def restore(self, state: Mapping[str, Any]) -> Plan:
        """Continues from a `state` of a planner of the same parameters: later plans change when they would have.

        Raises: ParallelError if the plan does not fit; nothing has changed then.
        """
        plan, assigned = Plan.from_state(state["plan"]), self.assigned
        self.assigned = [True] * len(self._names)
        try:
            self._complete(plan)
        except ParallelError:
            self.assigned = assigned
            raise
        listed = {name for bucket in plan.buckets for name in bucket}
        self.assigned = [name in listed for name in self._names]
        self._steps = int(state["backwards"])
        self._idle = [int(state["idle"].get(name, 0)) for name in self._names]
        self._returned = [name in state["returned"] for name in self._names]
        self.plan = plan
        return plan

    def after_backward(self, ready: Array, backward: float, used: Sequence[bool]) -> Plan | None:
        """Learns from a synchronized backward: the plan from now on, None if it stays. Collective if it changes.

        ready: (parameters,) seconds after backward began when each gradient was complete on this rank, nan: never
        backward: seconds that it took on this rank, without what was waited for; used: by any rank
        """
        self._steps += 1
        if self._steps == 2:  # the first one met cold caches and untouched memory
            self._ready, self._backward = ready, backward
        else:
            self._ready, self._backward = np.fmin(self._ready, ready), np.fmin(self._backward, backward)
        moved = self._assignments_changed(used)
        free = self._pinned is None and self._comm.size > 1
        if moved or (free and (self._steps == 1 or (self._steps == _WARM and self._cap is None))):
            return self._replan()
        return None

    def _assignments_changed(self, used: Sequence[bool]) -> bool:
        """Counts who was used; whether a parameter gets or loses its place by that."""
        if not any(used):  # says nothing about any one of them
            return False
        changed = False
        for index, by_any in enumerate(used):
            self._idle[index] = 0 if by_any else self._idle[index] + 1
            may_go = self._pinned is None and not self._returned[index]
            if by_any and not self.assigned[index]:
                self._returned[index] = self.assigned[index] = changed = True
            elif self._idle[index] == _IDLE and self.assigned[index] and may_go:
                self.assigned[index], changed = False, True
        return changed

    def _replan(self) -> Plan | None:
        """The next plan, rank 0's; None if it is the one there is."""
        if self._comm.size == 1:
            plan = self._decide(self._ready, self._backward)
        else:
            told = np.append(np.nan_to_num(self._ready, nan=-1.0), self._backward)
            latest = self._comm.all_reduce(told, ReduceOp.MAX)
            measured = self._cap is None and self._pinned is None and self._steps >= _WARM
            if measured and self._link is None:
                self._link = measure_link(self._comm, sum(self._nbytes), self._xp)
            mine = None
            if self._comm.rank == 0:
                mine = self._decide(np.where(latest[:-1] < 0, np.nan, latest[:-1]), float(latest[-1]))
            plan = self._comm.broadcast_object(mine)
        before, self.plan = self.plan, plan
        return None if plan.buckets == before.buckets else plan

    def _decide(self, latest: Array, backward: float) -> Plan:
        """latest: (parameters,) as `ready`, of the rank where each gradient came last."""
        if self._pinned is not None:
            return self._complete(self._pinned)
        order = arrival_order(np.where(np.isnan(self._ready), latest, self._ready))
        if self._link is None:
            return self._by_cap(order, self._cap or _FIRST_CAP, "in the order in which gradients came")
        # A bucket waits for the slowest rank, and a gradient for those before it.
        times = np.zeros(len(order))
        times[order] = np.maximum.accumulate(np.nan_to_num(latest[order], nan=0.0))
        order = [index for index in order if self.assigned[index]]
        busy = Link(alpha=_SLOWER * self._link.alpha, beta=_SLOWER * self._link.beta)
        cap = choose_cap(
            self._nbytes,
            times.tolist(),
            busy,
            first=self._first,
            kinds=self._kinds,
            order=order,
            backward=backward,
            launch=_LAUNCH,
        )
        plan = self._by_cap(order, cap, "chosen from measured times")
        buckets = [[self._numbers[name] for name in bucket] for bucket in plan.buckets]
        ahead = forecast(buckets, self._nbytes, times.tolist(), self._link, backward, _LAUNCH)
        return Plan(buckets=plan.buckets, nbytes=plan.nbytes, origin=plan.origin, link=self._link, forecast=ahead)

    def _by_cap(self, order: Sequence[int], cap: int, origin: str) -> Plan:
        order = [index for index in order if self.assigned[index]]
        return self._named(plan_buckets(self._nbytes, cap, min(self._first, cap), self._kinds, order), origin)

    def _named(self, buckets: Sequence[Sequence[int]], origin: str) -> Plan:
        return Plan(
            buckets=tuple(tuple(self._names[index] for index in bucket) for bucket in buckets),
            nbytes=tuple(sum(self._nbytes[index] for index in bucket) for bucket in buckets),
            origin=origin,
        )

    def _complete(self, pinned: Plan) -> Plan:
        """The pinned plan, less what is not assigned, with a bucket at its end for each parameter that it lacks."""
        listed = [name for bucket in pinned.buckets for name in bucket]
        unknown = [name for name in listed if name not in self._numbers]
        twice = sorted(name for name, count in Counter(listed).items() if count > 1)
        if unknown or twice:
            wrong = f"no parameter is named {unknown[0]}" if unknown else f"{twice[0]} is in it twice"
            raise ParallelError(f"the given plan does not fit this model: {wrong}")
        kept = [
            [self._numbers[name] for name in bucket if self.assigned[self._numbers[name]]] for bucket in pinned.buckets
        ]
        for bucket in kept:
            if len({self._kinds[index] for index in bucket}) > 1:
                raise ParallelError(
                    f"the given plan does not fit this model: {self._names[bucket[0]]} shares a bucket with a "
                    "parameter of another dtype"
                )
        inside = {index for bucket in kept for index in bucket}
        rest = [[index] for index, is_in in enumerate(self.assigned) if is_in and index not in inside]
        return self._named([bucket for bucket in kept if bucket] + rest[::-1], pinned.origin)


def arrival_order(ready: Array) -> list[int]:
    """The parameters in the order in which their gradients came.

    ready: (parameters,) when each came, nan where it never did: such a one is put where reversed model order has it,
    behind the one that comes before it there.
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
    """The cost of an all-reduce over `comm`, the same on every rank, bit for bit. Collective.

    comm: not in use meanwhile; most: bytes of the largest all-reduce of interest (more than 16 MiB are not tried)
    xp: the array module of what will be reduced

    Float32 arrays of 4 KiB, 16 KiB, ... are summed as the reducer does it, and of each size the fastest counts. It ends
    after a size of more than 10 ms: at 1 Gbit/s it takes about 0.15 s. The line goes through the smallest, which is all
    latency, and the largest, which is most like a bucket.
    """
    if comm.size == 1:
        return Link(alpha=0.0, beta=0.0)
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH <= min(max(most, _SMALL), _LARGEST):
        sizes.append(sizes[-1] * _GROWTH)
    length = sizes[-1] // np.dtype(np.float32).itemsize
    memory = comm.empty(length, np.float32) if xp is np else xp.zeros(length, np.float32)
    _seconds(comm, memory[:1])  # the first call of all makes connections
    samples = []
    for size in sizes:
        array = memory[: size // memory.itemsize]
        fastest = min(_seconds(comm, array) for _ in range(_REPEATS_SMALL if size <= _SMALL else _REPEATS))
        # Agreed before anything is decided by it: times differ from rank to rank.
        samples.append((size, float(comm.all_reduce(np.array([fastest]), ReduceOp.MAX)[0])))
        if samples[-1][1] > _LONG:
            break
    (small, quick), (large, slow) = samples[0], samples[-1]
    beta = max(0.0, slow - quick) / (large - small) if large > small else 0.0
    # Ranks of different machines may round differently.
    agreed = comm.broadcast(np.array([max(0.0, quick - beta * small), beta]), root=0)
    return Link(alpha=float(agreed[0]), beta=float(agreed[1]))


def _seconds(comm: Communicator, array: Any) -> float:
    """How long one sum takes, on this rank: the reducer's call, and the wait for it."""
    begun = time.perf_counter()
    comm.all_reduce(array, ReduceOp.SUM, out=array, async_op=True).wait()
    array[0].item()  # on a GPU the wait above is the stream's, not ours
    return time.perf_counter() - begun


class HostTimer:
    """When gradients are complete, for arrays that the host computes: when the engine says so."""

    def __init__(self, count: int, xp: Any) -> None:
        self._count = count
        self._xp = xp
        self._came: dict[int, Any] = {}
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        """Backward begins."""
        self._came = {}
        self._begun = self._now()

    def ready(self, index: int) -> None:
        """A gradient is complete."""
        if self._begun is not None:
            self._came[index] = self._now()

    def end(self) -> None:
        """All of this backward has been computed, or on a GPU launched."""
        self._ended = None if self._begun is None else self._now()

    def backward(self) -> float:
        """Seconds from begin to end, nan if this backward was not timed."""
        return np.nan if self._ended is None else self._since_begin(self._ended)

    def seconds(self) -> np.ndarray[Any, Any]:
        """(count,) seconds from begin to each gradient, nan for those that did not come or were not timed."""
        seconds = np.full(self._count, np.nan)
        for index, moment in self._came.items():
            seconds[index] = self._since_begin(moment)
        return seconds

    def _now(self) -> Any:
        return time.perf_counter()

    def _since_begin(self, moment: Any) -> float:
        return float(moment - self._begun)


class DeviceTimer(HostTimer):
    """For arrays that a device computes: the host is far ahead, so events are recorded in the stream.

    Events cost little, but reading them waits for the device, so only the backwards that a plan is made from are timed.
    """

    TIMED = _WARM  # backwards

    def __init__(self, count: int, xp: Any) -> None:
        super().__init__(count, xp)
        self._left = self.TIMED

    def begin(self) -> None:
        self._came = {}
        if self._left > 0 and capturing.now is None:  # an event of a capture may not be queried
            self._left -= 1
            self._begun = self._now()
        else:
            self._begun = None

    def _now(self) -> Any:
        event = self._xp.cuda.Event()
        event.record()
        return event

    def _since_begin(self, moment: Any) -> float:
        moment.synchronize()
        return 1e-3 * float(self._xp.cuda.get_elapsed_time(self._begun, moment))
