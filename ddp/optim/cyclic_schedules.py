"""Learning-rate schedules with a momentum that changes inversely: one cycle, and repeated cycles.

Sources: Smith 2017, arXiv:1506.01186 (cyclic); Smith & Topin 2018, arXiv:1708.07120 (one cycle).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp.errors import ArgumentError
from ddp.optim.optimizer import Group, Optimizer
from ddp.optim.schedule import LRScheduler, per_group, set_lr


class _MomentumCycle(LRScheduler):
    """The base of schedules that also change the momentum: "momentum", or the first of "betas"."""

    def _init_momentum(self, base: Any, largest: Any, begin: bool) -> None:
        name = type(self).__name__
        optimizer = self.optimizer
        if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ArgumentError(f"{name}: {type(optimizer).__name__} has no momentum to cycle: cycle_momentum=False")
        self.use_beta1 = "betas" in optimizer.defaults
        self.base_momentums = per_group(f"{name}: base_momentum", optimizer, base)
        self.max_momentums = per_group(f"{name}: max_momentum", optimizer, largest)
        if begin:
            for low, high, group in zip(self.base_momentums, self.max_momentums, optimizer.param_groups, strict=True):
                self._set_momentum(group, high)
                group["max_momentum"] = high
                group["base_momentum"] = low

    def _set_momentum(self, group: Group, momentum: float) -> None:
        if self.use_beta1:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


class OneCycleLR(_MomentumCycle):
    """One cycle: the rate rises to max_lr in `pct_start` of the steps, then falls to start/final_div_factor.

    The rate begins at start = max_lr/div_factor.

    total_steps, or epochs * steps_per_epoch: number of steps of the schedule, one after every batch
    three_phase: the rate falls to start in as many steps as it rose, then to start/final_div_factor
    cycle_momentum: whether the momentum falls from max_momentum to base_momentum while the rate rises, and rises back
    while the rate falls

    Raises: ArgumentError for values out of range, if neither total_steps nor both epochs and steps_per_epoch are given,
    for a list that does not fit the groups, for cycle_momentum with an optimizer without momentum, and for more than
    total_steps calls of `step`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        self._attach(optimizer)
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ArgumentError("OneCycleLR: give total_steps, or epochs and steps_per_epoch")
            total_steps = epochs * steps_per_epoch
        if not isinstance(total_steps, int) or total_steps <= 0:
            raise ArgumentError(f"OneCycleLR: the number of steps is a positive integer, got {total_steps}")
        if not 0 <= pct_start <= 1 or anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(
                f"OneCycleLR: pct_start is between 0 and 1 and anneal_strategy 'cos' or 'linear', got {pct_start} and "
                f"{anneal_strategy!r}"
            )
        if 0 in (div_factor, final_div_factor):
            raise ArgumentError(
                f"OneCycleLR: div_factor and final_div_factor are not 0, got {div_factor} and {final_div_factor}"
            )
        top = float(pct_start * total_steps) - 1
        last = total_steps - 1
        # For each phase: its last step, and the names of the group's settings that hold the first and last lr of the
        # phase, and its first and last momentum.
        up = (top, "initial_lr", "max_lr", "max_momentum", "base_momentum")
        down = (last, "max_lr", "min_lr", "base_momentum", "max_momentum")
        back = (float(2 * pct_start * total_steps) - 2, "max_lr", "initial_lr", "base_momentum", "max_momentum")
        out = (last, "initial_lr", "min_lr", "max_momentum", "max_momentum")
        self._phases: list[Any] = [up, back, out] if three_phase else [up, down]
        highest = per_group("OneCycleLR: max_lr", optimizer, max_lr)
        if last_epoch == -1:
            for group, high in zip(optimizer.param_groups, highest, strict=True):
                group["initial_lr"] = high / div_factor
                group["max_lr"] = high
                group["min_lr"] = group["initial_lr"] / final_div_factor
        if cycle_momentum:
            self._init_momentum(base_momentum, max_momentum, last_epoch == -1)
        self._begin(
            optimizer,
            last_epoch,
            total_steps=total_steps,
            cycle_momentum=cycle_momentum,
            _anneal_func_type=anneal_strategy,
        )

    def get_lr(self) -> list[float]:
        step = self.last_epoch
        if step > self.total_steps:
            raise ArgumentError(f"OneCycleLR: step {step} of {self.total_steps}")
        start = 0.0
        for phase in self._phases:
            end, *names = phase
            if step <= end or phase is self._phases[-1]:
                break
            start = end
        part = (step - start) / (end - start) if end > start else 1.0  # 1.0: the phase has no steps
        rates = []
        for group in self.optimizer.param_groups:
            rates.append(self._between(group[names[0]], group[names[1]], part))
            if self.cycle_momentum:
                self._set_momentum(group, self._between(group[names[2]], group[names[3]], part))
        return rates

    def _between(self, start: float, end: float, part: float) -> float:
        if self._anneal_func_type == "linear":
            return (end - start) * part + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1)


