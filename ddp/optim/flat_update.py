"""The update of a parameter group by its formula, over flat memory.

Many small tensors cost calls, large ones cost passes over memory. So gradients that follow each other in a bucket are
updated together, their state lies in flat arrays at the same distances, and what is long is cut into tiles that stay in
cache from a formula's first pass to its last. `arrange`, `find_runs` and `cut` decide; `FlatUpdate` acts. On a GPU one
launch updates all parameters of a group: `DeviceUpdate`.

To the outside, state stays a dict beside each parameter; its tensors are views. Whatever is replaced from outside (a
gradient's buffer, a parameter's array, the state itself) is noticed at the next step, and followed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from ddp._device import capturing, device, place
from ddp._engine import enable_grad
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, StateDictError
from ddp.optim.formula import Formula, compile_formula
from ddp.optim.optimizer import Closure, Group, Optimizer, Params, number

Array = Any
Calls = list[Callable[[], Any]]

LINE = 64  # bytes
# Elements of a tile. On the CPU, arrays of 3/4 MiB: they come back from cache in a formula's next pass, and a call's
# overhead no longer counts (benchmarks/optimizer_step.py: half as many cost SGD a tenth, twice as many change little).
# Up to _PACK elements, gathering gradients costs less than calls of their own.
_TILE = 192 * 1024
_PACK = 8 * 1024
KEPT = 8  # patterns of missing gradients whose plans are kept
_BETAS = ("beta1", "beta2")
_device_of = attrgetter("_device")


class FlatOptimizer(Optimizer):
    """An optimizer given by the names of its states and a formula that treats each element alone.

    counted: whether each parameter's state has a "step" that counts its updates
    eager: state begins for all parameters at the first step, not with a parameter's first gradient
    found_inf: a float32 on the GPU, set by a GradScaler around a step: where it is not zero, the step is left out on
    the GPU, without the host's knowledge
    """

    counted = True
    eager = False
    found_inf: Any = None
    _step_supports_amp_scaling = True  # PyTorch's name for it

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        if defaults.get("differentiable"):
            raise ArgumentError(
                f"{type(self).__name__}: differentiable=True needs gradients of an update: there are none"
            )
        super().__init__(params, defaults)

    def _prepare(self) -> None:
        super()._prepare()
        self.scratch = Scratch()
        self._updates: dict[tuple[int, device], FlatUpdate] = {}

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
        # Also between neighbours in a bucket, where nobody looks, and infinities are the loss scaler's business.
        with np.errstate(all="ignore"):
            for group in self.param_groups:
                devices = dict.fromkeys(map(_device_of, group["params"]))
                for where in devices:
                    params = group["params"] if len(devices) == 1 else [p for p in group["params"] if p.device is where]
                    self._update_of(group, where).step(params)
        if capturing.now is not None:
            capturing.now.after(self._note_step)
        return loss

    def _note_step(self) -> None:
        self._stepped = True

    def _update_of(self, group: Group, where: device) -> FlatUpdate:
        states = self.states(group)
        known = self._updates.get((id(group), where))
        if known is None or known.group is not group or known.names != states:
            if where.xp is np:
                known = FlatUpdate(self, group, where, states)
            else:
                from ddp.optim.device_update import DeviceUpdate  # only where there is a GPU

                known = DeviceUpdate(self, group, where, states)
            self._updates[id(group), where] = known
        return known


def descent(group: Group, decays: bool = True) -> list[str]:
    """The line of a formula that defines d: grad + weight_decay*p, or -grad + weight_decay*p to maximize."""
    if decays and number(group["weight_decay"]):
        return [f"d = p * weight_decay {'-' if group['maximize'] else '+'} grad"]
    return ["d = -grad" if group["maximize"] else "d = grad"]


def settings(formula: Formula, group: Group) -> list[float]:
    """The settings that a formula reads, as numbers; beta1 and beta2 are those of "betas"."""
    return [group["betas"][_BETAS.index(name)] if name in _BETAS else number(group[name]) for name in formula.settings]


class Scratch:
    """Memory that nothing outlives an update in, by use and dtype; shared by all tiles of an optimizer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Any], Array] = {}

    def take(self, use: str, dtype: Any, length: int) -> Array:
        """(length,) of memory, the same for the same use."""
        kept = self._kept.get((use, dtype))
        if kept is None or kept.size < length:
            kept = self._kept[use, dtype] = np.zeros(length, dtype)
        return kept[:length]


