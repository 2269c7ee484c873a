"""Top-k: each rank sends only the largest entries of each gradient. The others are added to the next gradient.

Each rank sends k entries of each parameter, their values and indices, in one all_gather for each bucket. Every rank
adds them up in rank order, so all get the same bits. The received bytes grow with the number of ranks: when ratio *
ranks reaches 1, they are about as many as in an all-reduce.

The largest entries are those of largest magnitude in float32. Among equal ones, the lowest index comes first. So the
choice does not depend on how a machine sorts.

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
from ddp.errors import ArgumentError
from ddp.ops.shape import concatenate
from ddp.parallel.comm_hooks.error_feedback import add_residual, arrays, check_keys, tensors, working_dtype
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Steps

Array = Any  # numpy.ndarray or cupy.ndarray
# The dtype of an entry's index in its parameter.
_INDEX = np.dtype(np.int32)
_MAX_INDEX = 2**31 - 1


class TopK:
    """Communication hook that sends each gradient's largest entries. Each model on each rank needs its own object.

    ratio: the fraction of each parameter's entries that a rank sends, above 0 and at most 1; at least one entry is sent

    All ranks give the same arguments. Entries that are not sent are kept, and added to the next gradient. They take as
    much memory as the gradients. 16-bit gradients are added up in float32.

    Raises: ArgumentError for another ratio; DtypeError, in backward, for gradients that are not real.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        given: Any = ratio
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 < ratio <= 1:
            raise ArgumentError(f"TopK: expected a ratio above 0 and at most 1, got {given!r:.60}")
        self.ratio = ratio
        self._residuals: dict[str, Array] = {}

    @property
    def same_on_all_ranks(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, by name."""
        return {"ratio": float(self.ratio)}

    def __call__(self, bucket: GradBucket) -> Steps:
        xp = device_of(bucket.buffer).xp
        dtype = working_dtype(bucket.buffer)
        indices = []
        values = []
        for name, gradient, used in zip(bucket.names, bucket.gradients, bucket.used, strict=True):
            pending = add_residual(self._residuals, name, gradient, bucket.scale).reshape(-1)
            chosen = largest(pending, self.count(pending.size))
            indices.append(chosen)
            values.append(pending[chosen])
            if used:
                pending[chosen] = 0
        counts = [len(chosen) for chosen in indices]
        cut = sum(counts) * _INDEX.itemsize
        parts = concatenate(xp, indices, 0).astype(_INDEX, copy=False), concatenate(xp, values, 0)
        message = xp.concatenate([part.view(np.uint8) for part in parts])
        messages = yield bucket.comm.all_gather(message[None], lengths="equal", async_op=True)

        all_indices = messages[:, :cut].copy().view(_INDEX)
        all_values = messages[:, cut:].copy().view(dtype)
        start = 0
        for gradient, count in zip(bucket.gradients, counts, strict=True):
            total = xp.zeros(gradient.size, dtype)
            for rank in range(len(messages)):  # in rank order: equal bits everywhere; `+=` needs unique indices
                total[all_indices[rank, start : start + count]] += all_values[rank, start : start + count]
            gradient[...] = total.reshape(gradient.shape)
            start += count

    def count(self, size: int) -> int:
        """How many of `size` entries are sent."""
        return min(size, max(1, math.ceil(self.ratio * size)))

    def state_dict(self) -> dict[str, Any]:
        """{"errors": what this rank has not sent yet, by name}. The errors differ between ranks."""
        return {"errors": tensors(self._residuals)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads copies of the errors of this rank.

        On another number of ranks, nothing is lost if each saved rank's errors are loaded on exactly one rank. A rank
        that takes over several saved ranks loads the sum of their errors.

        Raises: StateDictError if it is not what `state_dict` returns; then nothing has changed.
        """
        check_keys("TopK", state_dict, ["errors"])
        self._residuals = arrays("TopK: errors", state_dict["errors"])


def largest(x: Array, count: int) -> Array:
    """Returns the indices of the `count` entries of largest magnitude, in ascending order. NaN counts as largest.

    Of entries with equal magnitude in float32, the first are chosen.

    x: (n,) of at most 2^31 - 1 real numbers
    """
    assert x.size <= _MAX_INDEX
    xp = device_of(x).xp
    # Nonnegative floats sort like their bits. The index, subtracted in the lower half, makes all keys different.
    keys = (xp.abs(x).astype(np.float32, copy=False).view(np.int32) & _MAX_INDEX).astype(np.int64)
    keys <<= 32
    keys -= xp.arange(x.size, dtype=np.int64)
    return xp.sort(xp.argpartition(keys, x.size - count)[x.size - count :]) if count < x.size else xp.arange(x.size)
