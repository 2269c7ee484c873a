"""Planning: when the bucket plan changes, and what it becomes.

The first plan guesses that gradients come in reversed model order. The first backward shows their real order, which
later plans follow: rank 0's, so that all ranks have one. With a cap "auto" the boundaries between buckets are chosen
from the times at which gradients came and from what a reduction costs on this wire, once after the first backward and
once more when its times can be replaced by those of a warm machine. A gradient that was frozen gets its place when some
rank first uses it; one that no rank has used for a while loses it, and its bytes are reduced no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp.errors import ParallelError
from ddp.parallel.planning.choosing import Link, choose_buckets, forecast, split_large
from ddp.parallel.planning.plan import Plan, plan_buckets
from ddp.parallel.planning.probe import measure

Array = np.ndarray[Any, Any]
_FIRST_CAP = 4 << 20  # bytes; of the plan before anything was measured
_WARM = 4  # backwards after which an automatic plan is made anew, from all but the first
_BETTER = 0.98  # a new plan should end at least so much earlier than the one it replaces
_IDLE = 10  # backwards in a row, of others, without a gradient on any rank, that cost it its place
_LAUNCH = 50e-6  # s of the computing thread for one more bucket
# How much slower than it was alone the wire is thought to be when buckets are chosen: it shares the core with backward,
# and a plan that leaves the wire idle at first has nothing to make up for it.
_SLOWER = 1.25


class Planner:
    """Makes the plans of one model; all ranks make the same calls.

    names, nbytes, kinds: of each parameter, in model order; kinds never share a bucket
    cap: bytes of a bucket, None: chosen by measurement; first: bytes of the first one; given: a plan to keep
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
        given: Plan | None = None,
        xp: Any = np,
    ) -> None:
        self.plan: Plan
        self.placed: list[bool] = []  # the parameter has a place in a bucket
        self._comm = comm
        self._names, self._nbytes, self._kinds = list(names), list(nbytes), list(kinds)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._cap, self._first, self._given, self._xp = cap, first, given, xp
        self._link: Link | None = None
        self._steps = 0
        self._idle = [0] * len(names)
        self._returned = [False] * len(names)  # came back once, and is not sent away again
        self._ready: Array = np.full(len(names), np.nan)  # s after backward began; nan: never came
        self._backward = np.nan

    def begin(self, trained: Sequence[bool]) -> Plan:
        """The plan before the first backward. trained: the parameter requires grad.

        Raises: ParallelError if a given plan is not one of these parameters.
        """
        self.placed = list(trained)
        if self._given is not None:
            self.plan = self._complete(self._given)
        else:
            self.plan = self._plan(self._by_cap(None), "in reversed model order")
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
        """Goes on from what `state` told, of a planner of the same parameters: later plans change when they would have.

        Raises: ParallelError if the plan does not fit; nothing has changed then.
        """
        plan, placed = Plan.from_state(state["plan"]), self.placed
        self.placed = [True] * len(self._names)
        try:
            self._complete(plan)
        except ParallelError:
            self.placed = placed
            raise
        listed = {name for bucket in plan.buckets for name in bucket}
        self.placed = [name in listed for name in self._names]
        self._steps = int(state["backwards"])
        self._idle = [int(state["idle"].get(name, 0)) for name in self._names]
        self._returned = [name in state["returned"] for name in self._names]
        self.plan = plan
        return plan

    def after(self, ready: Array, backward: float, used: Sequence[bool]) -> Plan | None:
        """What a synchronized backward has taught: the plan from now on, None if it stays. Collective if it changes.

        ready: (parameters,) seconds after backward began when each gradient was complete on this rank, nan: never
        backward: seconds that it took on this rank, without what was waited for; used: by any rank
        """
        self._steps += 1
        if self._steps == 2:  # the first one met cold caches and untouched memory
            self._ready, self._backward = ready, backward
        else:
            self._ready, self._backward = np.fmin(self._ready, ready), np.fmin(self._backward, backward)
        moved = self._moved(used)
        free = self._given is None and self._comm.size > 1
        if moved or (free and (self._steps == 1 or (self._steps == _WARM and self._cap is None))):
            return self._renew(moved)
        return None

    def _moved(self, used: Sequence[bool]) -> bool:
        if not any(used):  # says nothing about any one of them
            return False
        moved = False
        for index, by_any in enumerate(used):
            self._idle[index] = 0 if by_any else self._idle[index] + 1
            if by_any and not self.placed[index]:
                self._returned[index] = self.placed[index] = moved = True
            elif self._idle[index] == _IDLE and self.placed[index] and self._may_go(index):
                self.placed[index], moved = False, True
        return moved

    def _may_go(self, index: int) -> bool:
        return self._given is None and not self._returned[index]

    def _renew(self, moved: bool) -> Plan | None:
        """The next plan, rank 0's; None if it is the one there is."""
        if self._comm.size == 1:
            plan = self._decide(self._ready, self._backward, moved)
        else:
            told = np.append(np.nan_to_num(self._ready, nan=-1.0), self._backward)
            latest = self._comm.all_reduce(told, ReduceOp.MAX)
            if self._cap is None and self._link is None and self._given is None:
                self._link = measure(self._comm, sum(self._nbytes), self._xp)
            mine = None
            if self._comm.rank == 0:
                mine = self._decide(np.where(latest[:-1] < 0, np.nan, latest[:-1]), float(latest[-1]), moved)
            plan = self._comm.broadcast_object(mine)
        before, self.plan = self.plan, plan
        return None if plan.buckets == before.buckets else plan

    def _decide(self, latest: Array, backward: float, moved: bool) -> Plan:
        """latest: as `ready`, of the rank where each gradient came last."""
        if self._given is not None:
            return self._complete(self._given)
        own = np.where(np.isnan(self._ready), latest, self._ready)
        order = [index for index in arrival_order(own) if self.placed[index]]
        if self._cap is not None or self._link is None:
            return self._plan(self._by_cap(order), "in the order in which gradients came")
        # A bucket waits for the slowest rank, and a gradient for those before it. Numbered from the last to the first,
        # so that of two that came at once the first stays the first.
        order.reverse()
        times = np.maximum.accumulate(np.nan_to_num(latest[order[::-1]], nan=0.0))[::-1].tolist()
        nbytes, kinds = [self._nbytes[index] for index in order], [self._kinds[index] for index in order]
        busy = Link(alpha=_SLOWER * self._link.alpha, beta=_SLOWER * self._link.beta)
        chosen = split_large(choose_buckets(nbytes, times, busy, kinds, _LAUNCH), nbytes, self._link)
        if self._steps > 1 and not moved:
            place = {self._names[index]: at for at, index in enumerate(order)}
            kept = [[place[name] for name in bucket] for bucket in self.plan.buckets]
            now, then = (forecast(each, nbytes, times, busy, backward, _LAUNCH).end for each in (chosen, kept))
            if now > _BETTER * then:
                chosen = kept
        ahead = forecast(chosen, nbytes, times, self._link, backward, _LAUNCH)
        buckets = [[order[at] for at in bucket] for bucket in chosen]
        plan = self._plan(buckets, "chosen from measured times")
        return Plan(buckets=plan.buckets, nbytes=plan.nbytes, origin=plan.origin, link=self._link, forecast=ahead)

    def _by_cap(self, order: Sequence[int] | None) -> list[list[int]]:
        placed = [index for index, is_placed in enumerate(self.placed) if is_placed]
        turn = {index: at for at, index in enumerate(placed)}
        plan = plan_buckets(
            [self._nbytes[index] for index in placed],
            cap=_FIRST_CAP if self._cap is None else self._cap,
            first=self._first,
            kinds=[self._kinds[index] for index in placed],
            order=None if order is None else [turn[index] for index in order],
        )
        return [[placed[at] for at in bucket] for bucket in plan]

    def _plan(self, buckets: Sequence[Sequence[int]], origin: str) -> Plan:
        return Plan(
            buckets=tuple(tuple(self._names[index] for index in bucket) for bucket in buckets),
            nbytes=tuple(sum(self._nbytes[index] for index in bucket) for bucket in buckets),
            origin=origin,
        )

    def _complete(self, given: Plan) -> Plan:
        """The given plan, without what has no place here, and with what has one and is not in it at its end."""
        listed = [name for bucket in given.buckets for name in bucket]
        unknown = [name for name in listed if name not in self._numbers]
        twice = sorted(name for name, count in Counter(listed).items() if count > 1)
        if unknown or twice:
            wrong = f"no parameter is named {unknown[0]}" if unknown else f"{twice[0]} is in it twice"
            raise ParallelError(f"the given plan does not fit this model: {wrong}")
        kept = [
            [self._numbers[name] for name in bucket if self.placed[self._numbers[name]]] for bucket in given.buckets
        ]
        for bucket in kept:
            if len({self._kinds[index] for index in bucket}) > 1:
                raise ParallelError(
                    f"the given plan does not fit this model: {self._names[bucket[0]]} shares a bucket with a "
                    "parameter of another dtype"
                )
        inside = {index for bucket in kept for index in bucket}
        placed = [index for index, is_placed in enumerate(self.placed) if is_placed and index not in inside]
        rest = [[index] for index in reversed(placed)]
        return self._plan([bucket for bucket in kept if bucket] + rest, given.origin)


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
