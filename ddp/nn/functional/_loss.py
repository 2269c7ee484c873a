"""Losses as functions."""

from __future__ import annotations

from ddp._tensor.arithmetic import floating
from ddp._tensor.base import apply, borrowed
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import loss


def cross_entropy(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...).

    target: int64 classes in [0, C). reduction: "mean", "sum" or "none" (the target's shape).

    Raises: ShapeError, DtypeError, ArgumentError; RangeError naming the first target out of range.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"cross_entropy: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if target.dtype.kind not in "iu":
        raise DtypeError(f"cross_entropy: target holds class numbers (int64), not {target.dtype}")
    if input.ndim == 1 and target.ndim == 0:
        loss_ = cross_entropy(input.unsqueeze(0), target.unsqueeze(0), reduction)
        return loss_.squeeze(0) if reduction == "none" else loss_
    if input.ndim < 2 or target.shape != (input.shape[0], *input.shape[2:]):
        raise ShapeError(f"cross_entropy: input {input.shape}, target {target.shape}: expected (N, C, ...), (N, ...)")
    classes, array = input.shape[1], target._array
    if array.size and not (array.min() >= 0 and array.max() < classes):
        bad = array[(array < 0) | (array >= classes)][0]
        raise RangeError(f"cross_entropy: target {int(bad)} is not one of the {classes} classes 0 to {classes - 1}")
    return apply(loss.cross_entropy, (floating(input),), target=borrowed(array, input), reduction=reduction)
