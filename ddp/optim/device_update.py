"""The update of a parameter group on a GPU: tables by which one launch updates all parameters.

Nothing here makes the host wait, and nothing is sent in a step like the one before: addresses are in tables that are
made when an array is another one, steps are counted on the device, settings are arguments of a launch. Captured into a
CUDA graph, settings lie in device memory, and what changed is brought there before each replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._cuda import array_table, optimizer_kernels
from ddp._cuda.array_table import ArrayTable, SeenArrays, address, dense_order
from ddp._cuda.raw_kernel import wide
from ddp._device import capturing, on
from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp.errors import CaptureError
from ddp.optim.formula import Formula
from ddp.optim.group_update import GroupUpdate, settings

Array = Any
KEPT = 8  # sets of tables, one for each set of gradients' addresses
Copies = list[tuple[Array, Array]]  # (target, source)


class Batch(NamedTuple):
    """Parameters of one dtype that have a gradient. before, after: copies of those whose elements lie with gaps"""

    dtype: Any
    table: ArrayTable
    numbers: Array
    before: Copies
    after: Copies


class DeviceUpdate(GroupUpdate):
    """The parameters of one group on one GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: Array | None = None
        self._sent: Any = None  # the formula whose settings are there, and these

    def step(self, params: Sequence[Tensor]) -> None:
        """As on the CPU, with the GPU as the current device."""
        with on(self._where):
            super().step(params)

    def _update(self, formula: Formula, full: dict[int, Array]) -> None:
        xp, graph, found = self._xp, capturing.now, self._optimizer.found_inf
        source = optimizer_kernels.kernels(
            tuple(formula.device_lines), tuple(formula.scalars), formula.settings, formula.states, formula.factor
        )
        batches = self._find_batches(formula, full)
        values, rate = self._values(formula)
        held = None
        if graph is not None:
            held = self._bind_to(graph, formula, batches, [*full])
        elif rate is not None:
            held = self._held = xp.empty(optimizer_kernels.SETTINGS, np.float64) if self._held is None else self._held
            if (formula, values) != self._sent:
                held[: len(values)] = xp.asarray(values, np.float64)
                self._sent = formula, values
        if held is not None and rate is not None:
            at = formula.settings.index("lr")
            held[at : at + 1] = rate.reshape(1)
        for batch in batches:
            for target, origin in batch.before:
                target[...] = origin
            optimizer_kernels.update(
                xp, source, batch.dtype, batch.table, self._steps, batch.numbers, found, held, values
            )
            for target, origin in batch.after:
                target[...] = origin
        if graph is not None:
            changed = [self._params[index] for index in full]
            graph.after(lambda: _touch(changed))

    def _values(self, formula: Formula) -> tuple[Sequence[float], Array | None]:
        """The settings that count now, and a learning rate that is on the device."""
        rate = self.group["lr"]
        if isinstance(rate, TensorBase) and rate.device.type != "cpu":
            return settings(formula, {**self.group, "lr": 0.0}), rate.array
        return settings(formula, self.group), None

    def _bind_to(self, graph: Any, formula: Formula, batches: list[Batch], full: Iterable[int]) -> Array:
        """The settings in device memory for a graph, which brings there what has changed before each replay."""
        xp, group = self._xp, self.group
        optimizer = self._optimizer.formula.__self__  # not the weak proxy: a graph keeps the optimizer that it runs
        with graph.lasting(xp):
            held = xp.empty(optimizer_kernels.SETTINGS, np.float64)
        params, state, sent = self._params, None, None
        wanted = range(len(params)) if optimizer.eager else full

        def bring() -> None:
            nonlocal state, sent
            if sent is None:  # what is sent within a capture would arrive with every replay
                for batch in batches:
                    batch.table.fill(xp)
            if optimizer.state is not state:  # at first, and when one was loaded
                state = optimizer.state
                super(DeviceUpdate, self)._hold_state(wanted)
            values = self._values(formula)[0]
            if values != sent:
                held[: len(values)] = xp.asarray(values, np.float64)
                sent = values

        graph.before(bring)
        graph.keep(held, batches, self._steps, self._states, self._arrays)
        # The arrays are kept, so that no other one gets their numbers.
        graph.fix(lambda: (optimizer.formula(group), len(group["params"]), [id(p.array) for p in params]))
        return held

    def _hold_state(self, wanted: Iterable[int]) -> None:
        if capturing.now is None:  # a graph does it before its replays
            super()._hold_state(wanted)
        elif any(not self._states[index] for index in wanted):
            raise self._begins_in_capture()

    def _lay_out(self, params: Sequence[Tensor]) -> None:
        if capturing.now is not None:
            raise self._begins_in_capture()
        super()._lay_out(params)

    def _begins_in_capture(self) -> CaptureError:
        return CaptureError(
            f"{type(self._optimizer).__name__}: state that begins within a capture would begin anew with every "
            "replay; make a step with these parameters before"
        )

    def _fits(self, array: Array, param: Array) -> bool:
        return array.dtype == param.dtype and dense_order(array) == (dense_order(param) or tuple(range(param.ndim)))

    def _empty_like(self, param: Array) -> Array:
        return _lying(self._xp.empty(param.size, param.dtype), param.shape, dense_order(param))

    def _find_batches(self, formula: Formula, full: dict[int, Array]) -> list[Batch]:
        """The batches of the gradients that are there. They are kept, one set for each set of addresses."""
        xp, graph = self._xp, capturing.now
        gradients: list[Array | None] = [full.get(index) for index in range(len(self._params))]
        here = array_table.stream_key(xp), formula
        last = self._plans.get(None)
        if graph is None and last is not None and last[0] == here and last[1].are(gradients):
            return last[2]
        key = here, *[None if g is None else (address(g), g.strides) for g in gradients]
        batches = self._plans.get(key) if graph is None else None
        if batches is None:
            batches = []
            for dtype in dict.fromkeys(array.dtype for array in self._arrays):
                members = [i for i in full if self._arrays[i].dtype == dtype]
                if members:
                    batches.append(self._batch(formula, dtype, members, gradients))
        if graph is not None:
            graph.keep(gradients)
            return batches
        if key not in self._plans:
            for batch in batches:
                batch.table.fill(xp)
            if len(self._plans) > KEPT:
                self._plans.clear()
            self._plans[key] = batches
        self._plans[None] = here, SeenArrays(gradients), batches
        return batches

    def _batch(self, formula: Formula, dtype: Any, members: list[int], gradients: list[Array]) -> Batch:
        xp = self._xp
        before: Copies = []
        after: Copies = []
        rows = []
        for index in members:
            param, grad = self._arrays[index], gradients[index]
            shape, axes = param.shape, dense_order(param)
            if axes is None:
                lying = _lying(xp.empty(param.size, param.dtype), shape, None)
                before.append((lying, param))
                after.append((param, lying))
                param = lying
            if grad.dtype != param.dtype or not _alike(grad, param):
                lying = _lying(xp.empty(param.size, param.dtype), shape, axes)
                before.append((lying, grad))
                grad = lying
            rows.append((param, grad, [self._states[index][name] for name in formula.states]))
        with contextlib.nullcontext() if capturing.now is None else capturing.now.lasting(xp):
            table = ArrayTable(xp, dtype, rows, members)
        return Batch(dtype, table, xp.empty(len(members) * len(formula.scalars), wide(dtype)), before, after)


def _lying(flat: Array, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> Array:
    """Flat memory as an array of this shape whose axes lie in this order, from the widest stride on."""
    if axes is None or axes == tuple(range(len(shape))):
        return flat.reshape(shape)
    return flat.reshape([shape[axis] for axis in axes]).transpose([axes.index(axis) for axis in range(len(shape))])


def _alike(a: Array, b: Array) -> bool:
    """Whether the elements of two arrays of one shape follow each other in the same order. `b` has no gaps."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return True
    pairs = zip(a.shape, a.strides, b.strides, strict=True)
    return not a.size or all(n == 1 or s * b.itemsize == t * a.itemsize for n, s, t in pairs)


def _touch(params: list[Tensor]) -> None:
    for p in params:
        p.version.count += 1
