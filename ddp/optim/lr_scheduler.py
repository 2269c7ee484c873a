"""Learning-rate schedules, under PyTorch's names. A schedule is made for one optimizer. Call `step` of the schedule
after `step` of the optimizer.

A new schedule is a subclass of `LRScheduler` with `get_lr`. Source of the cosine: Loshchilov & Hutter 2017,
arXiv:1608.03983.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddp.errors import ArgumentError, DtypeError
from ddp.optim.cyclic_schedules import CyclicLR, OneCycleLR
from ddp.optim.optimizer import Optimizer, number
from ddp.optim.schedule import LRScheduler, per_group, set_lr

__all__ = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
]

Function = Callable[[int], float]


class _FactorLR(LRScheduler):
    """The base of schedules that multiply the rate of every group by `_factor()`, which subclasses define."""

    _is_relative = True

    def get_lr(self) -> list[float]:
        factor = self._factor()
        return [rate * factor for rate in self._rates()]


class StepLR(_FactorLR):
    """Multiplies the rate by gamma every `step_size` epochs. Raises: ArgumentError for a step_size of 0."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        if step_size == 0:
            raise ArgumentError("StepLR: step_size is a number of epochs, not 0")
        self._begin(optimizer, last_epoch, step_size=step_size, gamma=gamma)

    def _factor(self) -> float:
        return 1.0 if self.last_epoch == 0 or self.last_epoch % self.step_size else self.gamma


class MultiStepLR(_FactorLR):
    """Multiplies the rate by gamma at each of the epochs `milestones`; an epoch that is listed twice counts twice."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self._begin(optimizer, last_epoch, milestones=Counter(milestones), gamma=gamma)

    def _factor(self) -> float:
        return self.gamma ** self.milestones.get(self.last_epoch, 0)


class ConstantLR(_FactorLR):
    """The base rate times `factor` for `total_iters` epochs, then the base rate.

    Raises: ArgumentError for a factor outside [0, 1]. With a factor of 0, `step` raises ZeroDivisionError after
    `total_iters` epochs.
    """

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        if not 0 <= factor <= 1:
            raise ArgumentError(f"ConstantLR: factor is between 0 and 1, got {factor}")
        self._begin(optimizer, last_epoch, factor=factor, total_iters=total_iters)

    def _factor(self) -> float:
        if self.last_epoch == 0:
            return self.factor
        return 1.0 / self.factor if self.last_epoch == self.total_iters else 1.0


class LinearLR(_FactorLR):
    """Moves the rate linearly from `start_factor` to `end_factor` times the base rate, in `total_iters` epochs.

    Raises: ArgumentError for factors outside [0, 1], or a start_factor of 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not (0 < start_factor <= 1 and 0 <= end_factor <= 1):
            raise ArgumentError(
                f"LinearLR: start_factor is in (0, 1] and end_factor in [0, 1], got {start_factor} and {end_factor}"
            )
        factors = {"start_factor": start_factor, "end_factor": end_factor}
        self._begin(optimizer, last_epoch, total_iters=total_iters, **factors)

    def _factor(self) -> float:
        if self.last_epoch == 0:
            return self.start_factor
        if self._is_initial or self.last_epoch > self.total_iters:
            return 1.0
        rise = self.end_factor - self.start_factor
        return 1.0 + rise / (self.total_iters * self.start_factor + (self.last_epoch - 1) * rise)


class ExponentialLR(_FactorLR):
    """Multiplies the rate by gamma every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, gamma=gamma)

    def _factor(self) -> float:
        return 1.0 if self._is_initial else self.gamma


class PolynomialLR(_FactorLR):
    """The base rate times (1 - epoch/total_iters)^power, and 0 from `total_iters` on."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, total_iters=total_iters, power=power)

    def _factor(self) -> float:
        if self._is_initial or self.last_epoch > self.total_iters:
            return 1.0
        remaining = 1.0 - self.last_epoch / self.total_iters
        previous = 1.0 - (self.last_epoch - 1) / self.total_iters
        return (remaining / previous) ** self.power


class _FunctionLR(LRScheduler):
    """The base of schedules that call the user's functions.

    A state dict holds the attributes of a callable object, and nothing of a plain function.
    """

    def __init__(self, optimizer: Optimizer, lr_lambda: Function | list[Function], last_epoch: int = -1) -> None:
        self._attach(optimizer)
        functions = per_group(type(self).__name__, optimizer, lr_lambda)
        self._begin(optimizer, last_epoch, lr_lambdas=functions)


