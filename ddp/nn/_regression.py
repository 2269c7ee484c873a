"""Losses of numbers, and of densities, as modules."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._loss import Loss


class MSELoss(Loss):
    """(input - target)^2. input, target: of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return functional.mse_loss(input, target, reduction=self.reduction)


class L1Loss(Loss):
    """|input - target|. input, target: of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return functional.l1_loss(input, target, reduction=self.reduction)


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
        return functional.smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)


class HuberLoss(Loss):
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), d = input - target."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        self.delta = delta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return functional.huber_loss(input, target, self.reduction, self.delta)


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
        return functional.poisson_nll_loss(
            input, target, self.log_input, self.full, eps=self.eps, reduction=self.reduction
        )


class GaussianNLLLoss(Loss):
    """(log(var) + (input - target)^2 / var) / 2; full: with log(2 * pi) / 2. var is no less than eps."""

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.full = full
        self.eps = eps

    def forward(self, input: Tensor, target: Tensor, var: Tensor | float) -> Tensor:
        """input, target: of one shape; var: a number, of that shape, or with its last dimension missing or 1."""
        return functional.gaussian_nll_loss(input, target, var, self.full, self.eps, self.reduction)