class CyclicLR(_MomentumCycle):
    """Repeated cycles: the rate rises from base_lr to max_lr in `step_size_up` steps, and falls in `step_size_down`.

    mode: "triangular": all cycles are alike; "triangular2": each is half as high as the one before; "exp_range":
    heights are multiplied by gamma^step
    scale_fn: replaces mode. It computes the factor of the height from the cycle's number (1, 2, ...); with
    scale_mode="iterations", from the step
    cycle_momentum: whether the momentum falls from max_momentum to base_momentum while the rate rises, and rises back
    while the rate falls

    Raises: ArgumentError for another mode without scale_fn, a step_size_up of 0, a list that does not fit the groups,
    or cycle_momentum with an optimizer without momentum.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | list[float],
        max_lr: float | list[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: float = 0.8,
        max_momentum: float = 0.9,
        last_epoch: int = -1,
    ) -> None:
        self._attach(optimizer)
        if mode not in ("triangular", "triangular2", "exp_range") and scale_fn is None:
            raise ArgumentError(f"CyclicLR: mode is 'triangular', 'triangular2' or 'exp_range', got {mode!r}")
        if step_size_up == 0:
            raise ArgumentError("CyclicLR: step_size_up is a number of steps, not 0")
        lowest = per_group("CyclicLR: base_lr", optimizer, base_lr)
        if last_epoch == -1:
            for group, low in zip(optimizer.param_groups, lowest, strict=True):
                set_lr(group, low)
        self.max_lrs = per_group("CyclicLR: max_lr", optimizer, max_lr)
        down = step_size_up if step_size_down is None else step_size_down
        self.total_size = float(step_size_up) + float(down)
        self.step_ratio = step_size_up / self.total_size
        if scale_fn is None:
            scale_mode = "iterations" if mode == "exp_range" else "cycle"
        if cycle_momentum:
            self._init_momentum(base_momentum, max_momentum, last_epoch == -1)
        self._begin(
            optimizer,
            last_epoch,
            mode=mode,
            gamma=gamma,
            scale_mode=scale_mode,
            cycle_momentum=cycle_momentum,
            _scale_fn_custom=scale_fn,
        )
        self.base_lrs = lowest

    def scale_fn(self, x: float) -> float:
        """The factor of the height in cycle (or step) number `x`. With a factor of 1, the peak is max_lr."""
        if self._scale_fn_custom is not None:
            return self._scale_fn_custom(x)
        if self.mode == "triangular2":
            return 1 / 2.0 ** (x - 1)
        return self.gamma**x if self.mode == "exp_range" else 1.0

    def get_lr(self) -> list[float]:
        cycle = math.floor(1 + self.last_epoch / self.total_size)
        x = 1.0 + self.last_epoch / self.total_size - cycle
        part = x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)
        scale = self.scale_fn(cycle if self.scale_mode == "cycle" else self.last_epoch)
        if self.cycle_momentum:
            limits = zip(self.base_momentums, self.max_momentums, self.optimizer.param_groups, strict=True)
            for low, high, group in limits:
                self._set_momentum(group, high - (high - low) * part * scale)
        return [low + (high - low) * part * scale for low, high in zip(self.base_lrs, self.max_lrs, strict=True)]