class LambdaLR(_FunctionLR):
    """The base rate times lr_lambda(epoch). lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        return [base * function(self.last_epoch) for function, base in zip(self.lr_lambdas, self.base_lrs, strict=True)]


class MultiplicativeLR(_FunctionLR):
    """Multiplies the rate by lr_lambda(epoch), from epoch 1 on. lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        if self._is_initial:
            return self._rates()
        return [rate * function(self.last_epoch) for function, rate in zip(self.lr_lambdas, self._rates(), strict=True)]


class CosineAnnealingLR(LRScheduler):
    """The rate is eta_min + (base - eta_min) * (1 + cos(pi*epoch/T_max))/2. It falls and rises, each for T_max epochs.

    Raises: ArgumentError for a T_max of 0.
    """

    _is_relative = True

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        if T_max == 0:
            raise ArgumentError("CosineAnnealingLR: T_max is a number of epochs, not 0")
        self._begin(optimizer, last_epoch, T_max=T_max, eta_min=eta_min)

    def get_lr(self) -> list[float]:
        rates = self._rates()
        low = self.eta_min
        epoch = self.last_epoch
        if self._is_initial:
            return rates
        if self._step_count == 1 and epoch > 0:  # the first step after a checkpoint, in a ChainedScheduler
            return [low + (base - low) * self._height(epoch) / 2 for base in self.base_lrs]
        # At the bottom the rate may be 0, and a factor would keep it at 0. So the rise is added.
        if (epoch - 1 - self.T_max) % (2 * self.T_max) == 0:
            rise = (1 - math.cos(math.pi / self.T_max)) / 2
            return [rate + (base - low) * rise for rate, base in zip(rates, self.base_lrs, strict=True)]
        factor = self._height(epoch) / self._height(epoch - 1)
        return [factor * (rate - low) + low for rate in rates]

    def _height(self, epoch: int) -> float:
        return 1 + math.cos(math.pi * epoch / self.T_max)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Lowers the rate along a cosine from the base rate to eta_min in T_0 epochs, then begins again.

    T_mult: each repetition takes T_mult times as many epochs as the one before. `step(epoch)` takes fractions, for a
    rate that changes within an epoch.

    Raises: ArgumentError if T_0 or T_mult is not a positive integer.
    """

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        for name, value in (("T_0", T_0), ("T_mult", T_mult)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"CosineAnnealingWarmRestarts: {name} is a positive integer, got {value}")
        self.T_i = T_0
        self.T_cur: float = last_epoch
        self._begin(optimizer, last_epoch, T_0=T_0, T_mult=T_mult, eta_min=eta_min)

    def get_lr(self) -> list[float]:
        height = 1 + math.cos(math.pi * self.T_cur / self.T_i)
        return [self.eta_min + (base - self.eta_min) * height / 2 for base in self.base_lrs]

    def step(self, epoch: float | None = None) -> None:  # fractions, as in PyTorch
        """Goes on to the next epoch, or to `epoch`, maybe a fraction. Raises: ArgumentError for a negative `epoch`."""
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
            self.T_cur = epoch
            self.T_i = self.T_0
            while self.T_cur >= self.T_i:
                self.T_cur -= self.T_i
                self.T_i *= self.T_mult
        self.last_epoch = math.floor(epoch)
        self._set(self.get_lr())

    def _restart(self) -> None:
        self.step(0)


class ReduceLROnPlateau(LRScheduler):
    """Multiplies the rate by `factor` when the metric has not improved for more than `patience` epochs.

    mode: "min" if a smaller metric is better, "max" if a larger one is
    threshold: the least improvement that counts: a fraction of the best value so far, or with threshold_mode="abs" a
    number
    cooldown: epochs after a reduction that do not count as epochs without improvement
    min_lr: the lowest rate: a number, or one for each group
    eps: the rate is left as it is if it would change by at most this

    Raises: ArgumentError for a factor of 1 or more, unknown modes, or a list min_lr that does not fit the groups.
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
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ArgumentError(
                f"ReduceLROnPlateau: mode is 'min' or 'max' and threshold_mode 'rel' or 'abs', got {mode!r} and "
                f"{threshold_mode!r}"
            )
        self._attach(optimizer)
        self.default_min_lr = None if isinstance(min_lr, list | tuple) else min_lr
        self.min_lrs = per_group("ReduceLROnPlateau: min_lr", optimizer, min_lr)
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.eps = eps
        self.mode = mode
        self.threshold = threshold
        self.threshold_mode = threshold_mode
        self.best = math.inf if mode == "min" else -math.inf
        self.last_epoch = self.cooldown_counter = self.num_bad_epochs = 0
        self._last_lr = self._rates()

    @property
    def in_cooldown(self) -> bool:
        """Whether the last reduction is less than `cooldown` epochs ago."""
        return self.cooldown_counter > 0

    def step(self, metrics: Any) -> None:  # type: ignore[override]  # as in PyTorch
        """Counts one epoch with this metric: a number, or a tensor of one element."""
        current = float(number(metrics))
        self.last_epoch += 1
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
        margin = sign * self.threshold
        limit = self.best * (1 + margin) if self.threshold_mode == "rel" else self.best + margin
        return sign * current > sign * limit

    def _reduce(self) -> None:
        if len(self.min_lrs) != len(self.optimizer.param_groups):  # a group was added
            lowest_of_all = self.min_lrs if self.default_min_lr is None else self.default_min_lr
            self.min_lrs = per_group("ReduceLROnPlateau: min_lrs", self.optimizer, lowest_of_all)
        for group, old, lowest in zip(self.optimizer.param_groups, self._rates(), self.min_lrs, strict=True):
            new = max(old * self.factor, lowest)
            if old - new > self.eps:
                set_lr(group, new)


