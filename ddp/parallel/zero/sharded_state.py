"""The optimizer's state: in parts on the ranks, and joined as other optimizers keep it, by parameter.

A state that has an element for each of a piece's is cut and joined like the parameter. Anything else (a count of steps)
is the same for all pieces of a parameter. When the plan of buckets changes, state and gradients move along: `ShardSet`.

Parameters that are in no bucket (frozen ones, or such that no rank has used for long) have no shard. The state that
they may have is kept whole on one rank until they get a bucket again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._device import CPU, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.optim.flat_update import FlatOptimizer
from ddp.optim.optimizer import Group
from ddp.parallel.buckets import Buckets
from ddp.parallel.error_context import error_context
from ddp.parallel.zero.shards import Shard

Array = Any
Entry = dict[str, Any]  # the state of one parameter, or of a piece of it
Convert = Callable[..., Any]  # (name of a state, its value, p=the parameter): what this rank keeps of it


@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """The state of elements `start` to `stop` of a parameter, thought of as flat. number: of the parameter"""

    number: int
    start: int
    stop: int
    entry: Entry


def join(everyones: Iterable[StatePiece], params: Sequence[Tensor]) -> dict[int, Entry]:
    """The whole state of every parameter that has one, by its number. everyones: all ranks' pieces, arrays on the host

    A state has elements if in all pieces it has as many as the piece: a piece of one element cannot say.
    """
    found: dict[int, dict[str, list[tuple[StatePiece, Any]]]] = {}
    for piece in sorted(everyones, key=lambda piece: (piece.number, piece.start)):
        for name, value in piece.entry.items():
            found.setdefault(piece.number, {}).setdefault(name, []).append((piece, value))
    return {
        number: {name: _joined(name, parts, params[number]) for name, parts in entry.items()}
        for number, entry in found.items()
    }


def _joined(name: str, parts: Sequence[tuple[StatePiece, Any]], p: Tensor) -> Any:
    shapes = [((piece.stop - piece.start,), p.shape) for piece, _ in parts]
    arrays = [value for _, value in parts]
    if not isinstance(arrays[0], np.ndarray):
        return arrays[0]
    if name == "step" or any(array.shape not in shape for array, shape in zip(arrays, shapes, strict=True)):
        return wrap(arrays[0], CPU)
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    return wrap(place(flat.reshape(p.shape), p.device), p.device)


def cut(entry: Mapping[str, Any], shape: tuple[int, ...], start: int, stop: int) -> Entry:
    """The state of elements start to stop of a parameter of that shape, from the whole, which has passed `check`."""
    found = {}
    for name, value in entry.items():
        if _has_elements(name, value, shape):
            where = value.device if isinstance(value, TensorBase) else CPU
            value = wrap(_array(value).reshape(-1)[start:stop], where)
        found[name] = value
    return found


def check(parameter: str, entry: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raises: StateDictError for a state that is neither of the parameter's shape nor one value."""
    for name, value in entry.items():
        array = _array(value)
        if not _has_elements(name, value, shape) and getattr(array, "size", 1) != 1:
            raise StateDictError(f"state {name!r} of shape {array.shape} for {parameter} of shape {shape}")


