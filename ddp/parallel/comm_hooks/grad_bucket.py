"""What a communication hook is given, and what it has to be: see `ddp.parallel.comm_hooks`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from collectives import Communicator, Work

Array = Any  # numpy.ndarray or cupy.ndarray
Steps = Generator[Work[Any], Any, None]


@dataclass(kw_only=True, slots=True, eq=False)
class GradBucket:
    """A bucket as a communication hook gets it. Not to be kept beyond the hook's end.

    index, count: its number, in the order in which buckets go, and how many there are
    buffer: (n,) this rank's gradients, summed over its samples; what the hook leaves there becomes `param.grad`. The
    gradients lie in it with gaps of zeros between them.
    names: of its parameters, the same strings in every plan; gradients: views of the buffer, each in its own shape
    used: whether any rank used each parameter in this step; the others' `param.grad` will be None, whatever the hook
    leaves there
    scale: the mean over ranks is the sum of all ranks' buffers times this; the same on all ranks, as used is
    comm: what the hook calls, with async_op=True
    """

    index: int
    count: int
    buffer: Array
    names: tuple[str, ...]
    gradients: tuple[Array, ...]
    used: tuple[bool, ...]
    scale: float
    comm: Communicator


#: Called once for each bucket. Returns a Work that leaves the mean in `bucket.buffer`; or is a generator that yields a
#: Work of `bucket.comm`, is sent its result, and has left the mean there when it ends; or None: it is there already.
#: Its attribute `same_on_all_ranks`, a dict if it has one, says which settings ranks have to agree on.
Hook = Callable[[GradBucket], "Work[Any] | Steps | None"]
