"""Losses, and distances.

All losses take reduction="mean", "sum" or "none", and kl_div also "batchmean". Where PyTorch has the deprecated
size_average and reduce, these are accepted, too. On a GPU, an error that depends on the numbers in a tensor is raised
by the next call that waits for the GPU.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from ddp._device import to_device
from ddp._engine import modes
from ddp._tensor.base import apply, copy_if_needed, guarded_function, to_common_device
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import is_float, promote
from ddp._tensor.operands import broadcast, convert, floating
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.nn.module import FunctionModule, Module
from ddp.ops import indexing, losses

F = TypeVar("F", bound=Callable[..., Any])


def _positional(names: str, also: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Lets a loss take the arguments `names` by position, after the ones that it declares positional.

    `names` may have the deprecated size_average and reduce, which the decorator turns into a `reduction`. A call raises
    ArgumentError unless its `reduction` is "mean", "sum", "none" or in `also`, and TypeError for too many arguments.
    """
    order = names.split()

    def decorate(function: F) -> F:
        name = function.__name__
        count = function.__code__.co_argcount
        declared = inspect.signature(function).parameters
        first = [*list(declared)[:count], *order]
        reduction_index = first.index("reduction") if "reduction" in first[:count] else count

        @functools.wraps(function)
        def inner(*args: Any, **named: Any) -> Any:
            if len(args) > count:
                if len(args) > len(first):
                    raise TypeError(f"{name}: at most {len(first)} positional arguments, got {len(args)}")
                named.update(zip(order, args[count:], strict=False))
                args = args[:count]
            if "size_average" in named or "reduce" in named:
                named = _with_reduction(name, **named)
            word = args[reduction_index] if len(args) > reduction_index else named.get("reduction", "mean")
            if word not in ("mean", "sum", "none", *also):
                raise ArgumentError(f"{name}: reduction is 'mean', 'sum' or 'none', not {word!r}")
            return function(*args, **named)

        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            declared[key].replace(kind=positional)
            if key in declared
            else inspect.Parameter(key, positional, default=None)
            for key in first
        ]
        parameters += [p for p in declared.values() if p.kind is keyword and p.name not in first]
        cast(Any, inner).__signature__ = inspect.Signature(parameters)
        return cast(F, inner)

    return decorate


def _with_reduction(name: str, size_average: Any = None, reduce: Any = None, **named: Any) -> dict[str, Any]:
    """Returns `named`. If size_average or reduce is set, warns, and sets the `reduction` that they stand for."""
    if size_average is None and reduce is None:
        return named
    mean = size_average is None or size_average
    reduced = reduce is None or reduce
    word = "none"
    if reduced:
        word = "mean" if mean else "sum"
    warnings.warn(f"{name}: size_average and reduce are deprecated, use reduction={word!r}", stacklevel=3)
    return {**named, "reduction": word}


def _reduce_losses(losses: Any, reduction: str) -> Any:
    """Returns the mean or the sum of the losses, or the losses themselves."""
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def _broadcast_pair(name: str, input: Tensor, target: Tensor, warn: bool = False) -> tuple[Any, Any]:
    """Broadcasts two tensors to one shape, in one floating dtype. warn: whether to warn if the shapes differ.

    Raises: ShapeError if they do not broadcast.
    """
    a = input.array
    b = target.array
    x: Any = input
    y: Any = target
    if a.dtype != b.dtype:
        dtype = promote(a.dtype, a.ndim, b.dtype, b.ndim)
        x = convert(input, dtype)
        y = convert(target, dtype)
    if a.shape != b.shape:
        if warn:
            warnings.warn(
                f"{name}: the target's size {b.shape} is different to the input's {a.shape}: they are broadcast, "
                "which is rarely what is meant; give them one size",
                stacklevel=5,
            )
        broadcast(a.shape, b.shape, name)
        shape = np.broadcast_shapes(a.shape, b.shape)
        x = x.expand(shape)
        y = y.expand(shape)
    return floating(x), floating(y)


