"""The update of a parameter group by its formula: one call for all of its parameters.

To the outside, state is a dict beside each parameter. Whatever is replaced from outside (a gradient's buffer, a
parameter's array, the state itself) is noticed at the next step, and followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np

from ddp._device import CPU, capturing, device, place
from ddp._engine import enable_grad
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.ops.update import Program, UpdateRows, run_program
from ddp.optim.formula import Formula, compile_formula
from ddp.optim.optimizer import Closure, Group, Optimizer, number

Array = Any

_BETAS = ("beta1", "beta2")
_device_of = attrgetter("_device")


class FormulaOptimizer(Optimizer):
    """An optimizer given by the names of its states and a formula that treats each element alone.

    counted: whether each parameter's state has a "step" that counts its updates
    factor: an expression of settings and `step`, the factor of an update; each parameter's state then has the product
    over its updates as "mu_product", float32 as PyTorch's
    eager: state begins for all parameters at the first step, not with a parameter's first gradient
    found_inf: a float32 on the GPU, set by a GradScaler around a step: where it is not zero, the step is left out on
    the GPU, without the host's knowledge
    """

    counted = True
    factor = "1"
    eager = False
    found_inf: Any = None
    _step_supports_amp_scaling = True  # PyTorch's name for it

    def _prepare(self) -> None:
        super()._prepare()
        self._updates: dict[tuple[int, device], GroupUpdate] = {}

    def states(self, group: Group) -> tuple[str, ...]:
        """The states that a parameter of this group has, apart from "step"."""
        raise NotImplementedError

    def initial(self, group: Group) -> float:
        """What a state starts as."""
        return 0.0

    def formula(self, group: Group) -> list[str]:
        """The update as lines of `ddp.optim.formula`."""
        raise NotImplementedError

    def step(self, closure: Closure | None = None) -> Any:
        """Updates every parameter that has a gradient, in place; gradients are only read. On a GPU nothing waits.

        closure: computes the loss and its gradients anew, with recording on; step returns what it returns
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        for group in self.param_groups:
            devices = dict.fromkeys(map(_device_of, group["params"]))
            for where in devices:
                params = group["params"] if len(devices) == 1 else [p for p in group["params"] if p.device is where]
                self._update_of(group, where).step(params)
        if capturing.now is not None:
            capturing.now.after(self._note_step)
        return loss

    def _update_of(self, group: Group, where: device) -> GroupUpdate:
        states = self.states(group)
        known = self._updates.get((id(group), where))
        if known is None or known.group is not group or known.names != states:
            if where is CPU:
                known = GroupUpdate(self, group, where, states)
            else:
                from ddp.optim.device_update import DeviceUpdate  # only where there is a GPU

                known = DeviceUpdate(self, group, where, states)
            self._updates[id(group), where] = known
        return known


def descent(group: Group, decoupled: bool = False) -> list[str]:
    """The lines of a formula that define d: grad + weight_decay*p, or -grad + weight_decay*p to maximize.

    decoupled: the weight decay shrinks p instead, and d goes without it
    """
    sign, decays = "-" if group["maximize"] else "", number(group["weight_decay"])
    if decays and not decoupled:
        return [f"d = p * weight_decay {sign or '+'} grad"]
    return [*(["p = p * (1 - lr * weight_decay)"] if decays else []), f"d = {sign}grad"]


def settings(formula: Formula, group: Group) -> list[float]:
    """The settings that a formula reads, as numbers; beta1 and beta2 are those of "betas"."""
    return [group["betas"][_BETAS.index(name)] if name in _BETAS else number(group[name]) for name in formula.settings]


