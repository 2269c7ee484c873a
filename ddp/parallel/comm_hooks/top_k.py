"""Top-k: of each gradient only the largest entries are sent; the others wait until they have grown (error feedback).

Each rank sends its own k entries of each parameter, as numbers and where they belong, in one all_gather; every rank
adds them up in rank order, so all get the same bits. The bytes that come in grow with the number of ranks: with ratio *
size near 1 an all-reduce is as short.

Which entries are the largest is decided by their magnitudes in float32, and among equal ones by place, the first before
the later ones, whatever the machine's sort makes of them.

Source: Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599; Lin et al. 2018, arXiv:1712.01887, whose momentum correction
and warm-up are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from ddp._device import device_of
from ddp.errors import ArgumentError, StateDictError
from ddp.ops.shape import concatenate
from ddp.parallel.comm_hooks.error_feedback import add_residual, arrays, tensors, working_dtype
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Steps

Array = Any  # numpy.ndarray or cupy.ndarray
_PLACE = np.dtype(np.int32)  # of an entry in its parameter
_LARGEST = 2**31 - 1


class TopK:
    """The hook. An object of it belongs to one model on one rank; all ranks give the same arguments.

    ratio: the part of each parameter's entries that a rank sends, above 0 and at most 1; at least one entry is sent

    The others are remembered (as much memory as the gradients have), and sent later.
    16-bit gradients are added up in float32.

    Raises: ArgumentError for a ratio that is none; DtypeError, in backward, for gradients that are not real.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        given: Any = ratio
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) <= 1:
            raise ArgumentError(f"TopK: expected a ratio above 0 and at most 1, got {given!r:.60}")
        self.ratio = ratio
        self._residuals: dict[str, Array] = {}

    @property
    def same_on_all_ranks(self) -> dict[str, Any]:
        """What ranks have to agree on, by name."""
        return {"ratio": float(self.ratio)}

    def __call__(self, bucket: GradBucket) -> Steps:
        xp = device_of(bucket.buffer).xp
        dtype = working_dtype(bucket.buffer)
        places, values = [], []
        for name, gradient, taken in zip(bucket.names, bucket.gradients, bucket.used, strict=True):
            mine = add_residual(self._residuals, name, gradient, bucket.scale).reshape(-1)
            chosen = largest(mine, self.count(mine.size))
            places.append(chosen)
            values.append(mine[chosen])
            if taken:
                mine[chosen] = 0
        counts = [len(each) for each in places]
        cut = sum(counts) * _PLACE.itemsize
        parts = concatenate(xp, places, 0).astype(_PLACE, copy=False), concatenate(xp, values, 0)
        message = xp.concatenate([part.view(np.uint8) for part in parts])
        everyones = yield bucket.comm.all_gather(message[None], lengths="equal", async_op=True)

        all_places = everyones[:, :cut].copy().view(_PLACE)
        all_values = everyones[:, cut:].copy().view(dtype)
        start = 0
        for gradient, count in zip(bucket.gradients, counts, strict=True):
            total = xp.zeros(gradient.size, dtype)
            for rank in range(len(everyones)):  # in one order, and no place twice in one rank's: the same bits on all
                total[all_places[rank, start : start + count]] += all_values[rank, start : start + count]
            gradient[...] = total.reshape(gradient.shape)
            start += count

    def count(self, size: int) -> int:
        """How many of so many entries are sent."""
        return min(size, max(1, math.ceil(self.ratio * size)))

    def state_dict(self) -> dict[str, Any]:
        """{"errors": what this rank has not sent yet, by name}. Every rank has its own."""
        return {"errors": tensors(self._residuals)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over copies. On another number of ranks nothing is lost if each file's errors are added to one rank's.

        Raises: StateDictError if it is not what `state_dict` returns.
        """
        if set(state_dict) != {"errors"}:
            raise StateDictError(f"TopK: expected errors, got {', '.join(map(str, state_dict))}")
        self._residuals = arrays(state_dict["errors"])


def largest(x: Array, count: int) -> Array:
    """Where the `count` entries of largest magnitude are, (count,) ascending; of equal ones the first. NaN is largest.

    x: (n,) of at most 2^31 - 1 real numbers
    """
    assert x.size <= _LARGEST
    xp = device_of(x).xp
    # Numbers that are not negative are ordered as their bits are; below them the place makes every key another one.
    keys = (xp.abs(x).astype(np.float32, copy=False).view(np.int32) & _LARGEST).astype(np.int64)
    keys <<= 32
    keys -= xp.arange(x.size, dtype=np.int64)
    return xp.sort(xp.argpartition(keys, x.size - count)[x.size - count :]) if count < x.size else xp.arange(x.size)
