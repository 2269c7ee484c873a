"""Losses of a difference between input and target, and negative log likelihoods of numbers."""

from __future__ import annotations

import math
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.device_guard import guarded_function
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.loss import _Loss
from ddp.nn.validation import broadcast_pair, positional, reduce_losses
from ddp.ops import losses
from ddp.ops.indexing import check_all


def _difference_loss(
    op: Any, input: Tensor, target: Tensor, reduction: str, weight: Tensor | None = None, **parameters: Any
) -> Tensor:
    """The op on both, times `weight` if there is one. The op's name is the function's."""
    pair = broadcast_pair(op.name, input, target, warn=True)
    if weight is None:
        return apply(op, pair, reduction=reduction, **parameters)
    if weight.shape != input.shape:
        raise ShapeError(f"{op.name}: weight {weight.shape} and input {input.shape} need one size")
    weighted = apply(op, pair, reduction="none", **parameters) * weight
    if reduction == "mean" and op is not losses.huber_loss:  # whose mean is over the elements, as in PyTorch
        return weighted.sum() / weight.sum()
    return reduce_losses(weighted, reduction)


@positional("size_average reduce reduction weight")
def mse_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """(input - target)^2. weight: of the input's shape; the mean is then the weighted one.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    return _difference_loss(losses.mse_loss, input, target, reduction, weight)


@positional("size_average reduce reduction weight")
def l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
    """|input - target|. weight: of the input's shape; the mean is then the weighted one.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    return _difference_loss(losses.l1_loss, input, target, reduction, weight)


@positional("size_average reduce reduction beta")
def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target. A beta of 0 is l1_loss.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss: beta is not negative, got {beta}")
    if beta == 0:
        return _difference_loss(losses.l1_loss, input, target, reduction)
    return _difference_loss(losses.smooth_l1_loss, input, target, reduction, bound=beta)


@positional("")
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target. weight: of the input's shape.

    Raises: ShapeError, ArgumentError. Warns if the shapes differ, and broadcasts.
    """
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta is positive, got {delta}")
    return _difference_loss(losses.huber_loss, input, target, reduction, weight, bound=delta)


@positional("size_average eps reduce reduction")
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    *,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """-log of Poisson's probability of `target`: exp(input) - target * input, or, without `log_input`,
    input - target * log(input + eps). full: with Stirling's approximation of log(target!) where target > 1.

    Raises: ShapeError, ArgumentError.
    """
    x, t = broadcast_pair("poisson_nll_loss", input, target)
    losses = x.exp() - t * x if log_input else x - t * (x + eps).log()
    if full:
        large = t > 1
        n = t * large + ~large  # 1 where there is nothing to add, so that no logarithm of 0 is multiplied away
        losses = losses + (n * n.log() - n + 0.5 * (2 * math.pi * n).log()) * large
    return reduce_losses(losses, reduction)


@guarded_function
@positional("")
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
    spread: Any = input.new_full(input.shape, var) if isinstance(var, int | float) else var
    message = "gaussian_nll_loss: var has a negative entry"
    check_all(spread.device.xp, ~(spread.array < 0), ArgumentError, message)
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
    return reduce_losses(losses, reduction)


class MSELoss(_Loss):
    """(input - target)^2. input, target: of one shape."""

    _function = staticmethod(mse_loss)


class L1Loss(_Loss):
    """|input - target|. input, target: of one shape."""

    _function = staticmethod(l1_loss)


class SmoothL1Loss(_Loss):
    """d^2 / (2 * beta) where |d| < beta, else |d| - beta / 2, d = input - target."""

    _function = staticmethod(smooth_l1_loss)

    @positional("size_average reduce reduction beta")
    def __init__(self, *, reduction: str = "mean", beta: float = 1.0) -> None:
        self._init(reduction=reduction, beta=beta)


class HuberLoss(_Loss):
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target."""

    _function = staticmethod(huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        self._init(reduction=reduction, delta=delta)


class PoissonNLLLoss(_Loss):
    """-log of Poisson's probability of the target, whose rate, or its logarithm (log_input), is the input."""

    _function = staticmethod(poisson_nll_loss)

    @positional("size_average eps reduce reduction")
    def __init__(
        self, log_input: bool = True, full: bool = False, *, eps: float = 1e-8, reduction: str = "mean"
    ) -> None:
        self._init(log_input=log_input, full=full, eps=eps, reduction=reduction)


class GaussianNLLLoss(_Loss):
    """(log(var) + (input - target)^2 / var) / 2; full: with log(2 * pi) / 2. var is no less than eps.

    input, target: of one shape; var: a number, of that shape, or with its last dimension missing or 1.
    """

    _function = staticmethod(gaussian_nll_loss)

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        self._init(full=full, eps=eps, reduction=reduction)
