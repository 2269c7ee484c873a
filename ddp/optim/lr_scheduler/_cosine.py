"""Schedules along a cosine. Source: Loshchilov & Hutter 2017, arXiv:1608.03983."""

from __future__ import annotations

import math

from ddp.errors import ArgumentError
from ddp.optim._optimizer import Optimizer
from ddp.optim.lr_scheduler._scheduler import LRScheduler


class CosineAnnealingLR(LRScheduler):
    """eta_min + (base - eta_min) * (1 + cos(pi*epoch/T_max))/2: down in T_max epochs, up in the next, and so on."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        rates, low, epoch = self._rates(), self.eta_min, self.last_epoch
        if self._is_initial:
            return rates
        if self._step_count == 1 and epoch > 0:
            return self._closed_form()
        if (epoch - 1 - self.T_max) % (2 * self.T_max) == 0:  # up from the bottom, where a multiple stays 0
            rise = (1 - math.cos(math.pi / self.T_max)) / 2
            return [rate + (base - low) * rise for rate, base in zip(rates, self.base_lrs, strict=True)]
        factor = self._height(epoch) / self._height(epoch - 1)
        return [factor * (rate - low) + low for rate in rates]

    def _height(self, epoch: int) -> float:
        return 1 + math.cos(math.pi * epoch / self.T_max)

    def _closed_form(self) -> list[float]:
        height = self._height(self.last_epoch)
        return [self.eta_min + (base - self.eta_min) * height / 2 for base in self.base_lrs]


class CosineAnnealingWarmRestarts(LRScheduler):
    """Down along a cosine from the base rate to eta_min in T_0 epochs, and anew, each time over T_mult as many.

    `step(epoch)` takes fractions, for a rate that changes inside an epoch.

    Raises: ArgumentError for T_0 or T_mult that are no positive integers.
    """

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        for name, value in (("T_0", T_0), ("T_mult", T_mult)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"CosineAnnealingWarmRestarts: {name} is a positive integer, got {value}")
        self.T_0 = T_0
        self.T_i = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        self.T_cur: float = last_epoch
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        height = 1 + math.cos(math.pi * self.T_cur / self.T_i)
        return [self.eta_min + (base - self.eta_min) * height / 2 for base in self.base_lrs]

    def step(self, epoch: float | None = None) -> None:
        """Goes on to the next epoch, or to `epoch`: a fraction, too. Raises: ArgumentError for a negative one."""
        if epoch is None and self.last_epoch >= 0:
            epoch = self.last_epoch + 1
            self.T_cur += 1
            if self.T_cur >= self.T_i:
                self.T_cur %= self.T_i
                self.T_i *= self.T_mult
        else:
            epoch = 0 if epoch is None else epoch
            if epoch < 0:
                raise ArgumentError(f"CosineAnnealingWarmRestarts: epoch is not negative, got {epoch}")
            self.T_cur, self.T_i = epoch, self.T_0
            if self.T_mult == 1:
                self.T_cur = epoch % self.T_0
            else:
                while self.T_cur >= self.T_i:
                    self.T_cur -= self.T_i
                    self.T_i *= self.T_mult
        self.last_epoch = math.floor(epoch)
        self._set(self.get_lr())

    def _update_lr(self, epoch: int | None = None) -> None:
        self.step(epoch)