def _has_elements(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    array = _array(value)
    return name != "step" and hasattr(array, "dtype") and array.shape == shape


def _array(value: Any) -> Any:
    return value.array if isinstance(value, TensorBase) else value


class ShardOptimizer:
    """Updates a shard.

    kind: the class, settings: what it is made with; groups: those of the whole optimizer, whose settings count
    numbers: of the optimizer's parameters, by id; order: the parameters of the bucket by the number of their gradient
    """

    def __init__(
        self,
        shard: Shard,
        kind: type[Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Group],
        numbers: Mapping[int, int],
    ) -> None:
        self.shard = shard
        self.order = {gradient: numbers[id(p)] for gradient, p in shard.parameters.items()}
        leaf_of = {
            id(shard.parameters[piece.number]): leaf for piece, leaf in zip(shard.pieces, shard.leaves, strict=True)
        }
        self._optimizer: Optimizer | None = None
        self._groups: list[tuple[Group, Group]] = []  # (the optimizer's own, the one whose settings it takes)
        own = []
        for group in groups:
            leaves: list[Tensor] = [leaf_of[id(p)] for p in group["params"] if id(p) in leaf_of]
            if leaves:
                own.append(({**_settings(group), "params": leaves}, group))
        if own:
            self._optimizer = kind([group for group, _ in own], **settings)
            self._groups = list(zip(self._optimizer.param_groups, [group for _, group in own], strict=True))

    def share_scratch(self, other: ShardOptimizer) -> None:
        """Uses the other's scratch memory, since only one of them updates at a time."""
        if isinstance(self._optimizer, FlatOptimizer) and isinstance(other._optimizer, FlatOptimizer):
            self._optimizer.scratch = other._optimizer.scratch

    def update(self, found: Any = None) -> None:
        """One step of this rank's pieces, with the settings as they are now. found: see `ShardSet.step`"""
        for own, group in self._groups:
            own.update(_settings(group))
        optimizer: Any = self._optimizer
        if optimizer is None:
            return
        if found is None:
            optimizer.step()
            return
        optimizer.found_inf = found  # GradScaler sees to it that the class is one that looks at it
        try:
            optimizer.step()
        finally:
            optimizer.found_inf = None

    def pieces(self) -> Iterator[StatePiece]:
        """The state of this rank's pieces that have one."""
        state: Mapping[Any, Entry] = {} if self._optimizer is None else self._optimizer.state
        for piece, leaf in zip(self.shard.pieces, self.shard.leaves, strict=True):
            if entry := state.get(leaf):
                yield StatePiece(number=self.order[piece.number], start=piece.start, stop=piece.stop, entry=entry)

    def put(self, entries: Sequence[Entry]) -> None:
        """Replaces the state. entries: of each piece; without a name: it has none"""
        if self._optimizer is not None:
            state: defaultdict[Any, Entry] = defaultdict(dict)
            state.update({leaf: entry for leaf, entry in zip(self.shard.leaves, entries, strict=True) if entry})
            self._optimizer.state = state


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class ShardSet:
    """The optimizer on this rank.

    kind, settings: the class of what updates a shard, and what it is made with
    groups: of the parameters, whose settings count at each step
    named: all parameters of the model that can be trained, those in no group too
    """

    def __init__(
        self,
        kind: type[Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Group],
        named: Mapping[str, Tensor],
        comm: Communicator,
    ) -> None:
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self._numbers = {id(p): number for number, p in enumerate(self.params)}
        self._names = {id(p): name for name, p in named.items()}
        self._named = named
        self._partial = partial(ShardOptimizer, kind=kind, settings=settings, groups=groups, numbers=self._numbers)
        self._comm = comm
        self._where = self.params[0].device
        self._parts: list[ShardOptimizer] = []  # one a bucket
        self._buckets: Buckets
        self._unplaced: dict[int, Entry] = {}

    def set_buckets(self, buckets: Buckets) -> list[Shard]:
        """Makes the shards of these buckets; state and gradients go to the ranks that own them now. Collective."""
        first, state = not self._parts, self.state()
        gradients: dict[int, Any] = {}
        for part in self._parts:
            shard = part.shard
            gathered = shard.gather(shard.grad, self._comm)
            gradients.update({id(p): shard.cut(gathered, number) for number, p in shard.parameters.items()})
            shard.release()
        self._parts, self._buckets = [], buckets
        for bucket, members in enumerate(buckets.members):
            named = {number: self._named[buckets.names[number]] for number in members}
            inside = {number: p for number, p in named.items() if id(p) in self._numbers}
            shard = Shard(buckets, bucket, inside, self._comm, self._where)
            if not first:
                # What had no place was reduced as a whole, and stands in the bucket.
                shard.fill({n: gradients.get(id(p), buckets.memory.views[n]) for n, p in inside.items()})
            part = self._partial(shard)
            if self._parts:
                part.share_scratch(self._parts[0])
            self._parts.append(part)
        self.put_state(state, _kept)
        return [part.shard for part in self._parts]

    def step(self, found: Any = None) -> None:
        """Updates this rank's pieces, and gathers those of the others: of one bucket while the next is updated.

        found: a float32 on the GPU; the pieces stay as they are where it is not zero
        """
        works = []
        for bucket, part in enumerate(self._parts):
            reduced = part.shard.load()
            part.update(found)
            if reduced:
                works.append((bucket, part.shard.store(self._comm)))
        for bucket, work in works:
            with error_context(f"ZeroOptimizer.step: the parameters of {self._buckets.describe(bucket)}"):
                work.wait()

    def gradients(self) -> list[Any]:
        """The mean gradients that this rank has, as flat arrays."""
        return [each for part in self._parts for each in part.shard.gradients()]

    def state(self) -> dict[int, Entry]:
        """The whole state of every parameter that has one, by its number. Collective."""

        def on_host(value: Any) -> Any:
            array = _array(value)
            return place(array, CPU) if hasattr(array, "dtype") else value

        mine = [
            replace(piece, entry={name: on_host(value) for name, value in piece.entry.items()})
            for piece in self.pieces()
        ]
        return join(chain.from_iterable(self._comm.all_gather_object(mine)), self.params)

    def pieces(self) -> Iterator[StatePiece]:
        """The state that this rank holds. All ranks' pieces together are the whole; state that rests is on one rank."""
        for part in self._parts:
            yield from part.pieces()
        for number, entry in self._unplaced.items():
            yield StatePiece(number=number, start=0, stop=self.params[number].array.size, entry=entry)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(parameter's number, start, stop) of what this rank holds, or would hold, a state of."""
        for part in self._parts:
            for piece in part.shard.pieces:
                yield part.order[piece.number], piece.start, piece.stop
        for number in self._resting():
            yield number, 0, self.params[number].array.size

    def _resting(self) -> list[int]:
        """The parameters without a bucket whose state this rank keeps."""
        placed = {number for part in self._parts for number in part.order.values()}
        return [n for n in range(self._comm.rank, len(self.params), self._comm.size) if n not in placed]

    def put_pieces(self, find: Callable[[int, int, int], Entry], convert: Convert) -> None:
        """Replaces this rank's state. find: the state of elements start to stop of a parameter, {} if it has none"""

        def found(number: int, start: int, stop: int) -> Entry:
            p = self.params[number]
            return {name: convert(name, value, p=p) for name, value in find(number, start, stop).items()}

        for part in self._parts:
            part.put([found(part.order[piece.number], piece.start, piece.stop) for piece in part.shard.pieces])
        self._unplaced = {}
        for number in self._resting():
            p = self.params[number]
            entry = found(number, 0, p.array.size)
            for name, value in entry.items():
                if isinstance(value, TensorBase) and _has_elements(name, value, (p.array.size,)):
                    entry[name] = wrap(value.array.reshape(p.shape), value.device)
            if entry:
                self._unplaced[number] = entry

    def put_state(self, whole: Mapping[int, Entry], convert: Convert) -> None:
        """Keeps of the whole state what is this rank's.

        Raises: StateDictError, on every rank, for a state of a wrong shape; nothing has changed then.
        """
        for number, entry in whole.items():
            check(self._names[id(self.params[number])], entry, self.params[number].shape)

        def find(number: int, start: int, stop: int) -> Entry:
            return cut(whole.get(number, {}), self.params[number].shape, start, stop)

        self.put_pieces(find, convert)


def _kept(name: str, value: Any, p: Tensor) -> Any:
    """A state as it is, in memory of its own, where its parameter is; a count of steps stays on the host."""
    if not isinstance(value, TensorBase):
        return value
    where = p.device if value.array.ndim and name != "step" else value.device
    return wrap(place(value.array, where).copy(), where)