@_positional("size_average ignore_index reduce reduction label_smoothing")
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

    target: integers: class numbers in [0, C), or `ignore_index` where there is no loss; floating, of the input's shape:
    the probability of each class. weight: (C,), one for each class; for class numbers, the mean is weighted, too.
    label_smoothing: in [0, 1], how much of the target is spread evenly over the classes. reduction: "mean", "sum" or
    "none" (of the shape (), (N,) or (N, ...)).

    Raises: ShapeError; DtypeError for a target that is neither floating nor integers; ArgumentError for a
    label_smoothing outside [0, 1], another reduction, or an ignore_index of at least 0 with probabilities; RangeError
    for a target out of range, which the message names.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing is in [0, 1], not {label_smoothing}")
    if is_float(target.array.dtype):
        return _soft_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    if input.array.ndim == 1 and target.array.ndim == 0:
        options: Any = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        loss = cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, **options)
        return loss.squeeze(0) if reduction == "none" else loss
    classes, keep, weights = _check_classes("cross_entropy", input, target, weight, ignore_index)
    if classes is target.array:
        classes = copy_if_needed(classes, input)
    return apply(
        losses.cross_entropy,
        (floating(input),),
        target=classes,
        keep=keep,
        weight=weights,
        smoothing=label_smoothing,
        reduction=reduction,
        float32_loss=modes.state.autocast is not None and modes.state.autocast.spares(losses.cross_entropy, input),
    )


def _soft_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, smoothing: float
) -> Tensor:
    if input.shape != target.shape or not input.ndim:
        raise ShapeError(f"cross_entropy: input {input.shape}, target {target.shape}: probabilities need one shape")
    if ignore_index >= 0:
        raise ArgumentError("cross_entropy: ignore_index is for class numbers, not for probabilities")
    if input.ndim == 1:
        loss = _soft_cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, ignore_index, reduction, smoothing)
        return loss.squeeze(0) if reduction == "none" else loss
    x, probabilities = _broadcast_pair("cross_entropy", input, target)
    classes = input.shape[1]
    if smoothing:
        probabilities = probabilities * (1 - smoothing) + smoothing / classes
    if weight is not None:
        _check_weight("cross_entropy", weight, classes)
        probabilities = probabilities * weight.to(dtype=probabilities.dtype).reshape([classes, *[1] * (input.ndim - 2)])
    return apply(losses.soft_cross_entropy, (x, probabilities), reduction=reduction)


