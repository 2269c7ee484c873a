"""Distances and similarities, and losses of them with a margin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp._tensor.operands import broadcast, floating
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.loss import Loss, parse_reduction, reduce_losses
from ddp.nn.module import Module


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


def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 - cos where target is 1, max(0, cos - margin) where it is -1. inputs: (N, d) or (d,); target: (N,) or ().

    Raises: ShapeError, ArgumentError.
    """
    reduction = parse_reduction("cosine_embedding_loss", reduction, size_average, reduce)
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


def hinge_embedding_loss(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """input where target is 1, max(0, margin - input) where it is -1. Raises: ShapeError, ArgumentError."""
    reduction = parse_reduction("hinge_embedding_loss", reduction, size_average, reduce)
    losses = (margin - input).clamp(min=0) * (target != 1) + input * (target != -1)
    return reduce_losses(losses, reduction)


def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, -target * (input1 - input2) + margin), target 1 or -1. Raises: ShapeError, ArgumentError."""
    reduction = parse_reduction("margin_ranking_loss", reduction, size_average, reduce)
    if not input1.ndim == input2.ndim == target.ndim:
        raise ShapeError(
            f"margin_ranking_loss: {input1.shape}, {input2.shape} and {target.shape} need one number of dimensions"
        )
    return reduce_losses((-target * (input1 - input2) + margin).clamp(min=0), reduction)


def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """log(1 + exp(-target * input)), target 1 or -1, without overflow. Raises: ShapeError, ArgumentError."""
    reduction = parse_reduction("soft_margin_loss", reduction, size_average, reduce)
    broadcast(input.shape, target.shape, "soft_margin_loss")
    z: Any = -target * input
    losses = z.clamp(min=0) + ((-z.abs()).exp() + 1).log()
    return reduce_losses(losses, reduction)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, distance(anchor, positive) - distance(anchor, negative) + margin), distances as in pairwise_distance.

    swap: the negative's distance is the smaller of those to anchor and positive. Raises: ShapeError, ArgumentError.
    """
    if margin <= 0:
        raise ArgumentError(f"triplet_margin_loss: margin is positive, not {margin}")
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=lambda x, y: pairwise_distance(x, y, p, eps),
        margin=margin,
        swap=swap,
        reduction=parse_reduction("triplet_margin_loss", reduction, size_average, reduce),
    )


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
    reduction = parse_reduction("triplet_margin_loss", reduction)
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise ShapeError(
            f"triplet_margin_loss: {anchor.shape}, {positive.shape} and {negative.shape} need one number of dimensions"
        )
    far = distance_function or pairwise_distance
    apart = far(anchor, negative)
    if swap:
        apart = apart.minimum(far(positive, negative))
    return reduce_losses((far(anchor, positive) - apart + margin).clamp(min=0), reduction)


class HingeEmbeddingLoss(Loss):
    """input where the target is 1, max(0, margin - input) where it is -1."""

    _function = staticmethod(hinge_embedding_loss)

    def __init__(
        self,
        margin: float = 1.0,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        self._init_loss(size_average, reduce, reduction, margin=margin)


class _MarginLoss(Loss):
    def __init__(
        self,
        margin: float = 0.0,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        self._init_loss(size_average, reduce, reduction, margin=margin)


class CosineEmbeddingLoss(_MarginLoss):
    """1 - cos(input1, input2) where the target is 1, max(0, cos - margin) where it is -1."""

    _function = staticmethod(cosine_embedding_loss)

    def forward(self, input1: Tensor, input2: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # other inputs
        """inputs: (N, d) or (d,); target: (N,) or ()."""
        return self._call(input1, input2, target)


class MarginRankingLoss(_MarginLoss):
    """max(0, -target * (input1 - input2) + margin), target 1 or -1."""

    _function = staticmethod(margin_ranking_loss)

    def forward(self, input1: Tensor, input2: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # other inputs
        """All of one shape."""
        return self._call(input1, input2, target)


class SoftMarginLoss(Loss):
    """log(1 + exp(-target * input)), target 1 or -1."""

    _function = staticmethod(soft_margin_loss)


class TripletMarginLoss(Loss):
    """max(0, distance(anchor, positive) - distance(anchor, negative) + margin), by the p-norm."""

    _function = staticmethod(triplet_margin_loss)

    def __init__(
        self,
        margin: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-6,
        swap: bool = False,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        if margin <= 0:
            raise ArgumentError(f"TripletMarginLoss: margin is positive, not {margin}")
        self._init_loss(size_average, reduce, reduction, margin=margin, p=p, eps=eps, swap=swap)

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:  # type: ignore[override]  # other inputs
        """All (N, d) or (d,)."""
        return self._call(anchor, positive, negative)


class TripletMarginWithDistanceLoss(Loss):
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
        if margin <= 0:
            raise ArgumentError(f"TripletMarginWithDistanceLoss: margin is positive, not {margin}")
        self._init(reduction=reduction, margin=margin, swap=swap)
        self.distance_function: Any = PairwiseDistance() if distance_function is None else distance_function

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:  # type: ignore[override]  # other inputs
        """All (N, d) or (d,), or what the distance takes."""
        return self._call(anchor, positive, negative)


class CosineSimilarity(Module):
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) along `dim`."""

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """x1, x2: broadcast; the result lacks `dim`."""
        return cosine_similarity(x1, x2, self.dim, self.eps)


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
