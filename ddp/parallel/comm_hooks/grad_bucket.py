"""What a communication hook is given, and what it has to be: see `ddp.parallel.comm_hooks`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from collectives import Communicator, Work
from ddp.errors import ParallelError

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
    """

    index: int
    count: int
    buffer: Array
    names: tuple[str, ...]
    gradients: tuple[Array, ...]
    used: tuple[bool, ...]
    scale: float
    _comms: Sequence[Communicator]
    _phase: int = 0

    @property
    def comm(self) -> Communicator:
        """The communicator of the phase that the hook is in: another one after each `yield`.

        Raises: ParallelError if the hook has gone through as many phases as it declares.
        """
        if self._phase == len(self._comms):
            raise ParallelError(
                f"the hook asks for a communicator after {self._phase} yields, but says that it has "
                f"{len(self._comms)} phases: set its attribute phases to how often it yields"
            )
        return self._comms[self._phase]


#: Called once for each bucket. Returns a Work that leaves the mean in `bucket.buffer`; or is a generator that yields a
#: Work of `bucket.comm`, is sent its result, and has left the mean there when it ends; or None: it is there already.
#: Its attribute `phases`, 1 if it has none, says how often a generator yields at most; `same_on_all_ranks`, a dict
#: if it has one, which settings ranks have to agree on.
Hook = Callable[[GradBucket], "Work[Any] | Steps | None"]