@_positional("size_average ignore_index reduce reduction")
def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-input[target]. input: logarithms of probabilities; target: class numbers. Otherwise as in cross_entropy.

    Raises: ShapeError; DtypeError unless target holds integers; ArgumentError for another reduction; RangeError for a
    target out of range, which the message names.
    """
    if input.ndim == 1 and target.ndim == 0:
        rows = input.unsqueeze(0), target.unsqueeze(0)
        loss = nll_loss(*rows, weight, ignore_index=ignore_index, reduction=reduction)
        return loss.squeeze(0) if reduction == "none" else loss
    classes, keep, weights = _check_classes("nll_loss", input, target, weight, ignore_index)
    return apply(losses.nll_loss, (floating(input),), target=classes, keep=keep, weight=weights, reduction=reduction)


def _check_weight(name: str, weight: Tensor, classes: int) -> None:
    if weight.shape != (classes,):
        raise ShapeError(f"{name}: weight {weight.shape}: expected ({classes},), one for each class")


@guarded_function
def _check_classes(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Any, ...]:
    """Returns the targets as int64, a mask of the ones to keep, and the weight of each class.

    The mask may be None if all are kept. The weights are None if none are given.
    """
    x = input.array
    array = target.array
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name}: target holds class numbers (int64), not {array.dtype}")
    if x.ndim < 2 or array.shape != (x.shape[0], *x.shape[2:]):
        raise ShapeError(f"{name}: input {x.shape}, target {array.shape}: expected (N, C, ...), (N, ...)")
    classes = x.shape[1]
    if array.dtype != "int64":
        array = array.astype("int64")
    message = f"{name}: target {{value}} is not one of the {{limit}} classes 0 to {{last}}"
    device = input.device
    array, keep = indexing.check_targets(
        device.xp, to_device(array, device), ignore_index, classes, RangeError, message
    )
    return array, keep, _weights(name, input, weight, classes)


def _weights(name: str, input: Tensor, weight: Tensor | None, classes: int) -> Any:
    if weight is None:
        return None
    _check_weight(name, weight, classes)
    recorded = modes.state.enabled and input.edge is not None
    return weight.array.copy() if recorded else weight.array


@guarded_function
@_positional("size_average reduce reduction")
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """-target * log(input) - (1 - target) * log(1 - input), with logarithms clamped to at least -100.

    input: probabilities; target: of the input's shape. weight: multiplies the losses, broadcast to their shape.

    Raises: ShapeError for shapes that differ; ArgumentError for an input outside [0, 1], or another reduction.
    """
    _check_one_shape("binary_cross_entropy", input, target)
    array = input.array
    message = "binary_cross_entropy: input holds probabilities, all between 0 and 1"
    if input.device.type == "cuda":
        indexing.check_all(input.device.xp, (array >= 0) & (array <= 1), ArgumentError, message)
    elif array.size and not (array.min() >= 0 and array.max() <= 1):
        raise ArgumentError(message)
    x, t = _broadcast_pair("binary_cross_entropy", input, target)
    if weight is None:
        return apply(losses.binary_cross_entropy, (x, t), reduction=reduction)
    return _reduce_losses(apply(losses.binary_cross_entropy, (x, t), reduction="none") * weight, reduction)


@guarded_function
@_positional("size_average reduce reduction pos_weight")
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """binary_cross_entropy(sigmoid(input), target), without overflow; input and target of one shape.

    weight: multiplies the losses, broadcast to their shape. pos_weight: multiplies the term
    target * log(sigmoid(input)) of the losses, broadcast to their shape.

    Raises: ShapeError for shapes that differ, or a pos_weight that does not broadcast; ArgumentError for another
    reduction.
    """
    name = "binary_cross_entropy_with_logits"
    _check_one_shape(name, input, target)
    x, t = _broadcast_pair(name, input, target)
    positive = None
    if pos_weight is not None:
        positive = to_common_device(name, (x, pos_weight))[1].array.astype(x.array.dtype)
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
    element_losses = apply(losses.binary_cross_entropy_with_logits, (x, t), weight=positive, reduction="none")
    return _reduce_losses(element_losses * weight, reduction)


def _check_one_shape(name: str, input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        raise ShapeError(f"{name}: the target's size {target.shape} is not the input's {input.shape}")


@_positional("size_average reduce reduction log_target", also=("batchmean",))
def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target * (log(target) - input): the divergence of the probabilities `target` from exp(input).

    log_target: `target` is a logarithm, too. reduction: "batchmean" divides the sum by input.shape[0], as in the
    mathematical definition; "mean" divides it by the number of elements.

    Raises: ArgumentError, ShapeError.
    """
    per_sample = reduction == "batchmean"
    reduction = "sum" if per_sample else reduction
    x, t = _broadcast_pair("kl_div", input, target)
    out = apply(losses.kl_div, (x, t), log_target=log_target, reduction=reduction)
    return out / input.shape[0] if per_sample and input.ndim else out


def _difference_loss(
    op: Any, input: Tensor, target: Tensor, reduction: str, weight: Tensor | None = None, **parameters: Any
) -> Tensor:
    """Applies a loss op, and multiplies by `weight` if there is one. The op has the name of the loss function."""
    pair = _broadcast_pair(op.name, input, target, warn=True)
    if weight is None:
        return apply(op, pair, reduction=reduction, **parameters)
    if weight.shape != input.shape:
        raise ShapeError(f"{op.name}: weight {weight.shape} and input {input.shape} need one size")
    weighted = apply(op, pair, reduction="none", **parameters) * weight
    if reduction == "mean" and op is not losses.huber_loss:  # huber_loss's mean is not weighted, as in PyTorch
        return weighted.sum() / weight.sum()
    return _reduce_losses(weighted, reduction)


