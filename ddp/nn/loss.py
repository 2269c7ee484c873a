"""Losses of classification, and what all losses share: the reduction.

All take reduction="mean", "sum" or "none", and PyTorch's deprecated size_average and reduce in its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._device import place
from ddp._engine import modes
from ddp._tensor.base import apply, together
from ddp._tensor.core import Tensor
from ddp._tensor.device_guard import guarded_function
from ddp._tensor.dtypes import is_float
from ddp._tensor.operands import floating
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.nn.module import FunctionModule
from ddp.nn.validation import broadcast_pair, positional, reduce_losses
from ddp.ops import indexing, losses


@positional("size_average ignore_index reduce reduction label_smoothing")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...).

    target: int64 classes in [0, C), where `ignore_index` counts for nothing; or floating, of the input's shape, the
    probability of each class. weight: (C,), of each class; the mean is then the weighted one. label_smoothing: in
    [0, 1], how much of the target is spread evenly over the classes. reduction: "mean", "sum" or "none" (the target's
    shape).

    Raises: ShapeError, DtypeError, ArgumentError; RangeError naming the first target out of range.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing is in [0, 1], not {label_smoothing}")
    if is_float(target.array.dtype):
        return _soft_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    if input.ndim == 1 and target.ndim == 0:
        how: Any = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        kept = cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, **how)
        return kept.squeeze(0) if reduction == "none" else kept
    classes, keep, weights = _check_classes("cross_entropy", input, target, weight, ignore_index)
    return apply(
        losses.cross_entropy,
        (floating(input),),
        target=classes,
        keep=keep,
        weight=weights,
        smoothing=label_smoothing,
        reduction=reduction,
        single=modes.state.autocast is not None and modes.state.autocast.spares(losses.cross_entropy, input),
    )


def _soft_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, smoothing: float
) -> Tensor:
    if input.shape != target.shape or not input.ndim:
        raise ShapeError(f"cross_entropy: input {input.shape}, target {target.shape}: probabilities need one shape")
    if ignore_index >= 0:
        raise ArgumentError("cross_entropy: ignore_index is for class numbers, not for probabilities")
    if input.ndim == 1:
        kept = _soft_cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, ignore_index, reduction, smoothing)
        return kept.squeeze(0) if reduction == "none" else kept
    x, wanted = broadcast_pair("cross_entropy", input, target)
    classes = input.shape[1]
    if smoothing:
        wanted = wanted * (1 - smoothing) + smoothing / classes
    if weight is not None:
        _check_weight("cross_entropy", weight, classes)
        wanted = wanted * weight.to(dtype=wanted.dtype).reshape([classes, *[1] * (input.ndim - 2)])
    return apply(losses.soft_cross_entropy, (x, wanted), reduction=reduction)


@positional("size_average ignore_index reduce reduction")
def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-input[target], of logarithms of probabilities. Shapes and arguments as in cross_entropy.

    Raises: ShapeError, DtypeError, ArgumentError; RangeError naming the first target out of range.
    """
    if input.ndim == 1 and target.ndim == 0:
        rows = input.unsqueeze(0), target.unsqueeze(0)
        kept = nll_loss(*rows, weight, ignore_index=ignore_index, reduction=reduction)
        return kept.squeeze(0) if reduction == "none" else kept
    classes, keep, weights = _check_classes("nll_loss", input, target, weight, ignore_index)
    return apply(losses.nll_loss, (floating(input),), target=classes, keep=keep, weight=weights, reduction=reduction)


def _check_weight(name: str, weight: Tensor, classes: int) -> None:
    if weight.shape != (classes,):
        raise ShapeError(f"{name}: weight {weight.shape}: expected ({classes},), one for each class")


@guarded_function
def _check_classes(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Any, ...]:
    """The targets as int64, which of them to keep (None for all), and the weight of each class.

    The op reads the targets in forward only, so a later write to them cannot change backward.
    """
    x, array = input.array, target.array
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name}: target holds class numbers (int64), not {array.dtype}")
    if x.ndim < 2 or array.shape != (x.shape[0], *x.shape[2:]):
        raise ShapeError(f"{name}: input {x.shape}, target {array.shape}: expected (N, C, ...), (N, ...)")
    classes = x.shape[1]
    if array.dtype != "int64":
        array = array.astype("int64")
    message = f"{name}: target {{value}} is not one of the {{limit}} classes 0 to {{last}}"
    where = input.device
    array, keep = indexing.check_targets(where.xp, place(array, where), ignore_index, classes, RangeError, message)
    return array, keep, _weights(name, input, weight, classes)


def _weights(name: str, input: Tensor, weight: Tensor | None, classes: int) -> Any:
    if weight is None:
        return None
    _check_weight(name, weight, classes)
    recorded = modes.state.enabled and input.edge is not None
    return weight.array.copy() if recorded else weight.array


