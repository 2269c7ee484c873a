"""Schedules given by a function of the epoch."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from ddp.errors import DtypeError
from ddp.optim._optimizer import Optimizer
from ddp.optim.lr_scheduler._scheduler import LRScheduler, per_group

Function = Callable[[int], float]


class _Lambda(LRScheduler):
    """Functions are not saved; callable objects are, by their attributes."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Function | list[Function], last_epoch: int = -1) -> None:
        self._attach(optimizer)
        self.lr_lambdas: list[Function] = per_group(type(self).__name__, optimizer, lr_lambda)
        for function in self.lr_lambdas:
            if not callable(function):
                raise DtypeError(f"{type(self).__name__}: lr_lambda is a function, not {type(function).__name__}")
        super().__init__(optimizer, last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and the functions; of callable objects their attributes."""
        state = super().state_dict()
        state["lr_lambdas"] = [
            None if isinstance(function, types.FunctionType) else dict(function.__dict__)
            for function in self.lr_lambdas
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned; functions stay those that were given here."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "lr_lambdas"})
        for function, attributes in zip(self.lr_lambdas, state_dict["lr_lambdas"], strict=True):
            if attributes is not None:
                function.__dict__.update(attributes)


class LambdaLR(_Lambda):
    """The base rate times lr_lambda(epoch). lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        return [base * function(self.last_epoch) for function, base in zip(self.lr_lambdas, self.base_lrs, strict=True)]


class MultiplicativeLR(_Lambda):
    """The present rate times lr_lambda(epoch), from epoch 1 on. lr_lambda: a function, or one for each group."""

    def get_lr(self) -> list[float]:
        if self._is_initial:
            return self._rates()
        return [rate * function(self.last_epoch) for function, rate in zip(self.lr_lambdas, self._rates(), strict=True)]