@_positional("size_average reduce reduction weight")
def mse_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """(input - target)^2. weight: of the input's shape; the mean is then weighted.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    return _difference_loss(losses.mse_loss, input, target, reduction, weight)


@_positional("size_average reduce reduction weight")
def l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """|input - target|. weight: of the input's shape; the mean is then weighted.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    return _difference_loss(losses.l1_loss, input, target, reduction, weight)


@_positional("size_average reduce reduction beta")
def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target. A beta of 0 is l1_loss.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss: beta is not negative, got {beta}")
    if beta == 0:
        return _difference_loss(losses.l1_loss, input, target, reduction)
    return _difference_loss(losses.smooth_l1_loss, input, target, reduction, bound=beta)


@_positional("")
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target.

    weight: of the input's shape; multiplies the losses. "mean" divides their sum by their number.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta is positive, got {delta}")
    return _difference_loss(losses.huber_loss, input, target, reduction, weight, bound=delta)


@_positional("size_average eps reduce reduction")
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    *,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """-log of Poisson's probability of `target`, without its constant log(target!): exp(input) - target * input; if
    `log_input` is False, input - target * log(input + eps).

    full: adds Stirling's approximation of log(target!) where target > 1.

    Raises: ShapeError, ArgumentError.
    """
    x, t = _broadcast_pair("poisson_nll_loss", input, target)
    element_losses = x.exp() - t * x if log_input else x - t * (x + eps).log()
    if full:
        large = t > 1
        n = t * large + ~large  # 1 where nothing is added, because 0 * log(0) would be nan
        element_losses = element_losses + (n * n.log() - n + 0.5 * (2 * math.pi * n).log()) * large
    return _reduce_losses(element_losses, reduction)


@guarded_function
@_positional("")
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """(log(var) + (input - target)^2 / var) / 2: -log of the normal density of `target` around `input`.

    var: a number, or a tensor of the input's shape. Its last dimension may be missing, or one dimension may have
    size 1. It is clamped to at least eps; backward ignores the clamp. full: adds log(2 * pi) / 2.

    Raises: ArgumentError for a negative variance, or another reduction; ShapeError.
    """
    variance: Any = input.new_full(input.shape, var) if isinstance(var, int | float) else var
    message = "gaussian_nll_loss: var has a negative entry"
    indexing.check_all(variance.device.xp, ~(variance.array < 0), ArgumentError, message)
    if variance.shape != input.shape:
        unequal = [n for m, n in zip(input.shape, variance.shape, strict=False) if m != n]
        if input.shape[:-1] == variance.shape:
            variance = variance.unsqueeze(-1)
        elif variance.ndim != input.ndim or unequal != [1]:
            raise ShapeError(f"gaussian_nll_loss: var {variance.shape} does not fit input {input.shape}")
    low = variance.detach() < eps
    variance = variance + (eps - variance.detach()) * low
    element_losses = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    if full:
        element_losses = element_losses + 0.5 * math.log(2 * math.pi)
    return _reduce_losses(element_losses, reduction)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The p-norm of x1 - x2 + eps over the last dimension. x1, x2: (..., d), broadcast. Raises: ShapeError."""
    return (x1 - x2 + eps).norm(p, -1, keepdim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) along `dim`; x1, x2 broadcast.

    Raises: ShapeError, RangeError.
    """
    broadcast(x1.shape, x2.shape, "cosine_similarity")
    a: Any = floating(x1)
    b: Any = floating(x2)
    if a.shape != b.shape:
        shape = np.broadcast_shapes(a.shape, b.shape)
        a = a.expand(shape)
        b = b.expand(shape)
    return (a * b).sum(dim) / (_at_least(a.norm(2, dim), eps) * _at_least(b.norm(2, dim), eps))