@guarded_function
@positional("size_average reduce reduction")
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """-target * log(input) - (1 - target) * log(1 - input), the logarithms no less than -100; all of one shape.

    input: probabilities. weight: broadcast to the losses, which it multiplies.

    Raises: ArgumentError for shapes that differ, or an input outside [0, 1].
    """
    _check_one_shape("binary_cross_entropy", input, target)
    array = input.array
    message = "binary_cross_entropy: input holds probabilities, all between 0 and 1"
    if input.device.type == "cuda":
        indexing.check_all(input.device.xp, (array >= 0) & (array <= 1), ArgumentError, message)
    elif array.size and not (array.min() >= 0 and array.max() <= 1):
        raise ArgumentError(message)
    x, t = broadcast_pair("binary_cross_entropy", input, target)
    if weight is None:
        return apply(losses.binary_cross_entropy, (x, t), reduction=reduction)
    return reduce_losses(apply(losses.binary_cross_entropy, (x, t), reduction="none") * weight, reduction)


@guarded_function
@positional("size_average reduce reduction pos_weight")
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """binary_cross_entropy(sigmoid(input), target), without overflow; input and target of one shape.

    weight: broadcast to the losses, which it multiplies. pos_weight: broadcast to the losses, multiplies what the
    target's part costs.

    Raises: ArgumentError for shapes that differ.
    """
    name = "binary_cross_entropy_with_logits"
    _check_one_shape(name, input, target)
    x, t = broadcast_pair(name, input, target)
    positive = None
    if pos_weight is not None:
        positive = together(name, (x, pos_weight))[1].array.astype(x.array.dtype)
        try:
            fits = np.broadcast_shapes(positive.shape, x.array.shape) == x.array.shape
        except ValueError:
            fits = False
        if not fits:
            raise ShapeError(f"{name}: pos_weight {positive.shape} does not broadcast to {x.array.shape}")
        if x.array.dtype.kind == "V":
            positive = positive.astype("float32")
    if weight is None:
        return apply(losses.binary_cross_entropy_with_logits, (x, t), weight=positive, reduction=reduction)
    each = apply(losses.binary_cross_entropy_with_logits, (x, t), weight=positive, reduction="none")
    return reduce_losses(each * weight, reduction)


def _check_one_shape(name: str, input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        raise ShapeError(f"{name}: the target's size {target.shape} is not the input's {input.shape}")


@positional("size_average reduce reduction log_target", also="batchmean")
def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target * (log(target) - input): how far the probabilities `target` are from those whose logarithm is `input`.

    log_target: `target` is a logarithm too. reduction: "batchmean" is the sum over input.shape[0], the divergence as
    mathematics has it; "mean" divides by the number of elements.

    Raises: ArgumentError, ShapeError.
    """
    per_sample = reduction == "batchmean"
    reduction = "sum" if per_sample else reduction
    x, t = broadcast_pair("kl_div", input, target)
    out = apply(losses.kl_div, (x, t), log_target=log_target, reduction=reduction)
    return out / input.shape[0] if per_sample and input.ndim else out


class _Loss(FunctionModule):
    """A loss that is reduced over its elements: calls `_function` with the inputs and the settings."""

    _shown = ()

    @positional("size_average reduce reduction")
    def __init__(self, *, reduction: str = "mean") -> None:
        self._init(reduction=reduction)

    def _init(self, **settings: Any) -> None:
        weights = {name: settings.pop(name) for name in ("weight", "pos_weight") if name in settings}
        super()._init(**settings)
        for name, weight in weights.items():
            self.register_buffer(name, weight)


class CrossEntropyLoss(_Loss):
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...) of
    classes, or probabilities of the input's shape. weight: (C,).

    Raises when called: see functional.cross_entropy.
    """

    _function = staticmethod(cross_entropy)

    @positional("size_average ignore_index reduce reduction label_smoothing")
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        how: Any = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        self._init(weight=weight, **how)


class NLLLoss(_Loss):
    """-input[target], of log-probabilities. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...)."""

    _function = staticmethod(nll_loss)

    @positional("size_average ignore_index reduce reduction")
    def __init__(self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> None:
        self._init(weight=weight, ignore_index=ignore_index, reduction=reduction)


class BCELoss(_Loss):
    """-target * log(input) - (1 - target) * log(1 - input), the logarithms no less than -100. All of one shape."""

    _function = staticmethod(binary_cross_entropy)

    @positional("size_average reduce reduction")
    def __init__(self, weight: Tensor | None = None, *, reduction: str = "mean") -> None:
        self._init(weight=weight, reduction=reduction)


class BCEWithLogitsLoss(_Loss):
    """BCELoss of sigmoid(input), without overflow. weight, pos_weight: broadcast to the losses."""

    _function = staticmethod(binary_cross_entropy_with_logits)

    @positional("size_average reduce reduction pos_weight")
    def __init__(
        self, weight: Tensor | None = None, *, reduction: str = "mean", pos_weight: Tensor | None = None
    ) -> None:
        self._init(weight=weight, reduction=reduction, pos_weight=pos_weight)


class KLDivLoss(_Loss):
    """target * (log(target) - input), input being a logarithm, and with log_target the target too.

    reduction: "batchmean" (the sum over the batch size) is the divergence as mathematics has it.
    """

    _function = staticmethod(kl_div)

    @positional("size_average reduce reduction log_target")
    def __init__(self, *, reduction: str = "mean", log_target: bool = False) -> None:
        self._init(reduction=reduction, log_target=log_target)
