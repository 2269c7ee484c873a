"""Schedules that multiply every group's rate by one factor a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from ddp.errors import ArgumentError
from ddp.optim._optimizer import Optimizer
from ddp.optim.lr_scheduler._scheduler import LRScheduler


class _Factor(LRScheduler):
    """step: what the rate is multiplied by on arriving at `last_epoch`; whole: what the base rate is multiplied by."""

    def get_lr(self) -> list[float]:
        factor = self._step_factor()
        return [rate * factor for rate in self._rates()]

    def _closed_form(self) -> list[float]:
        whole = self._whole_factor()
        return [base * whole for base in self.base_lrs]

    def _step_factor(self) -> float:
        raise NotImplementedError

    def _whole_factor(self) -> float:
        raise NotImplementedError


class StepLR(_Factor):
    """The rate times gamma every `step_size` epochs."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        return 1.0 if self.last_epoch == 0 or self.last_epoch % self.step_size else self.gamma

    def _whole_factor(self) -> float:
        return self.gamma ** (self.last_epoch // self.step_size)


class MultiStepLR(_Factor):
    """The rate times gamma at each of the epochs `milestones`; one that is named twice counts twice."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones = Counter(milestones)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        return self.gamma ** self.milestones.get(self.last_epoch, 0)

    def _whole_factor(self) -> float:
        return self.gamma ** bisect_right(sorted(Counter(self.milestones).elements()), self.last_epoch)


class ConstantLR(_Factor):
    """The rate times `factor` for `total_iters` epochs, then the base rate. Raises: ArgumentError outside [0, 1]."""

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        _check_factor("ConstantLR", "factor", factor)
        self.factor = factor
        self.total_iters = total_iters
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        if self.last_epoch == 0:
            return self.factor
        return 1.0 / self.factor if self.last_epoch == self.total_iters else 1.0

    def _whole_factor(self) -> float:
        return 1.0 if self.last_epoch >= self.total_iters else self.factor


class LinearLR(_Factor):
    """From `start_factor` to `end_factor` of the base rate over `total_iters` epochs, in a straight line.

    Raises: ArgumentError for factors outside [0, 1], or a start of 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        _check_factor("LinearLR", "start_factor", start_factor)
        _check_factor("LinearLR", "end_factor", end_factor)
        if start_factor == 0:
            raise ArgumentError("LinearLR: start_factor is above 0, since the next rate is a multiple of the last")
        self.start_factor = start_factor
        self.end_factor = end_factor
        self.total_iters = total_iters
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        if self.last_epoch == 0:
            return self.start_factor
        if self._is_initial or self.last_epoch > self.total_iters:
            return 1.0
        rise = self.end_factor - self.start_factor
        return 1.0 + rise / (self.total_iters * self.start_factor + (self.last_epoch - 1) * rise)

    def _whole_factor(self) -> float:
        rise = self.end_factor - self.start_factor
        return self.start_factor + rise * min(self.total_iters, self.last_epoch) / self.total_iters


class ExponentialLR(_Factor):
    """The rate times gamma every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        return 1.0 if self._is_initial else self.gamma

    def _whole_factor(self) -> float:
        return self.gamma**self.last_epoch


class PolynomialLR(_Factor):
    """(1 - epoch/total_iters)^power of the base rate, and 0 from `total_iters` on."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters = total_iters
        self.power = power
        super().__init__(optimizer, last_epoch)

    def _step_factor(self) -> float:
        if self._is_initial or self.last_epoch > self.total_iters:
            return 1.0
        left, before = 1.0 - self.last_epoch / self.total_iters, 1.0 - (self.last_epoch - 1) / self.total_iters
        return (left / before) ** self.power

    def _whole_factor(self) -> float:
        return (1.0 - min(self.total_iters, self.last_epoch) / self.total_iters) ** self.power


def _check_factor(kind: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ArgumentError(f"{kind}: {name} is between 0 and 1, got {value}")