def _at_least(length: Any, eps: float) -> Any:
    """max(length, eps). As in PyTorch, `length` gets the gradient unchanged, even where eps is larger."""
    value = length.detach()
    return length + (value.clamp(min=eps) - value)


@_positional("size_average reduce reduction")
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *, reduction: str = "mean"
) -> Tensor:
    """1 - cos where target is 1, max(0, cos - margin) where it is -1. inputs: (N, d) or (d,); target: (N,) or ().

    Raises: ShapeError, ArgumentError.
    """
    if target.ndim not in (0, 1) or input1.ndim != target.ndim + 1 or input2.ndim != target.ndim + 1:
        raise ShapeError(
            f"cosine_embedding_loss: inputs {input1.shape} and {input2.shape}, target {target.shape}: expected (N, d) "
            "and (N,), or (d,) and ()"
        )
    x: Any = floating(input1)
    y: Any = floating(input2)
    # Adds a small number to the squares, as PyTorch does, instead of clamping the lengths.
    lengths = ((x * x).sum(-1) + 1e-12) * ((y * y).sum(-1) + 1e-12)
    cosine = (x * y).sum(-1) / lengths.sqrt()
    sample_losses = (1 - cosine) * (target == 1) + (cosine - margin).clamp(min=0) * (target == -1)
    return _reduce_losses(sample_losses, reduction)


@_positional("size_average reduce reduction")
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, *, reduction: str = "mean") -> Tensor:
    """input where target is 1, max(0, margin - input) where it is -1. Raises: ShapeError, ArgumentError."""
    element_losses = (margin - input).clamp(min=0) * (target != 1) + input * (target != -1)
    return _reduce_losses(element_losses, reduction)


@_positional("size_average reduce reduction")
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *, reduction: str = "mean"
) -> Tensor:
    """max(0, -target * (input1 - input2) + margin), target 1 or -1. Raises: ShapeError, ArgumentError."""
    if not input1.ndim == input2.ndim == target.ndim:
        raise ShapeError(
            f"margin_ranking_loss: {input1.shape}, {input2.shape} and {target.shape} need one number of dimensions"
        )
    return _reduce_losses((-target * (input1 - input2) + margin).clamp(min=0), reduction)


@_positional("size_average reduce reduction")
def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-target * input)), target 1 or -1, without overflow. Raises: ShapeError, ArgumentError."""
    z: Any = -target * input
    element_losses = z.clamp(min=0) + ((-z.abs()).exp() + 1).log()
    return _reduce_losses(element_losses, reduction)


@_positional("size_average reduce reduction")
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    *,
    reduction: str = "mean",
) -> Tensor:
    """max(0, distance(anchor, positive) - distance(anchor, negative) + margin), distances as in pairwise_distance.

    swap: the distance of negative is the smaller of its distances to anchor and to positive.
    Raises: ShapeError, ArgumentError.
    """
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=lambda x, y: pairwise_distance(x, y, p, eps),
        margin=margin,
        swap=swap,
        reduction=reduction,
    )


@_positional("")
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """triplet_margin_loss with `distance_function`, by default pairwise_distance. Raises: ShapeError, ArgumentError."""
    if margin <= 0:
        raise ArgumentError(f"triplet_margin_loss: margin is positive, not {margin}")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise ShapeError(
            f"triplet_margin_loss: {anchor.shape}, {positive.shape} and {negative.shape} need one number of dimensions"
        )
    far = distance_function or pairwise_distance
    separation = far(anchor, negative)
    if swap:
        separation = separation.minimum(far(positive, negative))
    return _reduce_losses((far(anchor, positive) - separation + margin).clamp(min=0), reduction)


class _Loss(FunctionModule):
    """The base of losses. weight and pos_weight are buffers; the other settings are attributes."""

    _inputs = 2
    extra_repr = Module.extra_repr

    def _init(self, **settings: Any) -> None:
        settings = _with_reduction(type(self).__name__, **{"reduction": "mean", **settings})
        weights = {name: settings.pop(name) for name in ("weight", "pos_weight") if name in settings}
        super()._init(**settings)
        self._settings += tuple(weights)
        for name, weight in weights.items():
            self.register_buffer(name, weight)


class CrossEntropyLoss(_Loss, function=cross_entropy):
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...) of
    classes, or probabilities of the input's shape. weight: (C,).

    Raises when called: see functional.cross_entropy.
    """


