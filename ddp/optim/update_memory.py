"""The memory of an update: state in flat arrays laid out like the gradients, and tiles of both, cut once and kept.

To the outside, state stays a dict beside each parameter; its tensors are views. Whatever is replaced from outside (a
gradient's buffer, a parameter's array, the state itself) is noticed at the next step, and followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np

from ddp._device import CPU, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim.gradient_runs import Gradient, Home, Segment, arrange, cut, find_runs

Array = Any
State = dict[Any, dict[str, Any]]

_LINE = 64  # bytes
# Elements of a tile. On the CPU, arrays of 3/4 MiB: they come back from cache in a formula's next pass, and a call's
# overhead no longer counts (benchmarks/optimizer_step.py: half as many cost SGD a tenth, twice as many change little).
# Up to _PACK elements, gathering gradients costs less than calls of their own.
_TILE = 192 * 1024
_PACK = 8 * 1024
_KEPT = 8  # patterns of empty and full slots whose tiles are kept


class Tile:
    """A stretch of gradients as a formula sees it: flat arrays of one length.

    grad: only read; state: each state by name; delta: what will be subtracted; spare: scratch
    parts: (parameter, delta) of each parameter in the tile, and of equal shapes
    before, after: (target, source) copies around the formula, where memory is not as it wants it
    """

    __slots__ = ("after", "before", "delta", "grad", "parts", "spare", "state", "xp")

    def __init__(self, xp: Any, grad: Array, delta: Array, spare: Array) -> None:
        self.xp = xp
        self.grad = grad
        self.delta = delta
        self.spare = spare
        self.state: dict[str, Array] = {}
        self.parts: list[tuple[Array, Array]] = []
        self.before: list[tuple[Array, Array]] = []
        self.after: list[tuple[Array, Array]] = []

    def descent(self, weight_decay: float, maximize: bool) -> Array:
        """grad + weight_decay*p, or -grad + weight_decay*p to maximize; `delta` holds it unless it is grad itself."""
        xp, grad, delta = self.xp, self.grad, self.delta
        if weight_decay:
            for p, part in self.parts:
                xp.multiply(p, weight_decay, out=part)
            (xp.subtract if maximize else xp.add)(delta, grad, out=delta)
            return delta
        return xp.negative(grad, out=delta) if maximize else grad

    def shrink(self, factor: float) -> None:
        """p *= factor."""
        for p, _ in self.parts:
            self.xp.multiply(p, factor, out=p)

    def subtract(self) -> None:
        """p -= delta."""
        for p, part in self.parts:
            self.xp.subtract(p, part, out=p)


class Scratch:
    """Memory that nothing outlives an update in, by use and dtype; shared by all tiles of an optimizer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, Any], Array] = {}

    def take(self, xp: Any, use: str, dtype: Any, length: int) -> Array:
        """(length,) of memory, the same for the same use."""
        key = xp.__name__, use, dtype
        kept = self._kept.get(key)
        if kept is None or kept.size < length:
            kept = self._kept[key] = xp.zeros(length, dtype)
        return kept[:length]


