"""Losses of classification as modules, and what all losses share: each keeps its arguments, and calls its function.

All take reduction="mean", "sum" or "none", and PyTorch's deprecated size_average and reduce in its place.
"""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module
from ddp.nn.functional._reduction import parsed


class Loss(Module):
    """A loss that is reduced over its elements."""

    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean") -> None:
        super().__init__()
        if size_average is not None or reduce is not None:
            reduction = parsed(type(self).__name__, reduction, size_average, reduce)
        self.reduction = reduction


class _WeightedLoss(Loss):
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)


class CrossEntropyLoss(_WeightedLoss):
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...) of
    classes, or probabilities of the input's shape. weight: (C,).

    Raises when called: see functional.cross_entropy.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (N, C, ...), target: (N, ...) or (N, C, ...)."""
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class NLLLoss(_WeightedLoss):
    """-input[target], of log-probabilities. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...)."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction)
        self.ignore_index = ignore_index

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (N, C, ...), target: (N, ...)."""
        return functional.nll_loss(input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class BCELoss(_WeightedLoss):
    """-target * log(input) - (1 - target) * log(1 - input), the logarithms no less than -100. All of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: probabilities; target: of its shape."""
        return functional.binary_cross_entropy(input, target, self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(Loss):
    """BCELoss of sigmoid(input), without overflow. weight, pos_weight: broadcast to the losses."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: logits; target: of its shape."""
        return functional.binary_cross_entropy_with_logits(
            input, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


class KLDivLoss(Loss):
    """target * (log(target) - input), input being a logarithm, and with log_target the target too.

    reduction: "batchmean" (the sum over the batch size) is the divergence as mathematics has it.
    """

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.log_target = log_target

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape."""
        return functional.kl_div(input, target, reduction=self.reduction, log_target=self.log_target)
