"""Buckets: flat arrays that hold the gradients of many parameters, which one all-reduce reduces together.

A plan says which parameters share a bucket. This module allocates a flat array for each bucket, and makes the
`param.grad` of each of these parameters a view of its bucket. So an all-reduce can work in place on a full bucket, and
nothing is copied before or after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from collectives import Communicator
from ddp._engine import Leaf
from ddp._engine.grad_buffer import BOUND
from ddp._layout import FlatBuckets, lay_out
from ddp.parallel.bucket_plan import Plan


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The gradients of one plan, in memory.

    memory: its `buffers` are the buckets, its `views` the gradients
    names: the parameter of each gradient; gradients are numbered as in memory.layout.slices
    members: the gradients of each bucket; buckets are in launch order
    """

    memory: FlatBuckets
    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    def describe(self, bucket: int) -> str:
        """The bucket's number and parameters, for an error message."""
        names = self.names
        members = self.members[bucket]
        if len(members) <= 4:
            listed = ", ".join(names[index] for index in members)
        else:
            listed = f"{names[members[0]]}, {names[members[1]]}, ..., {names[members[-1]]}"
        return f"bucket {bucket} of {len(self.members)} ({listed})"


class BucketAssignment:
    """The buckets of one plan, with the gradients of a model's leaves moved into them. Making one is collective.

    parameters: for each gradient in the buckets, the number of its parameter
    bucket_of: each parameter's bucket; None: it has no bucket. Such a parameter was frozen when the model was wrapped,
    or a loaded plan lacks it, and no rank has used it since
    """

    def __init__(self, plan: Plan, names: Sequence[str], leaves: Sequence[Leaf], comm: Communicator) -> None:
        self._leaves = leaves
        numbers = {name: number for number, name in enumerate(names)}
        self.parameters = sorted(numbers[name] for bucket in plan.buckets for name in bucket)
        gradient_of = {index: gradient for gradient, index in enumerate(self.parameters)}
        members = tuple(tuple(gradient_of[numbers[name]] for name in bucket) for bucket in plan.buckets)
        assigned = [leaves[index] for index in self.parameters]
        layout = lay_out(members, [leaf.shape for leaf in assigned], [leaf.dtype for leaf in assigned])
        # `comm.empty` makes shared memory if it can. There the ranks of a node reduce their buckets in place.
        memory = FlatBuckets(layout, partial(comm.empty, like=leaves[0].grad_buffer.xp.empty(0)))
        self.buckets = Buckets(memory=memory, names=tuple(names[index] for index in self.parameters), members=members)
        self.bucket_of: list[int | None] = [None] * len(leaves)
        for gradient, index in enumerate(self.parameters):
            leaves[index].grad_buffer.bind(memory.views[gradient])
            self.bucket_of[index] = layout.slices[gradient].bucket
        for index in self.unassigned():
            leaves[index].grad_buffer.unbind()

    def unassigned(self) -> Iterator[int]:
        """The parameters that are in no bucket."""
        return (index for index, bucket in enumerate(self.bucket_of) if bucket is None)

    def missing(self, reached: Collection[int]) -> list[int]:
        """For each bucket: how many gradients it waits for in a backward that reaches these parameters."""
        return [sum(self.parameters[gradient] in reached for gradient in members) for members in self.buckets.members]

    def exclude(self, excluded: Collection[int]) -> None:
        """Moves these parameters' gradients out of the buckets to memory of their own. Moves all others back in."""
        for gradient, index in enumerate(self.parameters):
            grad_buffer = self._leaves[index].grad_buffer
            if index in excluded:
                grad_buffer.unbind()
            elif grad_buffer.memory is not BOUND:
                grad_buffer.bind(self.buckets.memory.views[gradient])

    def include(self, index: int) -> None:
        """Makes the mean in its bucket the gradient of an excluded parameter that other ranks have used."""
        if self.bucket_of[index] is not None:
            grad_buffer = self._leaves[index].grad_buffer
            grad_buffer.clear()
            grad_buffer.bind(self.buckets.memory.views[self.parameters.index(index)])