# --- what is updated together: decisions --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a layout must know of one gradient.

    size: elements; line: elements of its dtype in a cache line; dtype: only gradients of one dtype lie together
    home: (address of a flat buffer, its first element there), or None for a gradient in an array of its own
    rigid: it, or its parameter, is not contiguous, so that neither can be cut
    form: its shape, and on a GPU the order of its axes
    """

    size: int
    line: int
    dtype: str = ""
    home: tuple[int, int] | None = None
    rigid: bool = False
    form: Any = None


class Member(NamedTuple):
    """One gradient's place in its segment: its number, and where it starts and stops."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Gradients whose state lies in one flat array.

    flat: the gradients themselves lie in one flat array too, at the same distances; else they are to be gathered
    rigid: the one gradient cannot be cut
    """

    members: tuple[Member, ...]
    flat: bool
    rigid: bool = False

    @property
    def length(self) -> int:
        """Elements from the first member's start to the last one's stop."""
        return self.members[-1].stop


class Part(NamedTuple):
    """Elements `begin` to `end` of one gradient, which stand in a tile from `at` on."""

    number: int
    begin: int
    end: int
    at: int


class Tile(NamedTuple):
    """Elements `start` to `stop` of a segment, and the parts of gradients there."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def arrange(gradients: Sequence[Gradient], *, pack: int, cap: int) -> list[Segment]:
    """Puts every gradient into a segment.

    Those that follow each other in a flat buffer stay as they lie; of the others, ones of at most `pack` elements are
    packed to segments of about `cap` elements, and larger ones stand alone.
    """

    def order(index: int) -> Any:
        g = gradients[index]
        single = g.rigid or (g.home is None and g.size > pack)
        # An empty gradient starts where the next one does, and stands before it.
        return single, g.home is None, g.home or (), g.size if g.home else 0, g.dtype, index

    chains: list[list[Member]] = []
    for index in sorted(range(len(gradients)), key=order):
        g = gradients[index]
        last = chains[-1][-1] if chains else None
        start = None if last is None else _next_start(last, gradients[last.number], g, pack, cap)
        if start is None:
            chains.append([])
        chains[-1].append(Member(index, start or 0, (start or 0) + g.size))
    segments = []
    for chain in chains:
        first = gradients[chain[0].number]
        flat = not first.rigid and (len(chain) == 1 or first.home is not None)
        segments.append(Segment(members=tuple(chain), flat=flat, rigid=first.rigid))
    return segments


