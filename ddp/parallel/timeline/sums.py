"""Many steps at once become sums: what `Stats` is made of, at a cost per step that cannot be felt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ddp.parallel.timeline.lateness import PARTS, lateness
from ddp.parallel.timeline.marks import ARRIVALS, BEGUN, FORWARD, told_buckets
from ddp.parallel.timeline.steps import Contents, Step

Array = np.ndarray[Any, Any]
#: Columns of a step, in nanoseconds. behind: the part of exposed in which a rank had not yet come to the last bucket.
QUANTITIES = ("step", "forward", "backward", "communication", "hidden", "exposed", "behind", "other")
#: Columns of a bucket, in nanoseconds after backward began, but for exposed: its part of what backward waited for.
MOMENTS = ("ready", "launched", "done", "exposed")
_RECENT = 4096  # steps whose columns are kept for medians
_NOTICED = 0.01  # of a step: who is less late than that was not waited for


@dataclass(slots=True)
class Entry:
    """A step; since: when the one before it ended, 0 if that is not known; table: what all ranks told of it."""

    step: Step
    since: int
    table: Array | None = None


class Sums:
    """What was added up of the steps of one period. rank, size: whose, and of how many."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.steps = 0
        self.total = np.zeros(len(QUANTITIES))
        self.count = np.zeros(len(QUANTITIES), int)
        self.rows: deque[Array] = deque(maxlen=_RECENT)
        self.heard = 0  # steps of which the ranks' arrivals are known
        self.last = np.zeros(size, int)  # steps in which each rank was waited for
        self.lost = np.zeros((size, len(PARTS)))  # in these steps
        self.contents = Contents()
        self._restart(self.contents)

    def copy(self) -> Sums:
        """Sums that can be added to without changing these."""
        twin = Sums(self._rank, self._size)
        for name, value in vars(self).items():
            setattr(twin, name, value.copy() if isinstance(value, np.ndarray | deque) else value)
        return twin

    def add(self, entries: Iterable[Entry], offsets: Array) -> None:
        """Counts these steps. offsets: (size,) of all ranks' clocks from rank 0's."""

        def kind(entry: Entry) -> tuple[int, int]:
            return id(entry.step.contents), -1 if entry.table is None else entry.table.shape[1]

        for _, alike in groupby(entries, kind):
            self._add(list(alike), offsets)

    def _add(self, entries: Sequence[Entry], offsets: Array) -> None:
        steps = [entry.step for entry in entries]
        if steps[0].contents is not self.contents:
            self._restart(steps[0].contents)
        begun = np.array([step.begun for step in steps], float)
        computed = np.array([step.computed for step in steps], float)
        ended = np.array([step.ended for step in steps], float)
        since = np.array([entry.since or np.nan for entry in entries], float)
        forward = np.array([step.forward or (np.nan, np.nan) for step in steps], float)
        ready = np.array([step.ready for step in steps], float)
        times = np.array([[time or (np.nan, np.nan) for time in step.times] for step in steps], float)
        times = times.reshape(len(steps), len(self.contents.nbytes), 2)
        behind = np.full(len(steps), np.nan)
        if entries[0].table is not None and self._size > 1 and self.contents.nbytes:
            tables = np.stack([entry.table for entry in entries if entry.table is not None])  # all, for they are alike
            tables = np.where(tables == 0, np.nan, tables - (offsets - offsets[self._rank])[None, :, None])
            # Of a period's first step only the part from forward on is known.
            length = ended - np.fmin(np.fmin(since, forward[:, 0]), begun)
            behind = self._hear(steps, tables, times[:, :, 1], length, computed, ended)
        launched, done = times[:, :, 0], times[:, :, 1]
        communication, hidden = union(launched, done), union(launched, np.minimum(done, computed[:, None]))
        parts = [
            ended - since,
            forward[:, 1] - forward[:, 0],
            computed - begun,
            communication,
            hidden,
            ended - computed,
        ]
        inside = np.nan_to_num(parts[1]) + parts[2] + parts[5]
        rows = np.stack([*parts, behind, parts[0] - inside], axis=1)
        self.steps += len(steps)
        self.total += np.nansum(rows, axis=0)
        self.count += (~np.isnan(rows)).sum(axis=0)
        self.rows.extend(rows)
        waited = np.maximum(done - np.maximum(computed[:, None], before(done)), 0.0)
        moments = np.stack([ready - begun[:, None], launched - begun[:, None], done - begun[:, None], waited], axis=2)
        self.moments += np.nansum(moments, axis=0)
        self.moments_count += (~np.isnan(moments)).sum(axis=0)

    def _restart(self, contents: Contents) -> None:
        """The buckets are others from now on."""
        self.contents = contents
        self.moments = np.zeros((len(contents.nbytes), len(MOMENTS)))
        self.moments_count = np.zeros((len(contents.nbytes), len(MOMENTS)), int)

    def _hear(
        self, steps: Sequence[Step], tables: Array, done: Array, length: Array, computed: Array, ended: Array
    ) -> Array:
        """Counts who was waited for; returns (n,) how long this rank, having computed all, waited for a late one."""
        told = np.array([told_buckets(done.shape[1], tables.shape[2], step.number) for step in steps])
        arrivals = tables[:, :, ARRIVALS : ARRIVALS + told.shape[1]]
        late = arrivals[:, :, -1].max(axis=1)  # the last bucket is always told
        behind = np.clip(late - computed, 0.0, ended - computed)
        known = ~(np.isnan(tables[:, :, BEGUN]).any(axis=1) | np.isnan(arrivals).any(axis=(1, 2)))
        if known.any():
            free = np.take_along_axis(np.nan_to_num(before(done), nan=-np.inf), told, axis=1)
            tables, arrivals = tables[known], arrivals[known]
            last, lost = lateness(tables[:, :, FORWARD], tables[:, :, BEGUN], arrivals, free[known])
            noticed = lost.sum(axis=1) > _NOTICED * length[known]
            self.heard += len(last)
            np.add.at(self.last, last[noticed], 1)
            np.add.at(self.lost, last[noticed], lost[noticed])
        return behind


def before(done: Array) -> Array:
    """(n, buckets) when the buckets before each one were done: -inf for the first. done: (n, buckets), nan: unknown"""
    first = np.full((len(done), 1), -np.inf)
    return np.concatenate([first, np.fmax.accumulate(done, axis=1)[:, :-1]], axis=1)


def union(starts: Array, ends: Array) -> Array:
    """(n,) the time that the intervals cover, each instant counted once; nan where none of them is known.

    starts, ends: (n, buckets), starts ascending, as buckets are launched; what ends before it starts is empty

    >>> union(np.array([[0.0, 1.0, 9.0]]), np.array([[2.0, 4.0, 10.0]]))
    array([5.])
    """
    covered = np.maximum(ends - np.fmax(starts, before(ends)), 0.0)
    total: Array = np.nansum(covered, axis=1)
    return np.where(np.isnan(covered).all(axis=1), np.nan, total)
