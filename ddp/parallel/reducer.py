"""The reducer: watches leaves become ready and reduces their buckets while backward is still running.

Strict order: ranks fill buckets in different orders, and collectives that meet in different orders deadlock. So a
bucket is launched when it is full and all before it in the plan have been launched, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives import Communicator, ReduceOp, Work
from ddp._engine import Leaf
from ddp._layout import FlatBuckets
from ddp.errors import ParallelError
from ddp.parallel import accumulation
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
        self._accumulation = accumulation.Accumulation()
        self._begun = False  # the backward that runs now has reached a leaf
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
        self._begun, self._works = True, []
        if self._broken is not None:
            raise ParallelError(
                f"an earlier backward failed half-way on this rank ({type(self._broken).__name__}: {self._broken}), so "
                "ranks no longer agree on what was reduced: start again from a checkpoint"
            )
        self._accumulate(leaves)
        if not self.sync:
            return
        reached = {self._index[leaf] for leaf in leaves}
        used = [index in reached or leaf.slot.full for index, leaf in enumerate(self._leaves)]
        self._control.fill(self._accumulation.weight, used)
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
        mine = self._accumulation.weight is not None
        self._accumulation.clear()
        if weighted not in (0, self._comm.size):
            raise ParallelError(
                f"rank {self._comm.rank} called {'model.backward(loss, weight=...)' if mine else 'loss.backward()'}, "
                f"but {weighted} of {self._comm.size} ranks gave a weight: all ranks must call the same one"
            )
        for index, used in enumerate(self._control.used()):
            self._leaves[index].slot.full = used
            self._reduced[index] = used

    def abandon(self, error: BaseException) -> None:
        """Backward raised: if something was launched it cannot be taken back, and the rest will not come."""
        if self._works and self._broken is None:
            self._broken = error
        self._accumulation.clear()
        self._begun = False

    def take_part(self) -> None:
        """Joins the other ranks' backward with zeros if the one that just ran on this rank reached no leaf."""
        if not self._begun:
            self.begin([])
            self.end()
        self._begun = False

    def release(self) -> None:
        """Lets go of the leaves: their gradients stay, and are reduced no more."""
        for leaf in self._leaves:
            leaf.watcher = None

    def _accumulate(self, reached: Sequence[Leaf]) -> None:
        full = [leaf.slot.full for leaf in self._leaves]
        self._reduced = [was and still for was, still in zip(self._reduced, full, strict=True)]
        self._accumulation.add(reaches=bool(reached), empty=not any(full))
        if accumulation.given() and any(self._reduced):
            name = self._names[self._reduced.index(True)]
            raise ParallelError(
                f"backward with a weight would add to {name}.grad, which is already a mean over ranks: call "
                "zero_grad() before it, or accumulate inside no_sync()"
            )

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
