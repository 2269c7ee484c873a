"""Schedules made of schedules: one after another, or all at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ddp.errors import ArgumentError, DtypeError
from ddp.optim._optimizer import Optimizer
from ddp.optim.lr_scheduler._plateau import ReduceLROnPlateau
from ddp.optim.lr_scheduler._scheduler import LRScheduler, set_lr


class _Composed(LRScheduler):
    _schedulers: Sequence[LRScheduler]

    def _take(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None) -> None:
        kind = type(self).__name__
        if not schedulers:
            raise ArgumentError(f"{kind}: there is no schedule")
        for position, each in enumerate(schedulers):
            if not isinstance(each, LRScheduler):
                raise DtypeError(f"{kind}: number {position} is {type(each).__name__}, not a schedule")
            if isinstance(each, ReduceLROnPlateau):
                raise ArgumentError(f"{kind}: number {position} is ReduceLROnPlateau, whose step wants a metric")
        self._attach(optimizer or schedulers[0].optimizer)
        for position, each in enumerate(schedulers):
            if each.optimizer is not self.optimizer:
                raise ArgumentError(f"{kind}: number {position}, {type(each).__name__}, is of another optimizer")
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer; the state dict of each schedule."""
        return {**super().state_dict(), "_schedulers": [each.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "_schedulers"})
        for each, state in zip(self._schedulers, state_dict["_schedulers"], strict=True):
            each.load_state_dict(state)


class SequentialLR(_Composed):
    """The first of `schedulers` up to the first of `milestones`, then the next, from its beginning.

    milestones: epochs, one fewer than schedulers

    Raises: ArgumentError if the numbers do not fit, or for schedules of different optimizers.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1
    ) -> None:
        self._take(schedulers, optimizer)
        if len(milestones) != len(schedulers) - 1:
            raise ArgumentError(f"SequentialLR: {len(milestones)} milestones between {len(schedulers)} schedules")
        self._milestones = milestones
        self.last_epoch = last_epoch + 1
        # Each schedule made its first step when it was made: all are taken back, and the first one's made again.
        for group in optimizer.param_groups:
            set_lr(group, group["initial_lr"])
        _undo(self)
        first = schedulers[bisect_right(milestones, 0)]
        first._initial_step()
        self._last_lr = first.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next epoch. Raises: ArgumentError for another one."""
        if epoch is not None:
            raise ArgumentError("SequentialLR: step() goes on to the next epoch, and to no other")
        self.last_epoch += 1
        position = bisect_right(self._milestones, self.last_epoch)
        scheduler = self._schedulers[position]
        if position > 0 and self._milestones[position - 1] == self.last_epoch:
            scheduler._update_lr(0)
        else:
            scheduler.step()
        self._last_lr = scheduler.get_last_lr()


class ChainedScheduler(_Composed):
    """All of `schedulers` at every step, each on the rate that the one before it left.

    Raises: ArgumentError for none, or schedules of different optimizers.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        self._take(schedulers, optimizer)
        self._last_lr = self._rates()

    def _initial_step(self) -> None:
        for each in self._schedulers:
            each._step_count = 0  # what follows is a first step once more
        self.step()

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next epoch. Raises: ArgumentError for another one."""
        if epoch is not None:
            raise ArgumentError("ChainedScheduler: step() goes on to the next epoch, and to no other")
        for each in self._schedulers:
            each.step()
        self._last_lr = self._rates()


def _undo(scheduler: LRScheduler) -> None:
    """Takes back one step of a schedule, or of all that it is made of."""
    if isinstance(scheduler, _Composed):
        for each in scheduler._schedulers:
            _undo(each)
    else:
        scheduler.last_epoch -= 1
