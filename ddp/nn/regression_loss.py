"""Losses of a difference between input and target, and negative log likelihoods of numbers."""

from __future__ import annotations

import math
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.watching import placed_by_any
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.loss import Loss, paired, parsed, reduced
from ddp.ops import distance
from ddp.ops.demands import demand


def _weighted(name: str, op: Any, input: Tensor, pair: Any, weight: Tensor, **parameters: Any) -> Any:
    if weight.shape != input.shape:
        raise ShapeError(f"{name}: weight {weight.shape} and input {input.shape} need one size")
    return apply(op, pair, reduction="none", **parameters) * weight


def _mean_by_weight(losses: Any, weight: Tensor, reduction: str) -> Tensor:
    return losses.sum() / weight.sum() if reduction == "mean" else reduced(losses, reduction)


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)^2. weight: of the input's shape; the mean is then the weighted one.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    reduction = parsed("mse_loss", reduction, size_average, reduce)
    pair = paired("mse_loss", input, target, warn=True)
    if weight is None:
        return apply(distance.mse_loss, pair, reduction=reduction)
    return _mean_by_weight(_weighted("mse_loss", distance.mse_loss, input, pair, weight), weight, reduction)


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|input - target|. weight: of the input's shape; the mean is then the weighted one.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    reduction = parsed("l1_loss", reduction, size_average, reduce)
    pair = paired("l1_loss", input, target, warn=True)
    if weight is None:
        return apply(distance.l1_loss, pair, reduction=reduction)
    return _mean_by_weight(_weighted("l1_loss", distance.l1_loss, input, pair, weight), weight, reduction)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target. A beta of 0 is l1_loss.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    reduction = parsed("smooth_l1_loss", reduction, size_average, reduce)
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss: beta is not negative, got {beta}")
    pair = paired("smooth_l1_loss", input, target, warn=True)
    if beta == 0:
        return apply(distance.l1_loss, pair, reduction=reduction)
    return apply(distance.smooth_l1_loss, pair, reduction=reduction, bound=beta)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target. weight: of the input's shape.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    reduction = parsed("huber_loss", reduction)
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta is positive, got {delta}")
    pair = paired("huber_loss", input, target, warn=True)
    if weight is None:
        return apply(distance.huber_loss, pair, reduction=reduction, bound=delta)
    # The mean is over the elements here, not over the weights, as in PyTorch.
    return reduced(_weighted("huber_loss", distance.huber_loss, input, pair, weight, bound=delta), reduction)


def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: float = 1e-8,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-log of Poisson's probability of `target`: exp(input) - target * input, or, without `log_input`,
    input - target * log(input + eps). full: with Stirling's approximation of log(target!) where target > 1.

    Raises: ShapeError, ArgumentError.
    """
    reduction = parsed("poisson_nll_loss", reduction, size_average, reduce)
    x, t = paired("poisson_nll_loss", input, target)
    losses = x.exp() - t * x if log_input else x - t * (x + eps).log()
    if full:
        large = t > 1
        n = t * large + ~large  # 1 where there is nothing to add, so that no logarithm of 0 is multiplied away
        losses = losses + (n * n.log() - n + 0.5 * (2 * math.pi * n).log()) * large
    return reduced(losses, reduction)


@placed_by_any
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """(log(var) + (input - target)^2 / var) / 2: -log of the normal density of `target` around `input`.

    var: a number, or of the input's shape, or with its last dimension missing or of size 1; no less than eps, which
    its gradient does not see. full: with log(2 * pi) / 2.

    Raises: ArgumentError for a negative variance; ShapeError.
    """
    reduction = parsed("gaussian_nll_loss", reduction)
    spread: Any = input.new_full(input.shape, var) if isinstance(var, int | float) else var
    told = "gaussian_nll_loss: var has a negative entry"
    demand(spread.device.xp, ~(spread.array < 0), ArgumentError, told)
    if spread.shape != input.shape:
        other = [m for m, n in zip(input.shape, spread.shape, strict=False) if m != n]
        if input.shape[:-1] == spread.shape:
            spread = spread.unsqueeze(-1)
        elif spread.ndim != input.ndim or len(other) > 1:
            raise ShapeError(f"gaussian_nll_loss: var {spread.shape} does not fit input {input.shape}")
    low = spread.detach() < eps
    spread = spread + (eps - spread.detach()) * low
    losses = 0.5 * (spread.log() + (input - target) ** 2 / spread)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return reduced(losses, reduction)


class MSELoss(Loss):
    """(input - target)^2. input, target: of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return mse_loss(input, target, reduction=self.reduction)


class L1Loss(Loss):
    """|input - target|. input, target: of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return l1_loss(input, target, reduction=self.reduction)


class SmoothL1Loss(Loss):
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        beta: float = 1.0,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.beta = beta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)


class HuberLoss(Loss):
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        self.delta = delta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return huber_loss(input, target, self.reduction, self.delta)


class PoissonNLLLoss(Loss):
    """-log of Poisson's probability of the target, whose rate, or its logarithm (log_input), is the input."""

    def __init__(
        self,
        log_input: bool = True,
        full: bool = False,
        size_average: bool | None = None,
        eps: float = 1e-8,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.log_input = log_input
        self.full = full
        self.eps = eps

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return poisson_nll_loss(input, target, self.log_input, self.full, eps=self.eps, reduction=self.reduction)


class GaussianNLLLoss(Loss):
    """(log(var) + (input - target)^2 / var) / 2; full: with log(2 * pi) / 2. var is no less than eps."""

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.full = full
        self.eps = eps

    def forward(self, input: Tensor, target: Tensor, var: Tensor | float) -> Tensor:
        """input, target: of one shape; var: a number, of that shape, or with its last dimension missing or 1."""
        return gaussian_nll_loss(input, target, var, self.full, self.eps, self.reduction)
