"""The base of learning-rate schedules, and how a schedule sets the rates of an optimizer's groups."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, StateDictError
from ddp.optim.optimizer import Group, Optimizer, number

# The settings of a parameter group that `LRScheduler.load_state_dict` restores, because making a schedule changes them.
_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"}

# The attributes of schedules that hold functions or schedules. A state dict contains the states of these objects.
_STATEFUL = {"lr_lambdas", "_scale_fn_custom", "_schedulers"}


class LRScheduler:
    """The base of schedules: `get_lr` computes the rates of `last_epoch`.

    last_epoch: -1 to begin; to continue from a checkpoint, the last finished epoch. The groups of the optimizer must
    then have "initial_lr".

    Raises: DtypeError if `optimizer` is not an Optimizer; ArgumentError if "initial_lr" is missing.
    """

    _is_relative = False  # whether `get_lr` computes from the last rates, not from `base_lrs`

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self._begin(optimizer, last_epoch)

    if TYPE_CHECKING:  # for type checkers: `_begin` stores the settings as attributes

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
        """Goes on to the next epoch. Call it after `optimizer.step()`. Raises: ArgumentError if `epoch` is given.

        Warns if the optimizer has made no step before the first call: the first rate would be skipped.
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
        """Sets `last_epoch` back by one step. The rates stay."""
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
            set_lr(group, rate)
        self._last_lr = self._rates()

    def _rates(self) -> list[float]:
        return [_read_lr(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """All attributes except the optimizer. Functions and other schedules are replaced by their state."""
        return {
            name: _state_of(value) if name in _STATEFUL else value
            for name, value in self.__dict__.items()
            if name != "optimizer"
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Keeps the functions and schedules that this one has, and loads their states.

        The optimizer's state dict may be loaded before or after this call, and even before this schedule is made.
        Making a schedule sets the first rates. This call restores the rates and momenta that the optimizer had loaded.

        Raises: StateDictError if `state_dict` is not a dict, or has the state of another number of functions or
        schedules; then nothing has changed.
        """
        if not _can_load(self, state_dict):
            raise StateDictError(
                f"{type(self).__name__}: expected a dict, with the state of each function and schedule, "
                f"got {state_dict!r:.80}"
            )
        self.__dict__.update({name: value for name, value in state_dict.items() if name not in _STATEFUL})
        for name in _STATEFUL & state_dict.keys():
            _load_state(self.__dict__.get(name), state_dict[name])
        for group, loaded in zip(self.optimizer.param_groups, self.optimizer._loaded_settings or (), strict=False):
            set_lr(group, loaded["lr"])
            group.update({**loaded, "lr": group["lr"]})


def _state_of(value: Any) -> Any:
    """The state of a schedule or a callable object; None for a plain function. For a list: the list of the states."""
    if isinstance(value, list):
        return [_state_of(item) for item in value]
    if isinstance(value, LRScheduler):
        return value.state_dict()
    return None if isinstance(value, types.FunctionType) else dict(getattr(value, "__dict__", {})) or None


def _can_load(value: Any, state: Any) -> bool:
    """Whether `state` has the form of a result of `_state_of(value)`."""
    if isinstance(value, list):
        return isinstance(state, list | tuple) and len(state) == len(value) and all(map(_can_load, value, state))
    if isinstance(value, LRScheduler):
        return isinstance(state, Mapping) and all(
            _can_load(vars(value).get(name), state[name]) for name in _STATEFUL & state.keys()
        )
    return value is None or not state or (isinstance(state, Mapping) and hasattr(value, "__dict__"))


def _load_state(value: Any, state: Any) -> None:
    if isinstance(value, list):
        for item, item_state in zip(value, state, strict=True):
            _load_state(item, item_state)
    elif isinstance(value, LRScheduler):
        value.load_state_dict(state)
    elif value is not None and state:
        vars(value).update(state)


# Key: the id of a learning-rate tensor on a GPU. Value: a weak reference to it, its version and its value. Reading the
# value here does not wait for the GPU.
_gpu_rates: dict[int, tuple[Any, int, float]] = {}


def set_lr(group: Group, rate: float) -> None:
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


def per_group(name: str, optimizer: Optimizer, value: Any) -> list[Any]:
    """The values for the groups, as a list. value: one value for all groups, or a list or tuple of one value per group.

    Raises: ArgumentError for a list or tuple of another length.
    """
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ArgumentError(f"{name}: {len(value)} values for {groups} parameter groups")
    return list(value)