class GroupUpdate:
    """The parameters of one group on one device, their state, and their update on the CPU.

    names: the states of each parameter, apart from "step"
    """

    def __init__(self, optimizer: FormulaOptimizer, group: Group, where: device, names: tuple[str, ...]) -> None:
        self.group, self.names = group, names
        # Weak: the optimizer holds this, and a cycle would keep its parameters until the garbage collector runs.
        self._optimizer = weakref.proxy(optimizer)
        self._where, self._xp = where, where.xp
        self._params: list[Tensor] = []
        self._arrays: list[Array] = []
        self._states: list[dict[str, Array]] = []  # of each parameter: what its state dict holds
        # (n, 2): counts of updates, and products of the optimizer's factor over them. Also where no state dict shows
        # them: SGD's dampening begins with the second one.
        self._steps: Array = np.zeros((0, 2), np.float32)
        self._plans: dict[Any, Any] = {}  # what is updated together, by the parameters that have gradients

    def step(self, params: Sequence[Tensor]) -> None:
        """Updates those of `params` that have a gradient."""
        buffers = [None if p.maybe_leaf is None else p.maybe_leaf.grad_buffer for p in params]
        full = {index: buffer.array for index, buffer in enumerate(buffers) if buffer is not None and buffer.full}
        everything = self._optimizer.eager
        if not full and not (everything and buffers):
            return
        self._follow(params)
        if self.names:
            self._hold_state(range(len(params)) if everything else full)
        formula = compile_formula(tuple(self._optimizer.formula(self.group)), self.names, self._optimizer.factor)
        self._update(formula, full)
        for index in full:
            params[index].version.count += 1

    def _update(self, formula: Formula, full: dict[int, Array]) -> None:
        """full: the gradients that are there, by the numbers of their parameters"""
        members: dict[tuple[float, float], list[int]] = {(0.0, 1.0): [*full]}  # by the steps that they have made
        if formula.counts:
            ages = self._steps.tolist()
            members = {}
            for index in full:
                members.setdefault(tuple(ages[index]), []).append(index)
        if self.names:
            self._steps[[*full], 0] += 1
        if len(self._plans) > len(members):  # those of other gradients, or of other ages
            self._plans.clear()
        values = settings(formula, self.group)
        for (age, product), numbers in members.items():
            if formula.factor != "1":
                product = float(np.float32(product) * np.float32(formula.evaluate_factor(age + 1, *values)))
                self._steps[numbers, 1] = product
            rows = [(self._arrays[index], full[index], *self._states[index].values()) for index in numbers]
            batch = self._plans.get(tuple(numbers))
            if batch is None or not batch.holds(rows):
                batch = self._plans[tuple(numbers)] = ParameterRows(rows)
            batch.run(formula.program, formula.evaluate(age + 1, *values, product))

    def _follow(self, params: Sequence[Tensor]) -> None:
        """Notices other parameters, and parameters with other arrays."""
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            self._lay_out(params)
        for index, p in enumerate(params):
            if p.array is not self._arrays[index]:
                self._arrays[index], self._states[index] = p.array, {}
                self._plans.clear()

    def _lay_out(self, params: Sequence[Tensor]) -> None:
        self._params, self._arrays, self._states = list(params), [None] * len(params), [{} for _ in params]
        self._steps = self._xp.zeros((len(params), 2), np.float32)
        self._steps[:, 1] = 1

    def _hold_state(self, wanted: Iterable[int]) -> None:
        """Begins the state of these parameters, or takes over what their state dicts hold."""
        state, counted = self._optimizer.state, self._optimizer.counted
        for index in wanted:
            entry, known = state.get(self._params[index]), self._states[index]
            if (
                entry is None
                or len(known) != len(self.names)
                or any(getattr(entry.get(name), "array", None) is not array for name, array in known.items())
                or (counted and getattr(getattr(entry.get("step"), "array", None), "base", None) is not self._steps)
            ):
                self._take_state(index)

    def _take_state(self, index: int) -> None:
        entry, param = self._optimizer.state[self._params[index]], self._arrays[index]
        if self._optimizer.counted:
            self._take_count(index, 0, "step")
            if self._optimizer.factor != "1":
                self._take_count(index, 1, "mu_product")
        elif any(entry.get(name) is None for name in self.names):
            self._steps[index, 0] = 0
        elif not self._states[index]:
            self._steps[index, 0] = 1
        for name in self.names:
            value, held = entry.get(name), self._states[index].get(name)
            array = None if value is None else self._read(name, value, param.shape)
            if held is None and array is not None and self._fits(array, param):
                self._states[index][name] = array  # in place: other processes may share it
                entry[name] = value if isinstance(value, TensorBase) else wrap(array, self._where)
                self._plans.clear()
                continue
            if held is None:
                held = self._states[index][name] = self._empty_like(param)
                self._plans.clear()
            held[...] = self._optimizer.initial(self.group) if array is None else array
            entry[name] = wrap(held, self._where)

    def _take_count(self, index: int, column: int, name: str) -> None:
        entry = self._optimizer.state[self._params[index]]
        # At first no step, in column 0, and a product of 1, in column 1.
        self._steps[index, column] = column if entry.get(name) is None else self._read(name, entry[name], ())
        entry[name] = wrap(self._steps[index, column : column + 1].reshape(()), self._where)

    def _read(self, name: str, value: Any, shape: tuple[int, ...]) -> Array:
        """A state as an array here. Raises: StateDictError for a shape that is not its parameter's."""
        if isinstance(value, TensorBase):
            value = value.array
        if np.shape(value) not in (shape, shape or (1,)):
            raise StateDictError(f"state {name!r} of shape {np.shape(value)} for a parameter of {shape}")
        return place(value, self._where).reshape(shape) if hasattr(value, "shape") else np.asarray(value)

    def _fits(self, array: Array, param: Array) -> bool:
        """Whether a state can be updated where it is."""
        return array.dtype == param.dtype and array.flags.c_contiguous and array.flags.writeable

    def _empty_like(self, param: Array) -> Array:
        return np.empty(param.shape, param.dtype)


class ParameterRows:
    """Parameters with their gradients and states, which are updated together.

    rows: (p, grad, state, ...) of each
    """

    def __init__(self, rows: Sequence[tuple[Array, ...]]) -> None:
        self._arrays = [array for row in rows for array in row]
        plain: dict[Any, list[tuple[Array, ...]]] = {}
        self._others = []
        for row in rows:
            dtype = row[0].dtype
            if dtype.itemsize > 2 and all(each.dtype == dtype and each.flags.c_contiguous for each in row):
                plain.setdefault(dtype, []).append(row)
            else:
                self._others.append(row)
        self._plain = [(dtype, UpdateRows(of_dtype)) for dtype, of_dtype in plain.items()]

    def holds(self, rows: Sequence[tuple[Array, ...]]) -> bool:
        """Whether it was made of these arrays."""
        arrays = [array for row in rows for array in row]
        return len(arrays) == len(self._arrays) and all(map(is_, arrays, self._arrays))

    def run(self, program: Program, scalars: Sequence[float]) -> None:
        """Updates the parameters and their states."""
        for dtype, rows in self._plain:
            run_program(np, program, np.array(scalars, dtype), rows)
        for row in self._others:
            # 16-bit numbers are computed with in float32, and rounded once, maybe to infinity.
            wide = np.dtype(np.float32) if row[0].dtype.itemsize == 2 else row[0].dtype
            copies = [np.array(each, wide, order="C") for each in row]
            run_program(np, program, np.array(scalars, wide), UpdateRows([tuple(copies)]))
            with np.errstate(all="ignore"):
                for target, source in zip((row[0], *row[2:]), (copies[0], *copies[2:]), strict=True):
                    target[...] = source
