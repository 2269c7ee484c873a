"""The tripwire: ranks whose parameters drift apart train different models, and nothing else would tell.

Every so many steps each rank takes a checksum of its parameters; it rides in the control message of the next backward,
so that it costs no call, and where arrays are on a device no wait but for one that is a whole step behind. If ranks
differ they say which parameter it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError
from ddp.parallel.checks.arriving import Arriving
from ddp.parallel.control import NO_CHECKSUM

Array = Any
_BITS = 52  # a float64 holds such numbers exactly


class Tripwire:
    """names, tensors: the parameters; every: how many synchronized backwards from one checksum to the next, 0: none"""

    def __init__(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor], every: int) -> None:
        self._comm = comm
        self._names = names
        self._tensors = tensors
        self._every = every
        self._sums: Arriving | None = None  # of each parameter, not yet compared
        self._compared: np.ndarray[Any, Any] = np.zeros(0, np.uint64)
        self._taken = 0  # at which step
        self._agreed = 0  # the last step at which ranks had the same parameters

    def checksum(self, step: int) -> float:
        """What the control message of this backward carries; takes the next checksum if it is time for one."""
        said = NO_CHECKSUM
        if self._sums is not None:
            self._compared = self._sums.read()  # they were taken a step ago: nothing is waited for
            said, self._sums = float(mix(self._compared.tolist())), None
            self._taken = step - 1
        if self._every and self._comm.size > 1 and step % self._every == 0:
            xp = self._tensors[0].device.xp
            self._sums = Arriving(xp.stack([bit_sum(tensor.array, xp) for tensor in self._tensors]), xp)
        return said

    def forget(self) -> None:
        """What was taken is of no use any more: this rank's parameters are to be replaced."""
        self._sums = None

    def compare(self, checksums: np.ndarray[Any, Any]) -> None:
        """Looks at what the ranks said. Collective if they differ.

        checksums: (size,)
        Raises: ParallelError on every rank, with the parameter and the ranks.
        """
        said = checksums[checksums != NO_CHECKSUM]
        if len(said) == 0:
            return
        if (said == said[0]).all():
            self._agreed = self._taken
            return
        mine = self._compared if len(self._compared) else np.zeros(len(self._names), np.uint64)
        table = self._comm.all_gather(mine, lengths="equal").reshape(self._comm.size, -1)
        ranks = np.flatnonzero(checksums != NO_CHECKSUM)
        raise ParallelError(
            f"{drifted(self._names, table[ranks], ranks.tolist())} at step {self._taken} (all had the same at step "
            f"{self._agreed}): something changes parameters on one rank alone, or its memory is at fault. Start again "
            "from a checkpoint; check_every=0 switches this check off"
        )


def drifted(names: Sequence[str], table: np.ndarray[Any, Any], ranks: Sequence[int]) -> str:
    """Who drifted, in words. table: (ranks, parameters) sums, at least two rows of which differ."""
    at = int(np.flatnonzero((table != table[0]).any(axis=0))[0])
    others = int((table != table[0]).any(axis=0).sum()) - 1
    (common, most), *rest = Counter(table[:, at].tolist()).most_common()
    more = f" (and {others} more)" if others else ""
    if rest[0][1] == most:  # nobody can say who is right
        listed = ", ".join(map(str, ranks))
        return f"{names[at]}{more} is not the same on ranks {listed}"
    odd = [rank for rank, each in zip(ranks, table[:, at].tolist(), strict=True) if each != common]
    listed = ", ".join(map(str, odd))
    return f"{names[at]}{more} on rank{'s' if len(odd) > 1 else ''} {listed} is not what the other ranks have"


def bit_sum(array: Array, xp: Any) -> Array:
    """() uint64: the sum of an array's bits as whole numbers, modulo 2^64: any one bit that differs changes it."""
    flat = xp.ascontiguousarray(array).reshape(-1).view(xp.uint8)
    if xp is not np and flat.data.ptr % 8:  # a GPU reads no number across its alignment
        flat = flat.copy()
    whole = flat.size // 8 * 8
    # Arrays of one: NumPy warns where a scalar overflows.
    total = flat[:whole].view(xp.uint64).sum(dtype=xp.uint64, keepdims=True)
    return (total + flat[whole:].sum(dtype=xp.uint64, keepdims=True)).reshape(())


def mix(sums: Sequence[int]) -> int:
    """One number below 2^52 of many, in which each has its place."""
    mixed = 0
    for each in (*sums, len(sums)):  # one more round, or the lowest bits of the last would be cut off
        mixed = (mixed * 0x9E3779B97F4A7C15 + each) % (1 << 64)
        mixed ^= mixed >> 29
    return mixed >> (64 - _BITS)
