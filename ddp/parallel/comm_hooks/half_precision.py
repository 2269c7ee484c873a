"""Gradients in 16 bits on the wire: half the bytes of float32, but sums in float32.

`all_reduce` of 16-bit arrays sends float32, except in shared memory of the host: MPI cannot add 16-bit floats. To send
16 bits, the ranks split the addition here:

    all_to_all    each rank gets its 1/size of the elements from all others, in 16 bits
    sum           of these parts, in float32
    all_gather    of the sums, rounded to 16 bits again

Each element is rounded twice, however many ranks there are, and all ranks decode the same bytes.

float16 ends at 65504 and loses precision below 6e-5. A sum of gradients over a large batch is easily above 65504, and
a part of a small mean below 6e-5. So each part is sent as a block, multiplied by a power of two. The block's largest
element decides this power; its inverse is sent along, as a float32. No number that fits float32 overflows, and elements
down to 2^-28 of the largest keep all 11 bits. bfloat16 has the range of float32, and needs no such factor.

Source: the exchange as in Seide et al. 2014, "1-bit stochastic gradient descent"; block exponents as in Wilkinson 1963,
"Rounding Errors in Algebraic Processes", §1.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from collectives import Work
from ddp._device import device_of
from ddp.ops.arrays import astype
from ddp.parallel.comm_hooks.error_feedback import working_dtype
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Steps

Array = Any  # numpy.ndarray or cupy.ndarray
# The largest element of a block is scaled to less than 2^_TOP.
_TOP = 15
# Maximum magnitude of the exponent of a block's power of two, so that the power and its inverse fit float32.
_MAX_EXPONENT = 120
# Number of 16-bit words at the beginning of a block. They hold the inverse of its power of two, a float32.
_HEAD = 2


def fp16(bucket: GradBucket) -> Steps:
    """Sends float16: half the bytes of float32, 11 bits of each gradient.

    A gradient keeps fewer bits if it is tiny compared with the largest of its block. A single rank rounds, too.

    Raises: DtypeError for gradients that are not real.
    """
    return _in_16_bits(bucket, np.float16, _to_the_top)


def bf16(bucket: GradBucket) -> Steps:
    """Sends bfloat16: half the bytes of float32, 8 bits of each gradient; see `fp16`."""
    return _in_16_bits(bucket, ml_dtypes.bfloat16, lambda rows: device_of(rows).xp.ones(len(rows), np.float32))


def allreduce(bucket: GradBucket) -> Work[Any]:
    """Reduces the bucket to the sum over ranks times the scale, in place."""
    work: Work[Any] = bucket.comm.all_reduce(bucket.buffer, scale=bucket.scale, out=bucket.buffer, async_op=True)
    return work


def _in_16_bits(bucket: GradBucket, dtype: Any, fit: Callable[[Array], Array]) -> Steps:
    """Reduces the bucket in 16 bits. fit: (rows, n) float32 -> (rows,) float32, the factor by which a row is scaled"""
    buffer = bucket.buffer
    ranks = bucket.comm.size
    xp = device_of(buffer).xp
    part = max(1, -(-buffer.size // ranks))
    scaled = xp.zeros(ranks * part, np.float32)
    # The buffer is scaled before it is rounded, so that the ranks' parts add up to the mean.
    xp.multiply(buffer, bucket.scale, out=scaled[: buffer.size], dtype=working_dtype(buffer), casting="same_kind")
    scaled = scaled.reshape(ranks, part)
    message = yield bucket.comm.all_to_all(_pack(scaled, dtype, fit(scaled)), lengths="equal", async_op=True)
    total = _unpack(message, dtype).sum(axis=0, keepdims=True)
    message = yield bucket.comm.all_gather(_pack(total, dtype, fit(total)), lengths="equal", async_op=True)
    buffer[...] = _unpack(message, dtype).reshape(-1)[: buffer.size]


def _pack(rows: Array, dtype: Any, factors: Array) -> Array:
    """Packs (rows, n) float32 into (rows, 2 + n) 16-bit words: the inverse of a row's factor, then the scaled row."""
    words = device_of(rows).xp.empty((len(rows), _HEAD + rows.shape[1]), np.uint16)
    words[:, :_HEAD] = (1 / factors).view(np.uint16).reshape(-1, _HEAD)
    words[:, _HEAD:].view(dtype)[...] = astype(device_of(rows).xp, rows * factors[:, None], np.dtype(dtype))
    return words


def _unpack(words: Array, dtype: Any) -> Array:
    """The rows that `_pack` packed, in float32."""
    inverses = words[:, :_HEAD].copy().view(np.float32)
    rows = astype(device_of(words).xp, words[:, _HEAD:].copy().view(dtype), np.dtype(np.float32))
    rows *= inverses
    return rows


def _to_the_top(rows: Array) -> Array:
    """For each row, the power of two that brings its largest magnitude below 2^`_TOP`; 1 for a row with inf or nan."""
    xp = device_of(rows).xp
    largest = xp.maximum(rows.max(axis=1), -rows.min(axis=1))
    _, exponents = xp.frexp(largest)
    shifts = xp.where(xp.isfinite(largest), xp.clip(_TOP - exponents, -_MAX_EXPONENT, _MAX_EXPONENT), 0)
    return xp.ldexp(xp.ones_like(largest), shifts.astype(np.int32))
