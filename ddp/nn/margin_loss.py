"""Distances and similarities, and losses of them with a margin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp._tensor.operands import broadcast, floating
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.loss import _Loss
from ddp.nn.module import FunctionModule, Module
from ddp.nn.validation import positional, reduce_losses


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The p-norm of x1 - x2 + eps over the last dimension. x1, x2: (..., d), broadcast. Raises: ShapeError."""
    broadcast(x1.shape, x2.shape, "pairwise_distance")
    return (x1 - x2 + eps).norm(p, -1, keepdim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) along `dim`; both broadcast. Raises: ShapeError, RangeError."""
    broadcast(x1.shape, x2.shape, "cosine_similarity")
    a: Any = floating(x1)
    b: Any = floating(x2)
    if a.shape != b.shape:
        shape = np.broadcast_shapes(a.shape, b.shape)
        a, b = a.expand(shape), b.expand(shape)
    return (a * b).sum(dim) / (_at_least(a.norm(2, dim), eps) * _at_least(b.norm(2, dim), eps))


def _at_least(length: Any, eps: float) -> Any:
    """max(length, eps), which the gradient does not see, as in PyTorch."""
    value = length.detach()
    return length + (value.clamp(min=eps) - value)


@positional("size_average reduce reduction")
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
    # A small number in the squares, as in PyTorch, rather than a smallest length.
    lengths = ((x * x).sum(-1) + 1e-12) * ((y * y).sum(-1) + 1e-12)
    cosine = (x * y).sum(-1) / lengths.sqrt()
    losses = (1 - cosine) * (target == 1) + (cosine - margin).clamp(min=0) * (target == -1)
    return reduce_losses(losses, reduction)


@positional("size_average reduce reduction")
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, *, reduction: str = "mean") -> Tensor:
    """input where target is 1, max(0, margin - input) where it is -1. Raises: ShapeError, ArgumentError."""
    losses = (margin - input).clamp(min=0) * (target != 1) + input * (target != -1)
    return reduce_losses(losses, reduction)


@positional("size_average reduce reduction")
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *, reduction: str = "mean"
) -> Tensor:
    """max(0, -target * (input1 - input2) + margin), target 1 or -1. Raises: ShapeError, ArgumentError."""
    if not input1.ndim == input2.ndim == target.ndim:
        raise ShapeError(
            f"margin_ranking_loss: {input1.shape}, {input2.shape} and {target.shape} need one number of dimensions"
        )
    return reduce_losses((-target * (input1 - input2) + margin).clamp(min=0), reduction)


@positional("size_average reduce reduction")
def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-target * input)), target 1 or -1, without overflow. Raises: ShapeError, ArgumentError."""
    broadcast(input.shape, target.shape, "soft_margin_loss")
    z: Any = -target * input
    losses = z.clamp(min=0) + ((-z.abs()).exp() + 1).log()
    return reduce_losses(losses, reduction)


@positional("size_average reduce reduction")
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

    swap: the negative's distance is the smaller of those to anchor and positive. Raises: ShapeError, ArgumentError.
    """
    _check_margin("triplet_margin_loss", margin)
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=lambda x, y: pairwise_distance(x, y, p, eps),
        margin=margin,
        swap=swap,
        reduction=reduction,
    )


def _check_margin(name: str, margin: float) -> None:
    if margin <= 0:
        raise ArgumentError(f"{name}: margin is positive, not {margin}")


@positional("")
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
    """triplet_margin_loss by any distance, pairwise_distance if none is given. Raises: ShapeError, ArgumentError."""
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise ShapeError(
            f"triplet_margin_loss: {anchor.shape}, {positive.shape} and {negative.shape} need one number of dimensions"
        )
    far = distance_function or pairwise_distance
    separation = far(anchor, negative)
    if swap:
        separation = separation.minimum(far(positive, negative))
    return reduce_losses((far(anchor, positive) - separation + margin).clamp(min=0), reduction)


class HingeEmbeddingLoss(_Loss):
    """input where the target is 1, max(0, margin - input) where it is -1."""

    _function = staticmethod(hinge_embedding_loss)

    @positional("size_average reduce reduction")
    def __init__(self, margin: float = 1.0, *, reduction: str = "mean") -> None:
        self._init(margin=margin, reduction=reduction)


class _MarginLoss(_Loss):
    @positional("size_average reduce reduction")
    def __init__(self, margin: float = 0.0, *, reduction: str = "mean") -> None:
        self._init(margin=margin, reduction=reduction)


class CosineEmbeddingLoss(_MarginLoss):
    """1 - cos(input1, input2) where the target is 1, max(0, cos - margin) where it is -1.

    input1, input2: (N, d) or (d,); target: (N,) or ().
    """

    _function = staticmethod(cosine_embedding_loss)


class MarginRankingLoss(_MarginLoss):
    """max(0, -target * (input1 - input2) + margin), target 1 or -1. input1, input2, target: of one shape."""

    _function = staticmethod(margin_ranking_loss)


class SoftMarginLoss(_Loss):
    """log(1 + exp(-target * input)), target 1 or -1."""

    _function = staticmethod(soft_margin_loss)


class TripletMarginLoss(_Loss):
    """max(0, distance(anchor, positive) - distance(anchor, negative) + margin), by the p-norm.

    anchor, positive, negative: (N, d) or (d,).
    """

    _function = staticmethod(triplet_margin_loss)

    @positional("size_average reduce reduction")
    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, *, reduction: str = "mean"
    ) -> None:
        _check_margin("TripletMarginLoss", margin)
        self._init(margin=margin, p=p, eps=eps, swap=swap, reduction=reduction)


class TripletMarginWithDistanceLoss(_Loss):
    """TripletMarginLoss by any distance, pairwise_distance if none is given."""

    _function = staticmethod(triplet_margin_with_distance_loss)

    def __init__(
        self,
        *,
        distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
        margin: float = 1.0,
        swap: bool = False,
        reduction: str = "mean",
    ) -> None:
        _check_margin("TripletMarginWithDistanceLoss", margin)
        self._init(margin=margin, swap=swap, reduction=reduction)
        self.distance_function: Any = PairwiseDistance() if distance_function is None else distance_function


class CosineSimilarity(FunctionModule):
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) along `dim`. x1, x2: broadcast; the result lacks `dim`."""

    _function = staticmethod(cosine_similarity)
    _shown = ()

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        self._init(dim=dim, eps=eps)


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
