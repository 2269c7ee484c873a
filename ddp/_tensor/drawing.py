"""Draws that take tensors as their parameters, or write into one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddp import _device
from ddp._device import Stream, on
from ddp._tensor.base import TensorBase, together, wrap
from ddp._tensor.creation import Size, Where, made
from ddp._tensor.device_guard import guarded_function
from ddp._tensor.dtypes import (
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    get_default_dtype,
    iinfo,
    int64,
    is_float,
    parse,
)
from ddp._tensor.inplace import followed
from ddp._tensor.sampling import draw, origin
from ddp._tensor.shaping import spread
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops.indexing import check_all

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Self = TypeVar("Self", bound="Drawing")


@guarded_function
def normal(
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Size | None = None,
    *,
    generator: Stream | None = None,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
) -> Tensor:
    """Normally distributed random numbers: normal(mean, std, size) of numbers, or of tensors that give the shape.

    Tensors of means and deviations broadcast; the result is outside the graph. Raises: ArgumentError for a negative
    deviation, or without a size where both are numbers; ShapeError if they do not broadcast; DeviceError.
    """
    given = [x for x in (mean, std) if isinstance(x, TensorBase)]
    if len({x._device for x in given}) > 1:
        mean, std = together("normal", (mean, std))
        return normal(mean, std, generator=generator, requires_grad=requires_grad)
    centre, width = (x.array if isinstance(x, TensorBase) else x for x in (mean, std))
    if isinstance(std, TensorBase):
        check_all(std._device.xp, ~(width < 0), ArgumentError, "normal: std is negative")
    elif width < 0:
        raise ArgumentError("normal: std is negative")
    if given:
        where, kind = given[0]._device, given[0].array.dtype
        try:
            shape: tuple[int, ...] = np.broadcast_shapes(*(x.array.shape for x in given))
        except ValueError as error:
            raise ShapeError(f"normal: means {centre.shape} and deviations {width.shape} do not broadcast") from error
    elif size is None:
        raise ArgumentError("normal: a size is needed where mean and std are numbers")
    else:
        where = origin(device, generator)
        kind, shape = get_default_dtype() if dtype is None else parse(dtype), spread((size,))
    with on(where):
        noise = draw(_device.generator(where, generator), "standard_normal", shape, kind)
        array = where.xp.asarray(noise * width + centre).astype(kind, copy=False)
    return made(array, where, requires_grad)


@guarded_function
def bernoulli(input: TensorBase, p: float | None = None, *, generator: Stream | None = None) -> Tensor:
    """1 with the probability that `input` (floating) gives for each element, or with `p`, else 0; outside the graph.

    Raises: ArgumentError for probabilities outside [0, 1]; DtypeError for integers without `p`.
    """
    x, xp = input.array, input._device.xp
    if p is None and not is_float(x.dtype):
        raise DtypeError(f"bernoulli: probabilities are floating, not {x.dtype}")
    chance = x if p is None else p
    told = "bernoulli: a probability is outside [0, 1]"
    if p is None:
        check_all(xp, (x >= 0) & (x <= 1), ArgumentError, told)
    elif not 0 <= p <= 1:
        raise ArgumentError(told)
    with on(input._device):
        drawn = _device.generator(input._device, generator).random(x.shape, dtype=float64)
    return wrap(xp.asarray(drawn < chance).astype(x.dtype), input._device)


@guarded_function
def multinomial(
    input: TensorBase, num_samples: int, replacement: bool = False, *, generator: Stream | None = None
) -> Tensor:
    """`num_samples` categories drawn by the weights of `input`: (C,) or (N, C) to (num_samples,) or (N, num_samples).

    int64. Weights are non-negative and need not sum to 1. Raises: ShapeError for other dimensions; DtypeError unless
    floating; ArgumentError for weights that are negative, not finite or all 0, or fewer than asked for.
    """
    x, xp = input.array, input._device.xp
    if x.ndim not in (1, 2) or not x.shape[-1]:
        raise ShapeError(f"multinomial: expected weights of shape (C,) or (N, C), got {x.shape}")
    if not is_float(x.dtype):
        raise DtypeError(f"multinomial: expected floating weights, got {x.dtype}")
    if num_samples <= 0:
        raise ArgumentError(f"multinomial: num_samples={num_samples} is not positive")
    weights = x.reshape(-1, x.shape[-1]).astype(float64)
    if not bool(((weights >= 0) & (weights < math.inf)).all()):
        raise ArgumentError("multinomial: a weight is negative, infinite or nan")
    rows, possible = len(weights), (weights > 0).sum(axis=1)
    needed = 1 if replacement else num_samples
    if rows and int(possible.min()) < needed:
        raise ArgumentError(
            f"multinomial: {needed} categories of positive weight are needed, a row has {int(possible.min())}"
        )
    source = _device.generator(input._device, generator)
    with on(input._device):
        if replacement:
            out = _inverse(xp, weights, xp.asarray(source.random((rows, num_samples), dtype=float64)))
        else:
            # The smallest of exponential waiting times of these rates come in the order of draws without replacement.
            with np.errstate(all="ignore"):
                waits = _exponential(xp, source, weights.shape) / weights
            out = xp.argsort(waits, axis=1)[:, :num_samples]
    return wrap(out.astype(int64, copy=False).reshape(*x.shape[:-1], num_samples), input._device)


def _exponential(xp: Any, source: Any, shape: tuple[int, ...]) -> Any:
    """Exponentially distributed float64 numbers of rate 1."""
    return -xp.log1p(-xp.asarray(source.random(shape)))


def _inverse(xp: Any, weights: Any, drawn: Any) -> Any:
    """The first category of each row at which the running sum of weights exceeds drawn * total: (N, S)."""
    sums = weights.cumsum(axis=1)
    drawn = drawn * sums[:, -1:]
    out = xp.empty(drawn.shape, int64)
    if drawn.shape[1] <= len(sums):
        for i in range(drawn.shape[1]):
            out[:, i] = (sums <= drawn[:, i : i + 1]).sum(axis=1)
    else:
        for i, row in enumerate(sums):
            out[i] = xp.searchsorted(row, drawn[i], side="right")
    # Rounding may reach the total itself, past the last category of positive weight.
    return xp.minimum(out, sums.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)[:, None])


def _overwritten(x: Self, name: str, numbers: Any) -> Self:
    followed(x, name)  # raises in the name of this operation, where copy_ would in its own
    x.copy_(wrap(x._device.xp.asarray(numbers), x._device))  # type: ignore[attr-defined]  # every tensor has the mixins
    return x


class Drawing(TensorBase):
    """Draws that take this tensor as their parameters, or write into it."""

    __slots__ = ()

    def bernoulli(self, p: float | None = None, *, generator: Stream | None = None) -> Tensor:
        """1 with the probability of each element, or `p`, else 0: see `ddp.bernoulli`."""
        return bernoulli(self, p, generator=generator)

    def multinomial(self, num_samples: int, replacement: bool = False, *, generator: Stream | None = None) -> Tensor:
        """Categories drawn by these weights: see `ddp.multinomial`."""
        return multinomial(self, num_samples, replacement, generator=generator)

    def bernoulli_(self: Self, p: Any = 0.5, *, generator: Stream | None = None) -> Self:
        """Every element becomes 1 with probability `p`, a number or a tensor that broadcasts, else 0.

        Raises: ArgumentError for a probability outside [0, 1].
        """
        chance = p.array if isinstance(p, TensorBase) else float(p)
        told = "bernoulli_: a probability is outside [0, 1]"
        if isinstance(p, TensorBase):
            check_all(p._device.xp, (chance >= 0) & (chance <= 1), ArgumentError, told)
        elif not 0 <= chance <= 1:
            raise ArgumentError(told)
        drawn = _device.generator(self._device, generator).random(self.array.shape)
        return _overwritten(self, "bernoulli_", drawn < chance)

    def exponential_(self: Self, lambd: float = 1.0, *, generator: Stream | None = None) -> Self:
        """Random numbers, exponentially distributed with rate `lambd`. Raises: ArgumentError unless it is positive."""
        if not lambd > 0:
            raise ArgumentError(f"exponential_: lambd={lambd} is not positive")
        drawn = _exponential(self._device.xp, _device.generator(self._device, generator), self.array.shape)
        return _overwritten(self, "exponential_", drawn / lambd)

    def random_(self: Self, low: int = 0, high: int | None = None, *, generator: Stream | None = None) -> Self:
        """Random integers in [low, high), or in [0, low) given one number; given none, as high as the dtype counts.

        Raises: ArgumentError for an empty range.
        """
        if high is None:
            low, high = 0, low or _COUNTS.get(self.array.dtype) or iinfo(self.array.dtype).max + 1
        if high <= low:
            raise ArgumentError(f"random_: no integer is in [{low}, {high})")
        drawn = _device.generator(self._device, generator).integers(low, high, self.array.shape, dtype="int64")
        return _overwritten(self, "random_", drawn)


# Up to here a floating dtype holds every integer.
_COUNTS = {bool_: 2, bfloat16: 2**8 + 1, float16: 2**11 + 1, float32: 2**24 + 1, float64: 2**53 + 1, int64: 2**63 - 1}
