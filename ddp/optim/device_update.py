"""The memory of an update on a GPU: flat state, and tables by which one launch updates all parameters of a group.

Nothing here makes the host wait, and nothing is sent in a step like the one before: addresses are in tables that are
made when an array is another one, steps are counted on the device, settings are arguments of a launch. Captured into a
CUDA graph, settings lie in device memory, and what changed is brought there before each replay.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._cuda import array_table, optimizer_kernels
from ddp._cuda.array_table import ArrayTable, SeenArrays, address, dense_order
from ddp._cuda.raw_kernel import wide
from ddp._device import capturing, device
from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp.errors import CaptureError
from ddp.optim.update_memory import Memory, Scratch

if TYPE_CHECKING:
    from ddp.optim.tiled_update import Tiled

Array = Any
Group = dict[str, Any]
Copies = list[tuple[Array, Array]]  # (target, source)

_LINE = 64  # bytes
_KEPT = 8  # patterns of empty and full slots, and of gradients' addresses, whose batches are kept


class UpdateBatch:
    """Parameters of one dtype that have a gradient. before, after: copies of those whose elements lie with gaps"""

    __slots__ = ("after", "before", "dtype", "numbers", "table")

    def __init__(self, dtype: Any, table: ArrayTable, numbers: Array, before: Copies, after: Copies) -> None:
        self.dtype, self.table, self.numbers, self.before, self.after = dtype, table, numbers, before, after


class Launched(Memory):
    """The flat memory of those parameters of a group that are on one GPU.

    of: the optimizer; where: the GPU
    """

    def __init__(self, of: Tiled, group: Group, where: device, names: tuple[str, ...], scratch: Scratch) -> None:
        super().__init__(names, of.counted, of.initial(group), scratch)
        self._of, self._group = of, group
        self._clock, self._xp = where, where.xp
        self._forms: list[Any] = []
        self._batches: OrderedDict[Any, list[UpdateBatch]] = OrderedDict()
        self._last: tuple[Any, SeenArrays, list[UpdateBatch]] | None = None  # stream, gradients, and what they led to
        self._held: Array | None = None
        self._sent: Sequence[float] = ()

    def step(self, params: Sequence[Tensor], found: Array | None) -> None:
        """One update. found: float32, nothing happens on the device where it is not zero; the host never knows."""
        slots = [None if p.maybe_leaf is None else p.maybe_leaf.grad_buffer for p in params]
        full = [slot is not None and slot.full for slot in slots]
        eager = self._of.eager
        if not any(full) and not (eager and full):
            return
        graph = capturing.now
        wanted = [True] * len(full) if eager else full
        self._follow(params)
        if graph is None:
            self._remember(wanted)
        batches = self._found(slots, full)
        settings, rate = self._settings()
        held = None
        if graph is not None:
            held = self._tell(graph, batches, wanted)
        elif rate is not None:
            held = self._held = (
                self._xp.empty(optimizer_kernels.SETTINGS, np.float64) if self._held is None else self._held
            )
            if settings != self._sent:
                optimizer_kernels.store_settings(self._xp, held, settings)
                self._sent = settings
        if held is not None and rate is not None:
            held[:1] = rate.reshape(1)
        for batch in batches:
            for target, source in batch.before:
                target[...] = source
            numbers = batch.numbers
            optimizer_kernels.advance(self._xp, self._of.rule, batch.table, self._steps, numbers, found, held, settings)
            optimizer_kernels.update(self._xp, self._of.rule, batch.dtype, batch.table, numbers, found)
            for target, source in batch.after:
                target[...] = source
        changed = [p for p, is_full in zip(params, full, strict=True) if is_full]
        for p in changed:
            p.version.count += 1
        if graph is not None:
            graph.after(lambda: _touch(changed))

    def _settings(self) -> tuple[Sequence[float], Array | None]:
        """The settings that count now, and a learning rate that is on the device."""
        rate = self._group["lr"]
        if isinstance(rate, TensorBase) and rate.device.type != "cpu":
            return self._of.settings({**self._group, "lr": 0.0}), rate.array
        return self._of.settings(self._group), None

    def _tell(self, graph: Any, batches: list[UpdateBatch], wanted: list[bool]) -> Array:
        """The settings in device memory for a graph, which brings there what has changed before each replay."""
        xp, of, group = self._xp, self._of, self._group
        with graph.lasting(xp):
            held = xp.empty(optimizer_kernels.SETTINGS, np.float64)
        params, state, sent = self._params, None, None

        def bring() -> None:
            nonlocal state, sent
            if sent is None:  # what is sent within a capture would arrive with every replay
                for batch in batches:
                    batch.table.fill(xp)
            if of.state is not state:  # at first, and when one was loaded
                state = of.state
                self._remember(wanted)
            settings = self._settings()[0]
            if settings != sent:
                optimizer_kernels.store_settings(xp, held, settings)
                sent = settings

        graph.before(bring)
        graph.keep(held, batches, self._steps, self._flats, self._arrays)
        # The arrays are kept, so that no other one gets their numbers.
        graph.fix(lambda: (of.names(group), len(group["params"]), [id(p.array) for p in params]))
        return held

    def _follow(self, params: Sequence[Tensor]) -> None:
        arrays = [p.array for p in params]
        same = len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))
        if same and all(a is b for a, b in zip(arrays, self._arrays, strict=True)):
            return
        forms = [(array.shape, array.dtype, dense_order(array)) for array in arrays]
        moved = not same or forms != self._forms
        self._params, self._arrays, self._forms = list(params), arrays, forms
        self._batches.clear()
        self._last = None
        if moved:
            self._lay_out()

    def _lay_out(self) -> None:
        """Flat memory for the state of all parameters of a dtype; each one's begins on a line, and lies as it does."""
        if capturing.now is not None:
            raise CaptureError(
                f"{type(self._of).__name__}: state that begins within a capture would begin anew with every replay; "
                "make a step with these parameters before"
            )
        xp, lengths = self._xp, dict[Any, int]()
        starts = []
        for array in self._arrays:
            step = _LINE // array.dtype.itemsize
            starts.append(lengths.get(array.dtype, 0))
            lengths[array.dtype] = starts[-1] + -(-array.size // step) * step
        flats = {dtype: {name: xp.zeros(n, dtype) for name in self.names} for dtype, n in lengths.items()}
        self._flats = list(flats.values())
        self._views = {
            name: [
                _lying(flats[array.dtype][name][start : start + array.size], array.shape, axes)
                for array, (_, _, axes), start in zip(self._arrays, self._forms, starts, strict=True)
            ]
            for name in self.names
        }
        # Also where nobody sees them: a momentum begins with the first step that was not left out.
        self._steps = xp.zeros(len(self._arrays), np.float32)
        if self._counted:
            self._views["step"] = [self._steps[i : i + 1].reshape(()) for i in range(len(self._arrays))]
        self._entries = [None] * len(self._arrays)

    def _remember(self, wanted: list[bool]) -> None:
        if not self.names:
            return
        adopted = self._hold(self._of.state, wanted)
        if not self._counted:
            for index, is_fresh in adopted.items():
                self._steps[index : index + 1] = 0 if is_fresh else 1

    def _found(self, slots: Sequence[Any], full: Sequence[bool]) -> list[UpdateBatch]:
        """The batches of these gradients."""
        xp, graph = self._xp, capturing.now
        gradients = [slot.array if is_full else None for slot, is_full in zip(slots, full, strict=True)]
        here = array_table.stream_key(xp)
        if graph is None and self._last is not None and self._last[0] == here and self._last[1].are(gradients):
            return self._last[2]
        key = here, *[None if g is None else _mark(g) for g in gradients]
        found = self._batches.get(key) if graph is None else None
        if found is not None:
            self._batches.move_to_end(key)
            self._last = here, SeenArrays(gradients), found
            return found
        made = []
        for dtype in dict.fromkeys(array.dtype for array in self._arrays):
            members = [i for i, is_full in enumerate(full) if is_full and self._arrays[i].dtype == dtype]
            if members:
                made.append(self._batch(dtype, members, [gradients[i] for i in members]))
        if graph is not None:
            graph.keep(gradients)
        else:
            for batch in made:
                batch.table.fill(xp)
            self._batches[key] = made
            self._last = here, SeenArrays(gradients), made
            while len(self._batches) > _KEPT:
                self._batches.popitem(last=False)
        return made

    def _batch(self, dtype: Any, members: list[int], gradients: list[Array]) -> UpdateBatch:
        xp = self._xp
        before: Copies = []
        after: Copies = []
        arrays = []
        for index, grad in zip(members, gradients, strict=True):
            param, axes = self._arrays[index], self._forms[index][2]
            if axes is None:
                lying = _lying(xp.empty(param.size, param.dtype), param.shape, None)
                before.append((lying, param))
                after.append((param, lying))
                param = lying
            if not _alike(grad, param):
                lying = _lying(xp.empty(grad.size, grad.dtype), grad.shape, axes)
                before.append((lying, grad))
                grad = lying
            states = [self._views[name][index] if name in self.names else None for name in self._of.states]
            arrays.append((param, grad, states))
        with contextlib.nullcontext() if capturing.now is None else capturing.now.lasting(xp):
            table = ArrayTable(xp, dtype, arrays, members)
        return UpdateBatch(dtype, table, xp.empty(table.length * optimizer_kernels.NUMBERS, wide(dtype)), before, after)


def _mark(array: Array) -> Any:
    return address(array) if array.flags.c_contiguous else (address(array), array.strides)


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
