"""What `Checkpointer` is given, checked before anything is made of it."""

from __future__ import annotations

from typing import Any

from ddp.checkpoint._state import Training
from ddp.errors import ArgumentError, DtypeError
from ddp.nn import Module
from ddp.optim import Optimizer


def checked(model: Any, optimizer: Any, scheduler: Any, scaler: Any, user: Any) -> Training:
    """What training changes. Raises: DtypeError."""
    if model is not None and not isinstance(model, Module):
        raise DtypeError(f"Checkpointer: model is a Module or a DataParallel, not {type(model).__name__}")
    optimizers, schedulers = _listed(optimizer), _listed(scheduler)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise DtypeError(f"Checkpointer: optimizer is an Optimizer, or a list of them, not {type(each).__name__}")
    for each in schedulers:
        _check_stateful("scheduler", each)
    if scaler is not None:
        _check_stateful("scaler", scaler)
    if user is not None and not isinstance(user, dict):
        _check_stateful("user", user)
    return Training(model=model, optimizers=optimizers, schedulers=schedulers, scaler=scaler, user=user)


def check_times(every: Any, every_seconds: Any) -> None:
    """Raises: ArgumentError."""
    if every is not None and (type(every) is not int or every < 1):
        raise ArgumentError(f"Checkpointer: every is a number of steps of at least 1, or None, got {every!r}")
    if every_seconds is not None and (not isinstance(every_seconds, int | float) or not every_seconds > 0):
        raise ArgumentError(f"Checkpointer: every_seconds is above 0, or None, got {every_seconds!r}")


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _check_stateful(what: str, given: Any) -> None:
    if not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
        raise DtypeError(f"Checkpointer: {what} has state_dict and load_state_dict, {type(given).__name__} has not")
