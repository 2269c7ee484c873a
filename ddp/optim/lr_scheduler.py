"""Learning-rate schedules, under PyTorch's names: made around an optimizer, stepped after it.

A new schedule is a subclass of `LRScheduler` with `get_lr`. Sources: Loshchilov & Hutter 2017, arXiv:1608.03983
(cosine); Smith 2017, arXiv:1506.01186 (cyclic); Smith & Topin 2018, arXiv:1708.07120 (one cycle).
"""

from __future__ import annotations

import math
import types
import warnings
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError
from ddp.optim.optimizer import Group, Optimizer, number

Function = Callable[[int], float]

# The settings of a parameter group that schedules change.
_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"}

# The attributes of schedules that hold functions and other schedules: a state dict has only their state.
_STATEFUL = {"lr_lambdas", "_scale_fn_custom", "_schedulers"}


class LRScheduler:
    """The base of schedules: `get_lr` computes the rates of `last_epoch`.

    last_epoch: -1 to begin; to continue from a checkpoint, the last finished epoch: the optimizer's groups then have
    "initial_lr"

    Raises: DtypeError for other things than an optimizer; ArgumentError if "initial_lr" is missing.
    """

    _is_relative = False  # whether `get_lr` computes from the last rates, not from `base_lrs`

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch)

    if TYPE_CHECKING:  # the settings that `_begin` makes attributes

        def __getattr__(self, name: str) -> Any: ...

    def _begin(self, optimizer: Optimizer, last_epoch: int, **settings: Any) -> None:
        """Stores the settings as attributes, and sets the first rates. Raises: DtypeError, ArgumentError."""
        self._attach(optimizer)
        self.__dict__.update(settings)
        for position, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", number(group["lr"]))
            elif "initial_lr" not in group:
                raise ArgumentError(
                    f"{type(self).__name__}: last_epoch={last_epoch}, but group {position} has no 'initial_lr': load "
                    "the optimizer's state dict first, or begin with last_epoch=-1"
                )
        self.base_lrs: list[float] = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self._initial_step()

    def _attach(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise DtypeError(f"{type(self).__name__}: expected an Optimizer, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._is_initial = False
        if optimizer._loaded_settings == []:  # the first schedule made after load_state_dict
            optimizer._loaded_settings = [
                {name: number(value) for name, value in group.items() if name in _SCHEDULED}
                for group in optimizer.param_groups
            ]

    def _initial_step(self) -> None:
        """Does the first step, which sets the rates of the first epoch, or keeps those of a checkpoint."""
        self._step_count = 0
        self._is_initial = True
        try:
            self.step()
        finally:
            self._is_initial = False

    def get_last_lr(self) -> list[float]:
        """The rate of each group, as this schedule set it last."""
        return self._last_lr

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_epoch`. Called by `step`; users call `get_last_lr`."""
        raise NotImplementedError(f"{type(self).__name__} defines no get_lr()")

    def step(self, epoch: None = None) -> None:
        """Goes on to the next epoch: after `optimizer.step()`. Raises: ArgumentError for an `epoch` to go to instead.

        Warns if the optimizer has made no step before the second call: the first rate would be skipped.
        """
        if epoch is not None:
            raise ArgumentError(f"{type(self).__name__}: step() goes on to the next epoch, and to no other")
        if self._step_count == 1 and not self.optimizer._stepped:
            warnings.warn(
                f"{type(self).__name__}.step() before optimizer.step(): the first rate of the schedule is skipped",
                UserWarning,
                stacklevel=2,
            )
        self._step_count += 1
        self.last_epoch += 1
        self._set(self.get_lr())

    def _undo(self) -> None:
        """Takes back one step."""
        self.last_epoch -= 1

    def _restart(self) -> None:
        """Begins at epoch 0: called when this schedule becomes the current one of a SequentialLR."""
        self.last_epoch = 0
        if self._is_relative:
            self._set(self.base_lrs)
        self._is_initial = self._is_relative
        self._set(self.get_lr())
        self._is_initial = False

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            _set_lr(group, rate)
        self._last_lr = self._rates()

    def _rates(self) -> list[float]:
        return [_read_lr(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """All attributes but the optimizer; for functions and other schedules, their state."""
        return {
            name: _state_of(value) if name in _STATEFUL else value
            for name, value in self.__dict__.items()
            if name != "optimizer"
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Functions and other schedules are kept, and get their saved state.

        The optimizer's state dict may be loaded before or after this, also before this schedule is made. Making a
        schedule sets the first rates; this call restores the rates and momenta that the optimizer had loaded.
        """
        self.__dict__.update({name: value for name, value in state_dict.items() if name not in _STATEFUL})
        for name in _STATEFUL & state_dict.keys():
            _load_state(self.__dict__.get(name), state_dict[name])
        for group, loaded in zip(self.optimizer.param_groups, self.optimizer._loaded_settings or (), strict=False):
            _set_lr(group, loaded["lr"])
            group.update({**loaded, "lr": group["lr"]})


def _state_of(value: Any) -> Any:
    """The state of a function or schedule, or of each in a list; None for a plain function."""
    if isinstance(value, list):
        return [_state_of(item) for item in value]
    if isinstance(value, LRScheduler):
        return value.state_dict()
    return None if isinstance(value, types.FunctionType) else dict(getattr(value, "__dict__", {})) or None


def _load_state(value: Any, state: Any) -> None:
    if isinstance(value, list):
        for item, item_state in zip(value, state, strict=True):
            _load_state(item, item_state)
    elif isinstance(value, LRScheduler):
        value.load_state_dict(state)
    elif value is not None and state:
        vars(value).update(state)


# By id of a learning rate on a GPU: a weak reference, its version, and its value, to read it without waiting.
_gpu_rates: dict[int, tuple[Any, int, float]] = {}


def _set_lr(group: Group, rate: float) -> None:
    """Sets the rate of a group. A tensor is changed in place, since other code may hold it."""
    tensor = group["lr"]
    if isinstance(tensor, Tensor):
        tensor.fill_(rate)
        if tensor.device.type != "cpu":
            value = float(np.asarray(rate, tensor.dtype))
            _gpu_rates[id(tensor)] = (weakref.ref(tensor), tensor.version.count, value)
    else:
        group["lr"] = rate


def _read_lr(rate: Any) -> Any:
    entry = _gpu_rates.get(id(rate))
    return entry[2] if entry and entry[0]() is rate and entry[1] == rate.version.count else number(rate)


def _per_group(name: str, optimizer: Optimizer, value: Any) -> list[Any]:
    """`value` for each group: itself, or one of a list. Raises: ArgumentError for a list of another length."""
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ArgumentError(f"{name}: {len(value)} values for {groups} parameter groups")
    return list(value)


class _FactorLR(LRScheduler):
    """The base of schedules that multiply the rate of every group by `_factor()`, which subclasses define."""

    _is_relative = True

    def get_lr(self) -> list[float]:
        factor = self._factor()
        return [rate * factor for rate in self._rates()]


class StepLR(_FactorLR):
    """The rate times gamma every `step_size` epochs."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, step_size=step_size, gamma=gamma)

    def _factor(self) -> float:
        return 1.0 if self.last_epoch == 0 or self.last_epoch % self.step_size else self.gamma


class MultiStepLR(_FactorLR):
    """The rate times gamma at each of the epochs `milestones`; one that is named twice counts twice."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self._begin(optimizer, last_epoch, milestones=Counter(milestones), gamma=gamma)

    def _factor(self) -> float:
        return self.gamma ** self.milestones.get(self.last_epoch, 0)


class ConstantLR(_FactorLR):
    """The rate times `factor` for `total_iters` epochs, then the base rate. Raises: ArgumentError outside [0, 1]."""

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
    """The rate times gamma every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, gamma=gamma)

    def _factor(self) -> float:
        return 1.0 if self._is_initial else self.gamma


class PolynomialLR(_FactorLR):
    """(1 - epoch/total_iters)^power of the base rate, and 0 from `total_iters` on."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, total_iters=total_iters, power=power)

    def _factor(self) -> float:
        if self._is_initial or self.last_epoch > self.total_iters:
            return 1.0
        remaining = 1.0 - self.last_epoch / self.total_iters
        previous = 1.0 - (self.last_epoch - 1) / self.total_iters
        return (remaining / previous) ** self.power


class _FunctionLR(LRScheduler):
    """The base of schedules by functions. State dicts have the attributes of callable objects, nothing of functions."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Function | list[Function], last_epoch: int = -1) -> None:
        self._attach(optimizer)
        functions = _per_group(type(self).__name__, optimizer, lr_lambda)
        self._begin(optimizer, last_epoch, lr_lambdas=functions)


class LambdaLR(_FunctionLR):
    """The base rate times lr_lambda(epoch). lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        return [base * function(self.last_epoch) for function, base in zip(self.lr_lambdas, self.base_lrs, strict=True)]


class MultiplicativeLR(_FunctionLR):
    """The present rate times lr_lambda(epoch), from epoch 1 on. lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        if self._is_initial:
            return self._rates()
        return [rate * function(self.last_epoch) for function, rate in zip(self.lr_lambdas, self._rates(), strict=True)]


class CosineAnnealingLR(LRScheduler):
    """eta_min + (base - eta_min) * (1 + cos(pi*epoch/T_max))/2: down in T_max epochs, up in the next, and so on."""

    _is_relative = True

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch, T_max=T_max, eta_min=eta_min)

    def get_lr(self) -> list[float]:
        rates = self._rates()
        low = self.eta_min
        epoch = self.last_epoch
        if self._is_initial:
            return rates
        if self._step_count == 1 and epoch > 0:  # the first step after a checkpoint
            return [low + (base - low) * self._height(epoch) / 2 for base in self.base_lrs]
        if (epoch - 1 - self.T_max) % (
            2 * self.T_max
        ) == 0:  # computed from the bottom: the rate may be 0, which no factor changes
            rise = (1 - math.cos(math.pi / self.T_max)) / 2
            return [rate + (base - low) * rise for rate, base in zip(rates, self.base_lrs, strict=True)]
        factor = self._height(epoch) / self._height(epoch - 1)
        return [factor * (rate - low) + low for rate in rates]

    def _height(self, epoch: int) -> float:
        return 1 + math.cos(math.pi * epoch / self.T_max)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Along a cosine from the base rate down to eta_min in T_0 epochs; then again, each time in T_mult as many epochs.

    `step(epoch)` takes fractions, for a rate that changes inside an epoch.

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
            self.T_cur = epoch
            self.T_i = self.T_0
            while self.T_cur >= self.T_i:
                self.T_cur -= self.T_i
                self.T_i *= self.T_mult
        self.last_epoch = math.floor(epoch)
        self._set(self.get_lr())

    def _restart(self) -> None:
        self.step(0)


class _MomentumCycle(LRScheduler):
    """A schedule of momentum too: of "momentum", or of the first of "betas"."""

    use_beta1: bool

    def _init_momentum(self, base: Any, largest: Any, begin: bool) -> None:
        name = type(self).__name__
        optimizer = self.optimizer
        if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ArgumentError(f"{name}: {type(optimizer).__name__} has no momentum to cycle: cycle_momentum=False")
        self.use_beta1 = "betas" in optimizer.defaults
        self.base_momentums = _per_group(f"{name}: base_momentum", optimizer, base)
        self.max_momentums = _per_group(f"{name}: max_momentum", optimizer, largest)
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
    """Up from start = max_lr/div_factor to max_lr in `pct_start` of the steps, then down to start/final_div_factor.

    total_steps, or epochs * steps_per_epoch: steps of the whole schedule, one after every batch
    three_phase: down to start in as many steps as up, then to start/final_div_factor
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
            total_steps = epochs * steps_per_epoch
        if not isinstance(total_steps, int) or total_steps <= 0:
            raise ArgumentError(f"OneCycleLR: the number of steps is a positive integer, got {total_steps}")
        self.total_steps = total_steps
        if not 0 <= pct_start <= 1 or anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(
                f"OneCycleLR: pct_start is between 0 and 1 and anneal_strategy 'cos' or 'linear', got {pct_start} and "
                f"{anneal_strategy!r}"
            )
        self._anneal_func_type = anneal_strategy
        top = float(pct_start * total_steps) - 1
        last = total_steps - 1
        # (last step, lr from, lr to, momentum from, momentum to) of each phase: names of settings of a group
        up = (top, "initial_lr", "max_lr", "max_momentum", "base_momentum")
        down = (last, "max_lr", "min_lr", "base_momentum", "max_momentum")
        back = (float(2 * pct_start * total_steps) - 2, "max_lr", "initial_lr", "base_momentum", "max_momentum")
        out = (last, "initial_lr", "min_lr", "max_momentum", "max_momentum")
        self._phases: list[Any] = [up, back, out] if three_phase else [up, down]
        highest = _per_group("OneCycleLR: max_lr", optimizer, max_lr)
        if last_epoch == -1:
            for group, high in zip(optimizer.param_groups, highest, strict=True):
                group["initial_lr"] = high / div_factor
                group["max_lr"] = high
                group["min_lr"] = group["initial_lr"] / final_div_factor
        self.cycle_momentum = cycle_momentum
        if cycle_momentum:
            self._init_momentum(base_momentum, max_momentum, last_epoch == -1)
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
        lowest = _per_group("CyclicLR: base_lr", optimizer, base_lr)
        if last_epoch == -1:
            for group, low in zip(optimizer.param_groups, lowest, strict=True):
                _set_lr(group, low)
        self.max_lrs = _per_group("CyclicLR: max_lr", optimizer, max_lr)
        down = step_size_up if step_size_down is None else step_size_down
        self.total_size = float(step_size_up) + float(down)
        self.step_ratio = step_size_up / self.total_size
        self._scale_fn_custom = scale_fn
        if scale_fn is None:
            scale_mode = "iterations" if mode == "exp_range" else "cycle"
        self.scale_mode = scale_mode
        if cycle_momentum:
            self._init_momentum(base_momentum, max_momentum, last_epoch == -1)
        self._begin(optimizer, last_epoch, mode=mode, gamma=gamma, cycle_momentum=cycle_momentum)
        self.base_lrs = lowest

    def scale_fn(self, x: float) -> float:
        """The height of cycle (or step) number `x`: at 1, the peak is max_lr."""
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
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ArgumentError(
                f"ReduceLROnPlateau: mode is 'min' or 'max' and threshold_mode 'rel' or 'abs', got {mode!r} and "
                f"{threshold_mode!r}"
            )
        self._attach(optimizer)
        self.default_min_lr = None if isinstance(min_lr, list | tuple) else min_lr
        self.min_lrs = _per_group("ReduceLROnPlateau: min_lr", optimizer, min_lr)
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
        """Whether the last reduction is at most `cooldown` epochs ago."""
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
            self.min_lrs = _per_group("ReduceLROnPlateau: min_lrs", self.optimizer, lowest_of_all)
        for group, old, lowest in zip(self.optimizer.param_groups, self._rates(), self.min_lrs, strict=True):
            new = max(old * self.factor, lowest)
            if old - new > self.eps:
                _set_lr(group, new)


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
    """The first of `schedulers` up to the first of `milestones`, then the next, from its beginning.

    milestones: epochs, one fewer than schedulers

    Raises: ArgumentError if the numbers do not fit, or for schedules of different optimizers.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1
    ) -> None:
        self._set_schedulers(schedulers, optimizer)
        if len(milestones) != len(schedulers) - 1:
            raise ArgumentError(f"SequentialLR: {len(milestones)} milestones between {len(schedulers)} schedules")
        self._milestones = milestones
        self.last_epoch = last_epoch + 1
        # Each schedule did its first step when it was made. Undoes all, and repeats that of the current schedule.
        for group in optimizer.param_groups:
            _set_lr(group, group["initial_lr"])
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
    """All of `schedulers` at every step, each on the rate that the one before it left.

    Raises: ArgumentError for none, or schedules of different optimizers.
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


if not TYPE_CHECKING:  # type checkers need no __all__, and cannot evaluate this
    __all__ = [name for name, value in globals().items() if name[0] != "_" and hasattr(value, "get_last_lr")]
