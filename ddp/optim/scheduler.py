"""`LRScheduler`: sets the learning rate of every parameter group, once an epoch or once a step.

The next rate is computed from the present one where it can be, so that schedules compose: each multiplies what the
others left.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError
from ddp.optim.optimizer import Group, Optimizer, number


class LRScheduler:
    """The base of schedules: `get_lr` computes the rates of `last_epoch`.

    last_epoch: -1 to begin; to go on from a checkpoint, the last one that was finished, and the optimizer's groups then
    have their "initial_lr"

    Raises: DtypeError for what is no optimizer; ArgumentError where "initial_lr" is missing.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self._attach(optimizer)
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
        self._is_initial = self._get_lr_called_within_step = False

    def _initial_step(self) -> None:
        """Sets the rates of the first epoch; those of a checkpoint are there already."""
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
        """The rate of each group at `last_epoch`: called by `step`; others want `get_last_lr`."""
        raise NotImplementedError(f"{type(self).__name__} defines no get_lr()")

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next epoch, or to `epoch` by the closed form where there is one: after `optimizer.step()`.

        Warns if the optimizer has made no step before the second call: the first rate would be skipped.
        """
        if self._step_count == 1 and not self.optimizer._stepped:
            warnings.warn(
                f"{type(self).__name__}.step() before optimizer.step(): the first rate of the schedule is skipped",
                UserWarning,
                stacklevel=2,
            )
        self._step_count += 1
        self._update_lr(epoch)

    def _update_lr(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._get_lr_called_within_step = True
        try:
            closed = None if epoch is None else self._closed_form()
            rates = self.get_lr() if closed is None else closed
        finally:
            self._get_lr_called_within_step = False
        self._set(rates)

    def _closed_form(self) -> list[float] | None:
        """The rates at `last_epoch` from the base rates alone; None where there is no such formula."""
        return None

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            set_lr(group, rate)
        self._last_lr = self._rates()

    def _rates(self) -> list[float]:
        return rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer."""
        return {name: value for name, value in self.__dict__.items() if name != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.__dict__.update(state_dict)


def rates(optimizer: Optimizer) -> list[float]:
    """The rate of each group, as a Python number."""
    return [_read(group["lr"]) for group in optimizer.param_groups]


def set_lr(group: Group, rate: float) -> None:
    """Gives a group its rate; a tensor keeps its identity, since others may hold it."""
    held = group["lr"]
    if isinstance(held, Tensor):
        held.fill_(rate)
        if held.device.type != "cpu":
            _written[id(held)] = weakref.ref(held), held.version.count, float(np.asarray(rate, held.dtype))
    else:
        group["lr"] = rate


# (tensor, its version, what was written then) by id, of rates on GPUs: so that a schedule need not wait to read them.
_written: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}


def _read(rate: Any) -> Any:
    known = _written.get(id(rate))
    if known is not None and isinstance(rate, Tensor) and known[0]() is rate and known[1] == rate.version.count:
        return known[2]
    return number(rate)


def per_group(name: str, optimizer: Optimizer, value: Any) -> list[Any]:
    """`value` for each group: itself, or one of a list. Raises: ArgumentError for a list of another length."""
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ArgumentError(f"{name}: {len(value)} values for {groups} parameter groups")
    return list(value)
