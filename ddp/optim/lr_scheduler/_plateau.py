"""A schedule that follows a metric."""

from __future__ import annotations

import math
from typing import Any

from ddp.errors import ArgumentError
from ddp.optim._optimizer import Optimizer, number
from ddp.optim.lr_scheduler._scheduler import LRScheduler, per_group, set_lr


class ReduceLROnPlateau(LRScheduler):
    """The rate times `factor` once the metric has not improved for more than `patience` epochs.

    mode: "min" if a smaller metric is better, "max" if a larger one is
    threshold: an improvement is more than this part of the best so far, or with threshold_mode="abs" more than this
    cooldown: epochs after a reduction in which none are counted; min_lr: the lowest rate, of all groups or of each
    eps: a smaller change of the rate is not made

    Raises: ArgumentError for a factor of 1 or more, or unknown modes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: list[float] | float = 0,
        eps: float = 1e-8,
    ) -> None:
        if factor >= 1.0:
            raise ArgumentError(f"ReduceLROnPlateau: factor is below 1, got {factor}")
        if mode not in ("min", "max"):
            raise ArgumentError(f"ReduceLROnPlateau: mode is 'min' or 'max', got {mode!r}")
        if threshold_mode not in ("rel", "abs"):
            raise ArgumentError(f"ReduceLROnPlateau: threshold_mode is 'rel' or 'abs', got {threshold_mode!r}")
        self._attach(optimizer)
        self.factor = factor
        self.default_min_lr = None if isinstance(min_lr, list | tuple) else min_lr
        self.min_lrs = per_group("ReduceLROnPlateau: min_lr", optimizer, min_lr)
        self.patience = patience
        self.cooldown = cooldown
        self.eps = eps
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.last_epoch = 0
        self.best = math.inf if mode == "min" else -math.inf
        self.cooldown_counter = 0
        self.num_bad_epochs = 0
        self._last_lr = self._rates()

    @property
    def in_cooldown(self) -> bool:
        """Whether the rate was reduced a short while ago."""
        return self.cooldown_counter > 0

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]  # as in PyTorch
        """Counts one epoch with this metric: a number, or a tensor of one element."""
        current = float(number(metrics))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self._is_better(current):
            self.best = current
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.in_cooldown:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self._reduce()
            self.cooldown_counter = self.cooldown
            self.num_bad_epochs = 0
        self._last_lr = self._rates()

    def _is_better(self, current: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        if self.threshold_mode == "rel":
            limit = self.best * (1 + sign * self.threshold)
        else:
            limit = self.best + sign * self.threshold
        return sign * current > sign * limit

    def _reduce(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.min_lrs):
            if self.default_min_lr is None:
                raise ArgumentError(
                    f"ReduceLROnPlateau: {len(self.min_lrs)} lowest rates for {len(groups)} groups: a group was added, "
                    "so add to min_lrs"
                )
            self.min_lrs = [self.default_min_lr] * len(groups)
        for group, old, lowest in zip(groups, self._rates(), self.min_lrs, strict=True):
            new = max(old * self.factor, lowest)
            if old - new > self.eps:
                set_lr(group, new)