class NLLLoss(_Loss, function=nll_loss):
    """-input[target]. input: log-probabilities, (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...)."""


class BCELoss(_Loss, function=binary_cross_entropy):
    """-target * log(input) - (1 - target) * log(1 - input), with logarithms clamped to at least -100.

    input, target: of one shape.
    """


class BCEWithLogitsLoss(_Loss, function=binary_cross_entropy_with_logits):
    """BCELoss of sigmoid(input), without overflow. weight, pos_weight: broadcast to the shape of the losses."""


class KLDivLoss(_Loss, function=kl_div):
    """target * (log(target) - input). The input is a logarithm; with log_target, the target is one, too.

    reduction: "batchmean" divides the sum by the batch size, as in the mathematical definition.
    """


class MSELoss(_Loss, function=mse_loss, omitted=("weight",)):
    """(input - target)^2. input, target: of one shape."""


class L1Loss(_Loss, function=l1_loss, omitted=("weight",)):
    """|input - target|. input, target: of one shape."""


class SmoothL1Loss(_Loss, function=smooth_l1_loss):
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target."""


class HuberLoss(_Loss, function=huber_loss, omitted=("weight",)):
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target."""


class PoissonNLLLoss(_Loss, function=poisson_nll_loss):
    """-log of Poisson's probability of target, up to a constant. input: the rate, or with log_input its logarithm."""


class GaussianNLLLoss(_Loss, function=gaussian_nll_loss, inputs=3):
    """(log(var) + (input - target)^2 / var) / 2; full: adds log(2 * pi) / 2. var is clamped to at least eps.

    input, target: of one shape; var: as in functional.gaussian_nll_loss.
    """


class HingeEmbeddingLoss(_Loss, function=hinge_embedding_loss):
    """input where the target is 1, max(0, margin - input) where it is -1."""


class CosineEmbeddingLoss(_Loss, function=cosine_embedding_loss, inputs=3):
    """1 - cos(input1, input2) where the target is 1, max(0, cos - margin) where it is -1.

    input1, input2: (N, d) or (d,); target: (N,) or ().
    """


class MarginRankingLoss(_Loss, function=margin_ranking_loss, inputs=3):
    """max(0, -target * (input1 - input2) + margin), target 1 or -1. input1, input2, target: of one shape."""


class SoftMarginLoss(_Loss, function=soft_margin_loss):
    """log(1 + exp(-target * input)), target 1 or -1."""


class TripletMarginLoss(_Loss, function=triplet_margin_loss, inputs=3):
    """max(0, distance(anchor, positive) - distance(anchor, negative) + margin), by the p-norm.

    anchor, positive, negative: (N, d) or (d,).
    """


class TripletMarginWithDistanceLoss(_Loss, function=triplet_margin_with_distance_loss, inputs=3):
    """TripletMarginLoss with `distance_function`, by default PairwiseDistance."""

    def _init(self, **settings: Any) -> None:
        distance = settings["distance_function"]
        super()._init(**{**settings, "distance_function": PairwiseDistance() if distance is None else distance})


class CosineSimilarity(FunctionModule, function=cosine_similarity, inputs=2):
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) along `dim`, which the result lacks. x1, x2: broadcast."""

    extra_repr = Module.extra_repr


class PairwiseDistance(Module):
    """The p-norm of x1 - x2 + eps over the last dimension."""

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> None:
        super().__init__()
        self.norm = p
        self.eps = eps
        self.keepdim = keepdim

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """x1, x2: (..., d), broadcast; returns (...), or (..., 1) with keepdim."""
        return pairwise_distance(x1, x2, self.norm, self.eps, self.keepdim)