class Memory:
    """The flat memory of one parameter group on the CPU.

    names: its states; counted: whether a "step" beside them counts updates; initial: what a state starts as
    """

    _clock = CPU  # where steps are counted

    def __init__(self, names: tuple[str, ...], counted: bool, initial: float, scratch: Scratch) -> None:
        self.names = names
        self._counted = counted
        self._initial = initial
        self._scratch = scratch
        self._params: list[Tensor] = []
        self._arrays: list[Array] = []
        self._buffers: list[Array | None] = []
        self._gradients: list[Gradient] = []
        self._segments: list[Segment] = []
        self._flats: list[dict[str, Array]] = []  # of each segment: its states
        self._views: dict[str, list[Array]] = {}  # of each state: its part for each parameter
        self._entries: list[dict[str, Any] | None] = []
        self._steps = np.zeros(0, np.float32)
        self._tiles: dict[Any, list[tuple[int, list[Tile]]]] = {}

    def runs(self, params: Sequence[Tensor], state: State, begin_all: bool) -> Iterator[tuple[float, list[Tile]]]:
        """(age, tiles) of each run of non-empty slots; ages count updates, this one included if they are counted.

        begin_all: state begins for all parameters at once, not only for those that have a gradient
        """
        full = [p.maybe_leaf is not None and p.maybe_leaf.grad_buffer.full for p in params]
        if not any(full) and not (begin_all and full):
            return
        self._follow(params)
        ages: list[float] = self._begin(state, [True] * len(full) if begin_all else full) if self.names else []
        uniform = all(full) and (not ages or min(ages) == max(ages))
        pattern = None if uniform else tuple(self._marks(full, ages))
        found = self._tiles.get(pattern)
        if found is None:
            if len(self._tiles) == _KEPT:
                self._tiles.clear()
            found = self._tiles[pattern] = self._cut(pattern or [0] * len(full))
        if self._counted:
            self._steps += 1 if uniform else np.array(full, np.float32)
        for p, is_full in zip(params, full, strict=True):
            if is_full:
                p.version.count += 1
        for first, tiles in found:
            yield (ages[first] + self._counted if ages else 0), tiles

    def _follow(self, params: Sequence[Tensor]) -> None:
        """Notices parameters, arrays and buffers that are not what they were, and lays out anew what changed."""
        arrays = [p.array for p in params]
        buffers = [None if p.maybe_leaf is None else p.maybe_leaf.grad_buffer.array for p in params]
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if same and all(map(is_, arrays, self._arrays)) and all(map(is_, buffers, self._buffers)):
            return
        gradients = [_described(p, buffer) for p, buffer in zip(params, buffers, strict=True)]
        # A buffer of its own may be another one at every step: the state has no reason to move then.
        moved = not same or gradients != self._gradients
        self._params, self._arrays, self._buffers, self._gradients = list(params), arrays, buffers, gradients
        self._tiles.clear()
        if moved:
            self._lay_out()

    def _lay_out(self) -> None:
        params = self._params
        self._segments = arrange(self._gradients, pack=_PACK, cap=_TILE)
        self._flats, self._views = [], {name: [None] * len(params) for name in self.names}
        for segment in self._segments:
            array = self._arrays[segment.members[0].number]
            xp = params[segment.members[0].number].device.xp
            flats = {name: xp.zeros(segment.length, array.dtype) for name in self.names}
            self._flats.append(flats)
            for member in segment.members:
                shape = self._arrays[member.number].shape
                for name, flat in flats.items():
                    self._views[name][member.number] = flat[member.start : member.stop].reshape(shape)
        if self._counted:
            self._steps = np.zeros(len(params), np.float32)
            self._views["step"] = [self._steps[i : i + 1].reshape(()) for i in range(len(params))]
        self._entries = [None] * len(params)

    def _begin(self, state: State, wanted: list[bool]) -> list[float]:
        """Makes sure that the state of every parameter is the memory here; the age of each before this update."""
        adopted = self._hold(state, wanted)
        if self._counted:
            return self._steps.tolist()
        return [0.0 if adopted.get(i) or entry is None else 1.0 for i, entry in enumerate(self._entries)]

    def _hold(self, state: State, wanted: list[bool]) -> dict[int, bool]:
        """Makes sure that the state of every parameter is the memory here.

        Returns the numbers of those whose state it was not, and whether they had none.
        """
        entries = list(map(state.get, self._params))
        known = all(map(is_, entries, self._entries))
        for name, views in self._views.items():
            if not known:
                break
            now = [
                view if e is None else getattr(e.get(name), "array", None)
                for e, view in zip(entries, views, strict=True)
            ]
            known = all(map(is_, now, views))
        adopted: dict[int, bool] = {}
        if not known or None in entries:
            for index, (p, entry) in enumerate(zip(self._params, entries, strict=True)):
                if entry is None and wanted[index]:
                    entry = state[p] = {}
                if entry is not None and not (known and entries[index] is not None):
                    adopted[index] = self._adopt(index, entry)
                    entries[index] = entry
            self._entries = entries
        return adopted

    def _adopt(self, index: int, entry: dict[str, Any]) -> bool:
        """Moves one parameter's state into the flat arrays; whether it had none."""
        p = self._params[index]
        fresh = False
        for name in ("step", *self.names) if self._counted else self.names:
            view, value = self._views[name][index], entry.get(name)
            if isinstance(value, TensorBase) and value.array is view:
                continue
            if value is None:
                fresh = True
                view[...] = 0 if name == "step" else self._initial
            else:
                source = value.array if isinstance(value, TensorBase) else value
                if np.shape(source) not in (view.shape, (1,) if name == "step" else view.shape):
                    raise StateDictError(f"state {name!r} of shape {np.shape(source)} for a parameter of {view.shape}")
                where = self._clock if name == "step" else p.device
                view[...] = place(source, where).reshape(view.shape) if hasattr(source, "shape") else source
            entry[name] = wrap(view, self._clock if name == "step" else p.device)
        return fresh

    def _marks(self, full: list[bool], ages: list[float]) -> Iterator[float | None]:
        least = min((age for age, is_full in zip(ages, full, strict=True) if is_full), default=0) if ages else 0
        for index, is_full in enumerate(full):
            yield None if not is_full else ages[index] - least if ages else 0

    def _cut(self, marks: Sequence[float | None]) -> list[tuple[int, list[Tile]]]:
        """(a parameter of the run, tiles) of each run."""
        found = []
        for number, segment in enumerate(self._segments):
            for run in find_runs(segment, marks):
                size = max(1, segment.length) if segment.rigid else _TILE
                tiles = [self._tile(number, start, stop, parts) for start, stop, parts in cut(run, size)]
                if tiles:
                    found.append((run[0].number, tiles))
        return found

    def _tile(self, number: int, start: int, stop: int, parts: Sequence[Any]) -> Tile:
        segment, arrays, buffers = self._segments[number], self._arrays, self._buffers
        first = segment.members[0]
        dtype, length = arrays[first.number].dtype, stop - start
        xp = self._params[first.number].device.xp
        # 16-bit numbers are computed with in float32, and rounded once.
        wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype

        def scratch(use: str) -> Array:
            return self._scratch.take(xp, use, wide, length)

        tile = Tile(xp, scratch("grad"), scratch("delta"), scratch("spare"))
        if segment.rigid:
            tile.before.append((tile.grad.reshape(arrays[first.number].shape), buffers[first.number]))
            stretches = [(arrays[first.number], slice(0, length))]
        else:
            stretches = [
                (arrays[index].reshape(-1)[begin:end], slice(at, at + end - begin)) for index, begin, end, at in parts
            ]
            if segment.flat:
                source = _flat(buffers[first.number], self._gradients[first.number].home, segment.length)[start:stop]
                if wide == dtype:
                    tile.grad = source
                else:
                    tile.before.append((tile.grad, source))
            else:
                tile.before += [
                    (tile.grad[place], buffers[part.number].reshape(-1)[part.begin : part.end])
                    for part, (_, place) in zip(parts, stretches, strict=True)
                ]
        if wide == dtype:
            tile.state = {name: flat[start:stop] for name, flat in self._flats[number].items()}
            tile.parts = [(p, tile.delta[place].reshape(p.shape)) for p, place in stretches]
            return tile
        param = scratch("param")
        tile.parts = [(param, tile.delta)]
        copies = [(param[place].reshape(p.shape), p) for p, place in stretches]
        for name, flat in self._flats[number].items():
            tile.state[name] = scratch(name)
            copies.append((tile.state[name], flat[start:stop]))
        tile.before += copies
        tile.after = [(source, target) for target, source in copies]
        return tile


def _described(p: Tensor, buffer: Array | None) -> Gradient:
    array = p.array
    rigid = not array.flags.c_contiguous or (buffer is not None and not buffer.flags.c_contiguous)
    return Gradient(
        size=array.size,
        line=max(1, _LINE // array.dtype.itemsize),
        kind=(p.device, array.dtype),
        home=None if rigid or buffer is None else _home(buffer),
        rigid=rigid,
    )


def _home(buffer: Array) -> Home | None:
    """Where a gradient lies in a flat array that holds more than it, or None."""
    base = buffer.base
    if getattr(base, "ndim", None) != 1 or base.dtype != buffer.dtype or not base.flags.c_contiguous:
        return None
    start = (_address(buffer) - _address(base)) // base.dtype.itemsize
    return Home(_address(base), start) if start >= 0 and start + buffer.size <= base.size else None


def _flat(buffer: Array, home: Home | None, length: int) -> Array:
    return buffer.reshape(-1) if home is None else buffer.base[home.start : home.start + length]


def _address(array: Array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