class _Composed(LRScheduler):
    _schedulers: list[LRScheduler]

    def _set_schedulers(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None) -> None:
        name = type(self).__name__
        if not schedulers:
            raise ArgumentError(f"{name}: there is no schedule")
        for position, schedule in enumerate(schedulers):
            if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
                raise DtypeError(
                    f"{name}: number {position} is {type(schedule).__name__}, not a schedule without a metric"
                )
        self._attach(optimizer or schedulers[0].optimizer)
        if any(schedule.optimizer is not self.optimizer for schedule in schedulers):
            raise ArgumentError(f"{name}: the schedules are not all of one optimizer")
        self._schedulers = list(schedulers)

    def _undo(self) -> None:
        for schedule in self._schedulers:
            schedule._undo()


class SequentialLR(_Composed):
    """Uses `schedulers` one after another. Each begins at its own epoch 0.

    milestones: the epochs at which the second and later schedules begin

    Raises: ArgumentError for another number of milestones, no schedules, or schedules of different optimizers;
    DtypeError for a ReduceLROnPlateau, or an object that is not a schedule.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1
    ) -> None:
        self._set_schedulers(schedulers, optimizer)
        if len(milestones) != len(schedulers) - 1:
            raise ArgumentError(f"SequentialLR: {len(milestones)} milestones between {len(schedulers)} schedules")
        self._milestones = milestones
        self.last_epoch = last_epoch + 1
        # Each schedule did its first step when it was made. These steps are undone. Then the current schedule repeats
        # its first step.
        for group in optimizer.param_groups:
            set_lr(group, group["initial_lr"])
        self._undo()
        first = schedulers[bisect_right(milestones, 0)]
        first._initial_step()
        self._last_lr = first.get_last_lr()

    def step(self) -> None:  # type: ignore[override]  # as in PyTorch
        """Goes on to the next epoch."""
        self.last_epoch += 1
        position = bisect_right(self._milestones, self.last_epoch)
        scheduler = self._schedulers[position]
        if position > 0 and self._milestones[position - 1] == self.last_epoch:
            scheduler._restart()
        else:
            scheduler.step()
        self._last_lr = scheduler.get_last_lr()


class ChainedScheduler(_Composed):
    """Steps all of `schedulers`, one after another. Most schedules change the rate that the one before them has set. A
    schedule that computes from the base rate, as LambdaLR does, replaces this rate.

    Raises: ArgumentError if there are no schedulers, or for schedules of different optimizers; DtypeError for a
    ReduceLROnPlateau, or an object that is not a schedule.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        self._set_schedulers(schedulers, optimizer)
        self._last_lr = self._rates()

    def _initial_step(self) -> None:
        for schedule in self._schedulers:
            schedule._step_count = 0  # the next step is the first one again
        self.step()

    def step(self) -> None:  # type: ignore[override]  # as in PyTorch
        """Goes on to the next epoch."""
        for schedule in self._schedulers:
            schedule.step()
        self._last_lr = self._rates()