def _next_start(last: Member, before: Gradient, g: Gradient, pack: int, cap: int) -> int | None:
    """Where `g` starts in the segment whose last member is `before`; None: it belongs to another segment."""
    start = -(-last.stop // g.line) * g.line
    if before.dtype != g.dtype or before.rigid or g.rigid:
        return None
    if g.home is not None and before.home is not None:
        follows = g.home == (before.home[0], -(-(before.home[1] + before.size) // g.line) * g.line)
        return start if follows else None
    small = g.home is before.home and max(before.size, g.size) <= pack and start + g.size <= cap
    return start if small else None


def find_runs(segment: Segment, marks: Sequence[Hashable | None]) -> list[tuple[Member, ...]]:
    """The longest stretches of members with one mark. marks: of each gradient, None for a missing one."""
    groups = itertools.groupby(segment.members, key=lambda member: marks[member.number])
    return [tuple(members) for mark, members in groups if mark is not None]


def cut(run: Sequence[Member], size: int) -> list[Tile]:
    """Cuts a run into tiles of at most `size` elements; members of no elements are left out."""
    tiles = []
    for start in range(run[0].start, run[-1].stop, size):
        stop = min(start + size, run[-1].stop)
        parts = []
        for member in run:
            begin, end = max(member.start, start), min(member.stop, stop)
            if begin < end:
                parts.append(Part(member.number, begin - member.start, end - member.start, begin - start))
        tiles.append(Tile(start, stop, tuple(parts)))
    return [tile for tile in tiles if tile.parts]


# --- the update: effects ------------------------------------------------------------------------------------------


class FlatUpdate:
    """The parameters of one group on one device, their state in flat memory, and their update on the CPU.

    names: the states of each parameter, apart from "step"
    """

    def __init__(self, optimizer: FlatOptimizer, group: Group, where: device, names: tuple[str, ...]) -> None:
        self.group, self.names = group, names
        # Weak: the optimizer holds this, and a cycle would keep its parameters until the garbage collector runs.
        self._optimizer = weakref.proxy(optimizer)
        self._where, self._xp = where, where.xp
        self._params: list[Tensor] = []
        self._arrays: list[Array] = []
        self._buffers: list[Array] = []
        self._gradients: list[Gradient] = []
        self._segments: list[Segment] = []
        self._flats: list[dict[str, Array]] = []  # of each segment: its states
        self._views: list[dict[str, Array]] = []  # of each parameter: what its state dict holds
        # Counts of updates. Also where no state dict shows them: SGD's dampening begins with the second one.
        self._steps: Array = np.zeros(0, np.float32)
        self._plans: dict[Any, Any] = {}  # how to update, by formula and by which gradients are there

    def step(self, params: Sequence[Tensor]) -> None:
        """Updates those of `params` that have a gradient."""
        slots = [None if p.maybe_leaf is None else p.maybe_leaf.grad_buffer for p in params]
        full = [slot is not None and slot.full for slot in slots]
        eager = self._optimizer.eager
        if not any(full) and not (eager and full):
            return
        self._follow(params, [None if slot is None else slot.array for slot in slots])
        self._hold_state([True] * len(full) if eager else full)
        formula = compile_formula(tuple(self._optimizer.formula(self.group)), self.names)
        changed = [p for p, is_full in zip(params, full, strict=True) if is_full]
        self._update(formula, full, changed)
        for p in changed:
            p.version.count += 1

    def _update(self, formula: Formula, full: list[bool], changed: list[Tensor]) -> None:
        ages: list[float] = self._steps.tolist() if formula.counts else [0.0] * len(full)
        if all(full) and (not formula.counts or min(ages) == max(ages)):
            pattern = None
            if self.names:
                self._steps += 1
        else:
            least = min((age for age, is_full in zip(ages, full, strict=True) if is_full), default=0)
            pattern = tuple(age - least if is_full else None for age, is_full in zip(ages, full, strict=True))
            self._steps += np.array(full, np.float32)
        plan = self._plans.get((formula, pattern))
        if plan is None:
            if len(self._plans) == KEPT:
                self._plans.clear()
            plan = self._plans[formula, pattern] = self._plan(formula, pattern or [0] * len(full))
        values = settings(formula, self.group)
        scalars: dict[float, tuple[float, ...]] = {}
        for first, numbers, calls in plan:
            age = ages[first]
            if age not in scalars:
                scalars[age] = formula.evaluate(age + 1, *values)
            numbers[:] = scalars[age]
            for call in calls:
                call()

    def _follow(self, params: Sequence[Tensor], buffers: list[Array]) -> None:
        """Notices parameters, arrays and buffers that are not what they were, and lays out anew what changed."""
        arrays = [p.array for p in params]
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if same and all(map(is_, arrays, self._arrays)) and all(map(is_, buffers, self._buffers)):
            return
        self._arrays, self._buffers = arrays, buffers
        gradients = list(map(self._describe, arrays, buffers))
        # A buffer of its own may be another one at every step: the state has no reason to move then.
        moved = not same or gradients != self._gradients
        self._params, self._gradients = list(params), gradients
        self._plans.clear()
        if moved:
            self._lay_out()

    def _describe(self, array: Array, buffer: Array) -> Gradient:
        gradient = functools.partial(
            Gradient, size=array.size, line=max(1, LINE // array.itemsize), dtype=array.dtype.str, form=array.shape
        )
        if not array.flags.c_contiguous or (buffer is not None and not buffer.flags.c_contiguous):
            return gradient(rigid=True)
        home: Any = None
        base: Any = getattr(buffer, "base", None)
        if getattr(base, "ndim", None) == 1 and base.dtype == buffer.dtype and base.flags.c_contiguous:
            start = (buffer.ctypes.data - base.ctypes.data) // base.itemsize
            home = (base.ctypes.data, start) if start >= 0 and start + array.size <= base.size else None
        return gradient(home=home)

    def _arrange(self) -> list[Segment]:
        return arrange(self._gradients, pack=_PACK, cap=_TILE)

    def _lay_out(self) -> None:
        """Flat memory for the state of all parameters. What is there already is copied in by `_hold_state`."""
        xp, count = self._xp, len(self._params)
        self._segments = self._arrange()
        self._flats, self._views = [], [{} for _ in range(count)]
        self._steps = xp.zeros(count, np.float32)
        if self._optimizer.counted:
            for index, views in enumerate(self._views):
                views["step"] = self._steps[index : index + 1].reshape(())
        for segment in self._segments:
            dtype = self._arrays[segment.members[0].number].dtype
            flats = {name: xp.zeros(segment.length, dtype) for name in self.names}
            self._flats.append(flats)
            for index, start, stop in segment.members:
                for name, flat in flats.items():
                    self._views[index][name] = self._shape(flat[start:stop], index)

    def _shape(self, flat: Array, index: int) -> Array:
        return flat.reshape(self._arrays[index].shape)

    def _hold_state(self, wanted: list[bool]) -> None:
        """Makes the state of every parameter views of the memory here; copies what it was. wanted: whose begins"""
        state = self._optimizer.state
        if not self.names:
            return
        for index, p in enumerate(self._params):
            entry = state.get(p)
            if entry is None:
                if not wanted[index]:
                    continue
                entry = state[p] = {}
            for name, view in self._views[index].items():
                value = entry.get(name)
                if not (isinstance(value, TensorBase) and value.array is view):
                    self._adopt(index, entry)
                    break

    def _adopt(self, index: int, entry: dict[str, Any]) -> None:
        """Moves one parameter's state into the flat arrays."""
        if not self._optimizer.counted:
            begun = all(entry.get(name) is not None for name in self.names)
            self._steps[index : index + 1] = 1 if begun else 0
        for name, view in self._views[index].items():
            value = entry.get(name)
            if isinstance(value, TensorBase) and value.array is view:
                continue
            if value is None:
                view[...] = 0 if name == "step" else self._optimizer.initial(self.group)
            else:
                source = value.array if isinstance(value, TensorBase) else value
                if np.shape(source) not in (view.shape, (1,) if name == "step" else view.shape):
                    raise StateDictError(f"state {name!r} of shape {np.shape(source)} for a parameter of {view.shape}")
                view[...] = place(source, self._where).reshape(view.shape) if hasattr(source, "shape") else source
            entry[name] = wrap(view, self._where)

    def _plan(self, formula: Formula, marks: Sequence[Any]) -> list[tuple[int, Array, Calls]]:
        """(a parameter of the run, its scalars, calls) of each run."""
        plan = []
        scalars: dict[Any, Array] = {}
        for segment, flats in zip(self._segments, self._flats, strict=True):
            dtype = self._arrays[segment.members[0].number].dtype
            # 16-bit numbers are computed with in float32, and rounded once.
            wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
            numbers = scalars.setdefault(wide, np.zeros(len(formula.scalars), wide))
            size = max(1, segment.length) if segment.rigid else _TILE
            for run in find_runs(segment, marks):
                calls = [
                    call for tile in cut(run, size) for call in self._calls(formula, segment, flats, tile, numbers)
                ]
                plan.append((run[0].number, numbers, calls))
        return plan

    def _calls(self, formula: Formula, segment: Segment, flats: dict[str, Array], tile: Tile, numbers: Array) -> Calls:
        """The passes of a formula over one tile; around them, copies of what does not lie as they want it."""
        dtype = self._arrays[tile.parts[0].number].dtype
        length, narrow = tile.stop - tile.start, dtype != numbers.dtype

        def scratch(use: str) -> Array:
            return self._optimizer.scratch.take(use, numbers.dtype, length)

        def lying(array: Array, part: Part) -> Array:  # a stretch of scratch memory, as what it is copied from lies
            return (
                self._shape(array, part.number) if segment.rigid else array[part.at : part.at + part.end - part.begin]
            )

        def piece(array: Array, part: Part) -> Array:
            return array if segment.rigid else array.reshape(-1)[part.begin : part.end]

        arrays = {name: scratch(name) for name in formula.scratch}
        params = [(piece(self._arrays[part.number], part), part) for part in tile.parts]
        load: list[tuple[Array, Array]] = []
        if segment.flat and not narrow:
            first = segment.members[0].number
            buffer, home = self._buffers[first], self._gradients[first].home
            whole = buffer.reshape(-1) if home is None else buffer.base[home[1] : home[1] + segment.length]
            arrays["grad"] = whole[tile.start : tile.stop]
        else:
            arrays["grad"] = scratch("grad")
            load += [(lying(arrays["grad"], part), piece(self._buffers[part.number], part)) for part in tile.parts]
        store: list[tuple[Array, Array]] = []
        states = {name: flat[tile.start : tile.stop] for name, flat in flats.items()}
        if narrow or segment.rigid:
            param = scratch("p")
            store = [(array, lying(param, part)) for array, part in params]
            params = [(param, Part(0, 0, length, 0))]
        if narrow:
            store += [(array, scratch(name)) for name, array in states.items()]
            states = {name: scratch(name) for name in states}
        load += [(source, target) for target, source in store]
        arrays |= states
        calls: Calls = [functools.partial(np.copyto, target, source, casting="unsafe") for target, source in load]
        for function, inputs, out in formula.passes:
            # A pass that takes parameters goes from one to the next: they lie in arrays of their own.
            for array, part in params if "p" in (*inputs, out) else [(None, Part(0, 0, length, 0))]:
                stretch = slice(part.at, part.at + part.end - part.begin)
                operands = [
                    numbers[each, ...] if isinstance(each, int) else array if each == "p" else arrays[each][stretch]
                    for each in (*inputs, out)
                ]
                calls.append(functools.partial(getattr(np, function), *operands[:-1], out=operands[-1]))
        calls += [functools.partial(np.copyto, target, source, casting="unsafe") for target, source in store]
        return calls
