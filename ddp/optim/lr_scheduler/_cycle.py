"""Schedules that go up and down, and let momentum go the other way.

Source: Smith 2017, arXiv:1506.01186 (cyclic); Smith & Topin 2018, arXiv:1708.07120 (one cycle).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

from ddp.errors import ArgumentError
from ddp.optim._optimizer import Group, Optimizer
from ddp.optim.lr_scheduler._scheduler import LRScheduler, per_group, set_lr


class _Cycle(LRScheduler):
    """A schedule of momentum too: of "momentum", or of the first of "betas"."""

    use_beta1: bool

    def _begin_momentum(self, base: Any, largest: Any, begin: bool) -> None:
        kind, optimizer = type(self).__name__, self.optimizer
        if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ArgumentError(f"{kind}: {type(optimizer).__name__} has no momentum to cycle: cycle_momentum=False")
        self.use_beta1 = "betas" in optimizer.defaults
        self.base_momentums = per_group(f"{kind}: base_momentum", optimizer, base)
        self.max_momentums = per_group(f"{kind}: max_momentum", optimizer, largest)
        if begin:
            for low, high, group in zip(self.base_momentums, self.max_momentums, optimizer.param_groups, strict=True):
                self._set_momentum(group, high)
                group["max_momentum"], group["base_momentum"] = high, low

    def _set_momentum(self, group: Group, momentum: float) -> None:
        if self.use_beta1:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


class OneCycleLR(_Cycle):
    """Up from max_lr/div_factor to max_lr in `pct_start` of the steps, then down to the start over final_div_factor.

    total_steps, or epochs * steps_per_epoch: steps of the whole schedule, one after every batch
    three_phase: down to the start as fast as it came up, and then to the end
    cycle_momentum: momentum goes from max_momentum to base_momentum and back meanwhile

    Raises: ArgumentError for values out of range, and by `step` after the last step.
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
            total_steps = _positive("epochs", epochs) * _positive("steps_per_epoch", steps_per_epoch)
        self.total_steps = _positive("total_steps", total_steps)
        if not (isinstance(pct_start, float) and 0 <= pct_start <= 1):
            raise ArgumentError(f"OneCycleLR: pct_start is a float between 0 and 1, got {pct_start}")
        if anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(f"OneCycleLR: anneal_strategy is 'cos' or 'linear', got {anneal_strategy!r}")
        self._anneal_func_type = anneal_strategy
        top, last = float(pct_start * total_steps) - 1, total_steps - 1
        # (last step, lr from, lr to, momentum from, momentum to) of each phase: names of settings of a group
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
        self.cycle_momentum = cycle_momentum
        if cycle_momentum:
            self._begin_momentum(base_momentum, max_momentum, last_epoch == -1)
        super().__init__(optimizer, last_epoch)

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
        part = (step - start) / (end - start)
        found = []
        for group in self.optimizer.param_groups:
            found.append(self._between(group[names[0]], group[names[1]], part))
            if self.cycle_momentum:
                self._set_momentum(group, self._between(group[names[2]], group[names[3]], part))
        return found

    def _between(self, start: float, end: float, part: float) -> float:
        if self._anneal_func_type == "linear":
            return (end - start) * part + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1)


class CyclicLR(_Cycle):
    """Up from base_lr to max_lr in `step_size_up` steps, down in `step_size_down`, and again.

    mode: "triangular", the same every time; "triangular2", half as high each cycle; "exp_range", gamma^step as high
    scale_fn: another height, of the cycle (from 1 on) or, with scale_mode="iterations", of the step
    cycle_momentum: momentum goes from max_momentum to base_momentum and back meanwhile

    Raises: ArgumentError for another mode, or an optimizer without momentum.
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
        lowest = per_group("CyclicLR: base_lr", optimizer, base_lr)
        if last_epoch == -1:
            for group, low in zip(optimizer.param_groups, lowest, strict=True):
                set_lr(group, low)
        self.max_lrs = per_group("CyclicLR: max_lr", optimizer, max_lr)
        down = step_size_up if step_size_down is None else step_size_down
        self.total_size = float(step_size_up) + float(down)
        self.step_ratio = step_size_up / self.total_size
        self.mode = mode
        self.gamma = gamma
        self._scale_fn_custom = scale_fn
        self.scale_mode = scale_mode if scale_fn is not None else "iterations" if mode == "exp_range" else "cycle"
        self.cycle_momentum = cycle_momentum
        if cycle_momentum:
            self._begin_momentum(base_momentum, max_momentum, last_epoch == -1)
        super().__init__(optimizer, last_epoch)
        self.base_lrs = lowest

    def scale_fn(self, x: float) -> float:
        """How high the cycle, or the step, `x` goes: 1 is max_lr."""
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
            for low, high, group in zip(
                self.base_momentums, self.max_momentums, self.optimizer.param_groups, strict=True
            ):
                self._set_momentum(group, high - (high - low) * part * scale)
        return [low + (high - low) * part * scale for low, high in zip(self.base_lrs, self.max_lrs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and scale_fn; of a callable object its attributes."""
        state, function = super().state_dict(), self._scale_fn_custom
        plain = function is None or isinstance(function, types.FunctionType)
        return {**state, "_scale_fn_custom": None if plain else dict(function.__dict__)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned; a function stays the one that was given here."""
        attributes = state_dict["_scale_fn_custom"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "_scale_fn_custom"})
        if attributes is not None and self._scale_fn_custom is not None:
            self._scale_fn_custom.__dict__.update(attributes)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ArgumentError(f"OneCycleLR: {name} is a positive integer, got {value}")
    return value
