"""The reducer: watches leaves become ready and reduces their buckets while backward is still running.

Strict order: ranks fill buckets in different orders, and collectives that meet in different orders deadlock. So a
bucket is launched when it is full and all before it in the plan have been launched, on every rank alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from collectives import Communicator, ReduceOp, Work
from ddp._engine import Leaf
from ddp._layout import FlatBuckets
from ddp.errors import ParallelError
from ddp.parallel.control import ControlMessage


class Reducer:
    """The watcher of a model's leaves: see `ddp._engine.Watcher`.

    names, leaves: of each parameter, in the model's order
    buckets: their gradients' memory, to which the leaves' slots are bound
    comm: a communicator on which nobody else calls
    """

    def __init__(self, names: Sequence[str], leaves: Sequence[Leaf], buckets: FlatBuckets, comm: Communicator) -> None:
        self.sync = True
        self._names = names
        self._leaves = leaves
        self._buckets = buckets
        self._comm = comm
        self._control = ControlMessage(len(leaves))
        self._given: float | None = None  # the weight of the backward that runs now
        self._total: float | None = None  # of those since the last synchronized one; None: they had no weights
        self._passes = 0  # backwards since the last synchronized one
        self._begun = False
        self._index = {leaf: index for index, leaf in enumerate(leaves)}
        self._members = [buckets.layout.members(bucket) for bucket in range(len(buckets.buffers))]
        self._reduced = [False] * len(leaves)  # the slot holds a gradient that is the same on all ranks
        self._missing: list[int] = []  # for each bucket: how many of its gradients are not there yet
        self._works: list[Work[Any]] = []
        self._launched = 0
        self._broken: BaseException | None = None
        for leaf, view in zip(leaves, buckets.views, strict=True):
            leaf.slot.bind(view)
            leaf.watcher = self

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """A backward starts that will reach these leaves: the ranks are told, the others' slots are ready at once."""
        self._begun = True
        if self._broken is not None:
            raise ParallelError(
                f"an earlier backward failed half-way on this rank ({type(self._broken).__name__}: {self._broken}), so "
                "ranks no longer agree on what was reduced: start again from a checkpoint"
            )
        self._add_weight()
        if not self.sync:
            return
        reached = {self._index[leaf] for leaf in leaves}
        used = [index in reached or leaf.slot.full for index, leaf in enumerate(self._leaves)]
        self._control.fill(self._total, used)
        self._missing = [sum(index in reached for index in members) for members in self._members]
        self._launched = 0
        self._works = [self._all_reduce(self._control.array, None)]
        self._launch()

    def ready(self, leaf: Leaf) -> None:
        """The leaf's gradient is complete in its slot."""
        if self.sync:
            bucket = self._buckets.layout.places[self._index[leaf]].bucket
            self._missing[bucket] -= 1
            assert self._missing[bucket] >= 0
            self._launch()

    def end(self) -> None:
        """Waits for the buckets; afterwards every slot holds the mean, or is empty where no rank used it."""
        if not self.sync:
            return
        assert self._launched == len(self._members)
        for work in self._works:
            work.wait()
        self._works = []
        weighted = self._control.weighted_ranks()
        mine, self._total, self._passes = self._total is not None, None, 0
        if weighted not in (0, self._comm.size):
            raise ParallelError(
                f"rank {self._comm.rank} called {'model.backward(loss, weight=...)' if mine else 'loss.backward()'}, "
                f"but {weighted} of {self._comm.size} ranks gave a weight: all ranks must call the same one"
            )
        for index, used in enumerate(self._control.used()):
            self._leaves[index].slot.full = used
            self._reduced[index] = used

    def abandon(self, error: BaseException) -> None:
        """Backward raised: what was launched cannot be taken back, and the rest will not come."""
        if self.sync and self._broken is None and not isinstance(error, ParallelError):
            self._broken = error
        self._total, self._passes = None, 0

    @contextlib.contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """The backward inside counts `weight`; where it reaches no leaf, this rank takes part with zeros."""
        self._given = weight
        self._begun = False
        try:
            yield
            if not self._begun:
                self.begin([])
                self.end()
        finally:
            self._given = None

    def _add_weight(self) -> None:
        for index, leaf in enumerate(self._leaves):
            self._reduced[index] &= leaf.slot.full
        if self._passes > 0 and (self._given is None) != (self._total is None):
            raise ParallelError(
                "backward with and without a weight cannot be accumulated together: use "
                "model.backward(loss, weight=...) for all of them, or for none"
            )
        if self._given is not None:
            if any(self._reduced):
                name = self._names[self._reduced.index(True)]
                raise ParallelError(
                    f"backward with a weight would add to {name}.grad, which is already a mean over ranks: call "
                    "zero_grad() before it, or accumulate inside no_sync()"
                )
            self._total = (self._total or 0.0) + self._given
        self._passes += 1

    def _launch(self) -> None:
        while self._launched < len(self._members) and self._missing[self._launched] == 0:
            bucket = self._launched
            for index in self._members[bucket]:
                if not self._leaves[index].slot.full:
                    self._buckets.views[index][...] = 0  # nothing from this rank; others may have something
            self._works.append(self._all_reduce(self._buckets.buffers[bucket], self._control.scale))
            self._launched += 1

    def _all_reduce(self, array: Any, scale: Callable[[], float] | None) -> Work[Any]:
        return self._comm.all_reduce(array, ReduceOp.SUM, scale=scale, out=array, async_op=True)
