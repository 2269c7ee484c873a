"""Placement: which parameter's gradient lies where in the buckets of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from collectives import Communicator
from ddp._engine import Leaf
from ddp._layout import FlatBuckets, lay_out
from ddp.parallel.exchange import Buckets
from ddp.parallel.planning.plan import Plan


class Placement:
    """The buckets of one plan, and the slots of a model's leaves in them. Making one moves gradients there; collective.

    placed: the parameter of each gradient in the buckets; bucket_of: each parameter's bucket, None if it has no place
    """

    def __init__(self, plan: Plan, names: Sequence[str], leaves: Sequence[Leaf], comm: Communicator) -> None:
        self._leaves = leaves
        numbers = {name: number for number, name in enumerate(names)}
        self.placed = sorted(numbers[name] for bucket in plan.buckets for name in bucket)
        place = {index: at for at, index in enumerate(self.placed)}
        members = tuple(tuple(place[numbers[name]] for name in bucket) for bucket in plan.buckets)
        inside = [leaves[index] for index in self.placed]
        layout = lay_out(members, [leaf.shape for leaf in inside], [leaf.dtype for leaf in inside])
        # The ranks of a node reduce their buckets where they lie; NCCL moves them without copies of its own.
        xp = leaves[0].grad_buffer.xp
        zeros = comm.empty if xp is np else xp.zeros if comm.size == 1 else partial(comm.empty, like=xp.empty(0))
        memory = FlatBuckets(layout, zeros)
        self.buckets = Buckets(memory=memory, names=tuple(names[index] for index in self.placed), members=members)
        self.bucket_of: list[int | None] = [None] * len(leaves)
        for at, index in enumerate(self.placed):
            leaves[index].grad_buffer.bind(memory.views[at])
            self.bucket_of[index] = layout.places[at].bucket
        for index in self.outside():
            leaves[index].grad_buffer.unbind()

    def outside(self) -> Iterator[int]:
        """The parameters that have no place."""
        return (index for index, bucket in enumerate(self.bucket_of) if bucket is None)

    def missing(self, reached: Collection[int]) -> list[int]:
        """For each bucket: how many gradients of these parameters it takes."""
        return [sum(self.placed[at] in reached for at in members) for members in self.buckets.members]

    def leave_out(self, aside: Collection[int]) -> None:
        """Takes what is not to be reduced out of the buckets, each into memory of its own, and all else back in."""
        for at, index in enumerate(self.placed):
            slot = self._leaves[index].grad_buffer
            if index in aside:
                slot.unbind()
            elif not slot.bound:
                slot.bind(self.buckets.memory.views[at])

    def take_back(self, index: int) -> None:
        """What was left out has been used by other ranks: its gradient is what lies in its bucket."""
        if self.bucket_of[index] is not None:
            slot = self._leaves[index].grad_buffer
            slot.clear()
            slot.bind(self.buckets.memory.views[self.placed.index(index)])
