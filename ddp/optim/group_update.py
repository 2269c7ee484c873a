"""The update of the parameters of a group by the optimizer's formula.

On the CPU, one call of `run_program` updates all parameters of a dtype, if they have the same count of updates or if
the formula does not read `step`. A 16-bit parameter takes a call of its own. So does a parameter if one of the arrays
(its own, its gradient, its states) is not C-contiguous, or their dtypes differ. The optimizer's `state` has a dict for
each parameter. If other code replaces a gradient's buffer, a parameter's array or a state, the next step uses the new
one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np

from ddp._device import device, to_device
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.ops.update import Program, UpdateRows, run_program
from ddp.optim.formula import Formula, compile_formula
from ddp.optim.optimizer import Group, number

Array = Any

# The names in a formula of the two numbers in the setting "betas".
_BETAS = ("beta1", "beta2")


def settings(formula: Formula, group: Group) -> list[float]:
    """The values of a formula's settings, as numbers. beta1 and beta2 are the two numbers of "betas"."""
    return [group["betas"][_BETAS.index(name)] if name in _BETAS else number(group[name]) for name in formula.settings]


class GroupUpdate:
    """The parameters of one group on one device, their state, and their update on the CPU.

    optimizer: a `FormulaOptimizer`; names: the names of each parameter's states, without "step" and "mu_product"
    """

    def __init__(self, optimizer: Any, group: Group, device: device, names: tuple[str, ...]) -> None:
        self.group = group
        self.names = names
        # Weak, because the optimizer refers to this object: a cycle would live until the garbage collector runs.
        self._optimizer = weakref.proxy(optimizer)
        self._device = device
        self._xp = device.xp
        self._params: list[Tensor] = []
        self._arrays: list[Array] = []  # of the parameters
        self._states: list[dict[str, Array]] = []  # of each parameter, by name
        # (n, 2): for each parameter the count of its updates, and the product of the optimizer's factor over these. SGD
        # has no "step" in its state, but needs the count: its dampening begins with the second update.
        self._steps: Array = np.zeros((0, 2), np.float32)
        # Prepared updates of several parameters at once. On the CPU, the key is the tuple of the parameters' indices.
        self._plans: dict[Any, Any] = {}

    def step(self, params: Sequence[Tensor]) -> None:
        """Updates the parameters that have a gradient."""
        buffers = [None if p.accumulate_grad is None else p.accumulate_grad.grad_buffer for p in params]
        gradients = {index: buffer.array for index, buffer in enumerate(buffers) if buffer is not None and buffer.full}
        eager = self._optimizer.eager
        if not gradients and not (eager and buffers):
            return
        self._check_params(params)
        if self.names:
            self._check_state(range(len(params)) if eager else gradients)
        formula = compile_formula(tuple(self._optimizer.formula(self.group)), self.names, self._optimizer.factor)
        self._update(formula, gradients)
        for index in gradients:
            params[index].version.count += 1

    def _update(self, formula: Formula, gradients: dict[int, Array]) -> None:
        """Updates the parameters whose indices are in `gradients`."""
        # Key: a row of `_steps` before this update, (count of updates, product of the optimizer's factor over them).
        # Value: the indices of the parameters with this row. If the formula does not read `step`, there is one batch.
        batches: dict[tuple[float, float], list[int]] = {(0.0, 1.0): [*gradients]}
        if formula.counts:
            steps = self._steps.tolist()
            batches = {}
            for index in gradients:
                batches.setdefault(tuple(steps[index]), []).append(index)
        if self.names:
            # Indexing by a list takes several times as long as by a slice, for an array this small.
            updated = slice(None) if len(gradients) == len(self._steps) else [*gradients]
            self._steps[updated, 0] += 1
        if len(self._plans) > len(batches):  # some plans are for other combinations of parameters
            self._plans.clear()
        values = settings(formula, self.group)
        for (count, product), numbers in batches.items():
            if formula.factor != "1":
                product = float(np.float32(product) * np.float32(formula.evaluate_factor(count + 1, *values)))
                self._steps[numbers, 1] = product
            rows = [(self._arrays[index], gradients[index], *self._states[index].values()) for index in numbers]
            plan = self._plans.get(tuple(numbers))
            if plan is None or not plan.is_of(rows):
                plan = ParameterRows(rows)
                self._plans[tuple(numbers)] = plan
            plan.run(formula.program, formula.evaluate(count + 1, *values, product))

    def _check_params(self, params: Sequence[Tensor]) -> None:
        """Resets all states and counts if `params` changed, and a parameter's states if its array was replaced."""
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            self._set_params(params)
        for index, p in enumerate(params):
            if p.array is not self._arrays[index]:
                self._arrays[index] = p.array
                self._states[index] = {}
                self._plans.clear()

    def _set_params(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._arrays = [None] * len(params)
        self._states = [{} for _ in params]
        self._steps = self._xp.zeros((len(params), 2), np.float32)
        self._steps[:, 1] = 1

    def _check_state(self, indices: Iterable[int]) -> None:
        """Creates missing state of these parameters, and imports state that other code put into `optimizer.state`."""
        state = self._optimizer.state
        counted = self._optimizer.counted
        for index in indices:
            entry = state.get(self._params[index])
            arrays = self._states[index]
            if (
                entry is None
                or len(arrays) != len(self.names)
                or any(getattr(entry.get(name), "array", None) is not array for name, array in arrays.items())
                or (counted and getattr(getattr(entry.get("step"), "array", None), "base", None) is not self._steps)
            ):
                self._import_state(index)

    def _import_state(self, index: int) -> None:
        entry = self._optimizer.state[self._params[index]]
        param = self._arrays[index]
        if self._optimizer.counted:
            self._import_count(index, 0, "step")
            if self._optimizer.factor != "1":
                self._import_count(index, 1, "mu_product")
        elif any(entry.get(name) is None for name in self.names):
            self._steps[index, 0] = 0
        elif not self._states[index]:
            # The state comes from `optimizer.state`, for example after it was loaded, and contains no count of updates.
            # SGD only needs to know that there was an update.
            self._steps[index, 0] = 1
        for name in self.names:
            value = entry.get(name)
            state = self._states[index].get(name)
            array = None if value is None else self._as_array(name, value, param.shape)
            if state is None and array is not None and self._is_updatable(array, param):
                self._states[index][name] = array  # without a copy, since other processes may share the memory
                entry[name] = value if isinstance(value, TensorBase) else wrap(array, self._device)
                self._plans.clear()
                continue
            if state is None:
                state = self._empty_like(param)
                self._states[index][name] = state
                self._plans.clear()
            state[...] = self._optimizer.initial(self.group) if array is None else array
            entry[name] = wrap(state, self._device)

    def _import_count(self, index: int, column: int, name: str) -> None:
        entry = self._optimizer.state[self._params[index]]
        # The initial value is the column's number: a count of 0 in column 0, a product of 1 in column 1.
        self._steps[index, column] = column if entry.get(name) is None else self._as_array(name, entry[name], ())
        entry[name] = wrap(self._steps[index, column : column + 1].reshape(()), self._device)

    def _as_array(self, name: str, value: Any, shape: tuple[int, ...]) -> Array:
        """A state as an array on this device. Raises: StateDictError if its shape is not `shape`."""
        if isinstance(value, TensorBase):
            value = value.array
        if np.shape(value) not in (shape, shape or (1,)):
            raise StateDictError(f"state {name!r} of shape {np.shape(value)} for a parameter of {shape}")
        return to_device(value, self._device).reshape(shape) if hasattr(value, "shape") else np.asarray(value)

    def _is_updatable(self, array: Array, param: Array) -> bool:
        """Whether a state can be updated in place; otherwise it is copied once."""
        return array.dtype == param.dtype and array.flags.c_contiguous and array.flags.writeable

    def _empty_like(self, param: Array) -> Array:
        return np.empty(param.shape, param.dtype)


class ParameterRows:
    """Parameters that are updated together, prepared for `run_program`. rows: each (p, grad, state, ...)"""

    def __init__(self, rows: Sequence[tuple[Array, ...]]) -> None:
        self._arrays = [array for row in rows for array in row]
        by_dtype: dict[Any, list[tuple[Array, ...]]] = {}
        self._to_copy = []
        for row in rows:
            dtype = row[0].dtype
            if dtype.itemsize > 2 and all(array.dtype == dtype and array.flags.c_contiguous for array in row):
                by_dtype.setdefault(dtype, []).append(row)
            else:
                self._to_copy.append(row)
        self._in_place = [(dtype, UpdateRows(of_dtype)) for dtype, of_dtype in by_dtype.items()]

    def is_of(self, rows: Sequence[tuple[Array, ...]]) -> bool:
        """Whether this was made from the same arrays as `rows`."""
        arrays = [array for row in rows for array in row]
        return len(arrays) == len(self._arrays) and all(map(is_, arrays, self._arrays))

    def run(self, program: Program, scalars: Sequence[float]) -> None:
        """Updates the parameters and their states."""
        for dtype, rows in self._in_place:
            run_program(np, program, np.array(scalars, dtype), rows)
        for row in self._to_copy:
            # 16-bit parameters are computed in float32 and rounded once, which may overflow to infinity.
            compute = np.dtype(np.float32) if row[0].dtype.itemsize == 2 else row[0].dtype
            copies = [np.array(array, compute, order="C") for array in row]
            run_program(np, program, np.array(scalars, compute), UpdateRows([tuple(copies)]))
            with np.errstate(all="ignore"):
                for target, source in zip((row[0], *row[2:]), (copies[0], *copies[2:]), strict=True):
                    target[...] = source
