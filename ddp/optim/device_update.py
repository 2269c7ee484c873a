"""The update of a parameter group on a GPU: two launches for all parameters of a dtype.

The host never waits. A step copies nothing to the device if no array was replaced since the last step: tables of
addresses are cached, steps are counted on the device, and settings are arguments of the launch. In a CUDA graph, or if
the learning rate is a tensor on the GPU, settings are in device memory. Then changed settings are copied there before
the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._cuda import array_table, optimizer_kernels
from ddp._cuda.array_table import ArrayTable, SeenArrays, address, dense_order
from ddp._device import capturing, on
from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp.errors import CaptureError
from ddp.ops.arrays import compute_dtype
from ddp.ops.memory_formats import empty_in_order
from ddp.optim.formula import Formula
from ddp.optim.group_update import GroupUpdate, settings

Array = Any

# The maximum number of cached lists of batches. Each list is for one combination of addresses of gradients.
MAX_CACHED = 8

# Pairs (target, source).
Copies = list[tuple[Array, Array]]


class Batch(NamedTuple):
    """The parameters of one dtype that have a gradient. scalars: memory for the scalars of the formula

    before, after: the copies to make before and after the update. Copied are parameters with gaps in memory, and
    gradients with another layout or dtype than their parameter
    """

    dtype: Any
    table: ArrayTable
    scalars: Array
    before: Copies
    after: Copies


class DeviceUpdate(GroupUpdate):
    """The parameters of one group on one GPU, and their update."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Settings in device memory, used if the learning rate is a tensor on the GPU.
        self._settings: Array | None = None
        # The formula and the values that were last copied to `_settings`.
        self._copied: Any = None

    def step(self, params: Sequence[Tensor]) -> None:
        """Updates the parameters that have a gradient, with this GPU as the current device."""
        with on(self._device):
            super().step(params)

    def _update(self, formula: Formula, gradients: dict[int, Array]) -> None:
        xp = self._xp
        graph = capturing.now
        found_inf = self._optimizer.found_inf
        source = optimizer_kernels.kernels(
            tuple(formula.device_lines), tuple(formula.scalars), formula.settings, formula.states, formula.factor
        )
        batches = self._find_batches(formula, gradients)
        values, rate = self._values(formula)
        device_settings = None
        if graph is not None:
            device_settings = self._settings_of_graph(graph, formula, batches, [*gradients])
        elif rate is not None:
            if self._settings is None:
                self._settings = xp.empty(optimizer_kernels.SETTINGS, np.float64)
            device_settings = self._settings
            if (formula, values) != self._copied:
                device_settings[: len(values)] = xp.asarray(values, np.float64)
                self._copied = (formula, values)
        if device_settings is not None and rate is not None:
            position = formula.settings.index("lr")
            device_settings[position : position + 1] = rate.reshape(1)
        for batch in batches:
            _copy_all(batch.before)
            optimizer_kernels.update(
                xp,
                source,
                batch.dtype,
                batch.table,
                self._steps,
                batch.scalars,
                found_inf,
                device_settings,
                values,
            )
            _copy_all(batch.after)
        if graph is not None:
            updated = [self._params[index] for index in gradients]
            graph.after(lambda: _count_write(updated))

    def _values(self, formula: Formula) -> tuple[Sequence[float], Array | None]:
        """The settings' values, and the learning rate's array if it is on a GPU (then "lr" is 0 in the values)."""
        rate = self.group["lr"]
        if isinstance(rate, TensorBase) and rate.device.type != "cpu":
            return settings(formula, {**self.group, "lr": 0.0}), rate.array
        return settings(formula, self.group), None

    def _settings_of_graph(self, graph: Any, formula: Formula, batches: list[Batch], indices: Iterable[int]) -> Array:
        """Allocates settings in device memory for a graph, and registers their update before each launch.

        Also makes the graph valid only for the present formula and parameters.
        indices: of the parameters that have a gradient
        """
        xp = self._xp
        group = self.group
        optimizer = self._optimizer.formula.__self__  # not the weak proxy: the graph keeps the optimizer alive
        with graph.persistent(xp):
            device_settings = xp.empty(optimizer_kernels.SETTINGS, np.float64)
        params = self._params
        state = None
        copied = None
        if optimizer.eager:
            indices = range(len(params))

        def update_device() -> None:
            nonlocal state, copied
            if copied is None:  # before the first launch: a copy within the capture would be repeated by every launch
                for batch in batches:
                    batch.table.fill(xp)
            if optimizer.state is not state:  # before the first launch, and after load_state_dict
                state = optimizer.state
                super(DeviceUpdate, self)._check_state(indices)
            values = self._values(formula)[0]
            if values != copied:
                device_settings[: len(values)] = xp.asarray(values, np.float64)
                copied = values

        graph.before(update_device)
        graph.keep_alive(device_settings, batches, self._steps, self._states, self._arrays)
        # An id identifies an array here, because the graph keeps the captured arrays alive.
        graph.guard_value(lambda: (optimizer.formula(group), len(group["params"]), [id(p.array) for p in params]))
        return device_settings

    def _check_state(self, indices: Iterable[int]) -> None:
        if capturing.now is None:  # for a graph, `update_device` checks before a launch if `optimizer.state` is new
            super()._check_state(indices)
        elif any(not self._states[index] for index in indices):
            raise self._state_in_capture()

    def _set_params(self, params: Sequence[Tensor]) -> None:
        if capturing.now is not None:
            raise self._state_in_capture()
        super()._set_params(params)

    def _state_in_capture(self) -> CaptureError:
        return CaptureError(
            f"{type(self._optimizer).__name__}: state that begins within a capture would begin anew with every "
            "replay; make a step with these parameters before"
        )

    def _is_updatable(self, array: Array, param: Array) -> bool:
        return array.dtype == param.dtype and dense_order(array) == _order(param)

    def _empty_like(self, param: Array) -> Array:
        return empty_in_order(self._xp, param.shape, param.dtype, _order(param))

    def _find_batches(self, formula: Formula, gradients: dict[int, Array]) -> list[Batch]:
        """The batches of the parameters that have a gradient, cached by the addresses of the gradients."""
        xp = self._xp
        graph = capturing.now
        arrays: list[Array | None] = [gradients.get(index) for index in range(len(self._params))]
        context = (array_table.stream_key(xp), formula)
        last = self._plans.get(None)  # the last step's batches: comparing arrays by identity is faster
        if graph is None and last is not None and last[0] == context and last[1].are(arrays):
            return last[2]
        key = (context, *[None if g is None else (address(g), g.strides) for g in arrays])
        batches = self._plans.get(key) if graph is None else None
        if batches is None:
            batches = []
            for dtype in dict.fromkeys(array.dtype for array in self._arrays):
                indices = [index for index in gradients if self._arrays[index].dtype == dtype]
                if indices:
                    batches.append(self._batch(formula, dtype, indices, gradients))
        if graph is not None:
            graph.keep_alive(arrays)
            return batches
        if key not in self._plans:
            for batch in batches:
                batch.table.fill(xp)
            if len(self._plans) > MAX_CACHED:
                self._plans.clear()
            self._plans[key] = batches
        self._plans[None] = (context, SeenArrays(arrays), batches)
        return batches

    def _batch(self, formula: Formula, dtype: Any, indices: list[int], gradients: dict[int, Array]) -> Batch:
        xp = self._xp
        before: Copies = []
        after: Copies = []
        rows = []
        for index in indices:
            param = self._arrays[index]
            grad = gradients[index]
            order = _order(param)
            if dense_order(param) is None:
                copy = empty_in_order(xp, param.shape, param.dtype, order)
                before.append((copy, param))
                after.append((param, copy))
                param = copy
            if grad.dtype != param.dtype or not _same_layout(grad, param):
                copy = empty_in_order(xp, param.shape, param.dtype, order)
                before.append((copy, grad))
                grad = copy
            rows.append((param, grad, [self._states[index][name] for name in formula.states]))
        with contextlib.nullcontext() if capturing.now is None else capturing.now.persistent(xp):
            table = ArrayTable(xp, dtype, rows, indices)
        scalars = xp.empty(len(indices) * len(formula.scalars), compute_dtype(dtype))
        return Batch(dtype, table, scalars, before, after)


def _order(param: Array) -> tuple[int, ...]:
    """The axes of a parameter in the order of memory; in C order if its memory has gaps."""
    return dense_order(param) or tuple(range(param.ndim))


def _same_layout(a: Array, b: Array) -> bool:
    """Whether `a` has its elements in the same order as `b`, and no gaps. b: of the same shape, without gaps."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return True
    pairs = zip(a.shape, a.strides, b.strides, strict=True)
    return not a.size or all(n == 1 or s * b.itemsize == t * a.itemsize for n, s, t in pairs)


def _copy_all(copies: Copies) -> None:
    for target, source in copies:
        target[...] = source


def _count_write(params: list[Tensor]) -> None:
    for p in params:
        p.version.count += 1
