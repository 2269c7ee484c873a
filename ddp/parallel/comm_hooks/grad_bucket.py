"""The argument of a communication hook, and its type: see `ddp.parallel.comm_hooks`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from collectives import Communicator, Work

Array = Any  # numpy.ndarray or cupy.ndarray
Steps = Generator[Work[Any], Any, None]


@dataclass(kw_only=True, slots=True, eq=False)
class GradBucket:
    """The bucket that a communication hook reduces. Do not keep it after the hook has ended.

    index, count: its number in launch order, and the number of buckets
    buffer: (n,) this rank's gradients, summed over the backwards since the last reduction, with gaps of zeros between
    them. The values that the hook leaves in it become `param.grad`.
    names: of its parameters; a parameter has the same name in every plan
    gradients: views of the buffer, each in its own shape
    used: whether any rank used each parameter in this step, the same on all ranks; if none did, `param.grad` will be
    None, whatever the hook leaves
    scale: the factor from the sum of all ranks' buffers to the mean; the same on all ranks
    comm: the communicator for the hook's collectives, called with async_op=True
    """

    index: int
    count: int
    buffer: Array
    names: tuple[str, ...]
    gradients: tuple[Array, ...]
    used: tuple[bool, ...]
    scale: float
    comm: Communicator


#: A communication hook: called once for each bucket in each backward. It returns a Work that leaves the mean in
#: `bucket.buffer`, or None if the mean is there already. Or it is a generator: it yields each Work that it waits for,
#: gets the Work's result from `yield`, and puts the mean into `bucket.buffer` before it ends. A hook may have an
#: attribute `same_on_all_ranks`, a dict of settings that must be equal on all ranks.
Hook = Callable[[GradBucket], "Work[Any] | Steps | None"]
