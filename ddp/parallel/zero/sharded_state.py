"""The optimizer's state in parts on the ranks, and whole beside each parameter, as other optimizers keep it.

A state that has an element for each of a piece's is cut and joined like the parameter. Anything else (a count of steps)
is the same for all pieces of a parameter. When the plan of buckets changes, state and gradients move along: `ShardSet`.

Parameters that are in no bucket (frozen ones, or such that no rank has used for long) have no shard. The state that
they may have is kept whole on one rank until they get a bucket again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectives import Communicator
from ddp._device import CPU, device, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.optim.optimizer import Group
from ddp.optim.tiled_update import Tiled
from ddp.parallel.buckets import Buckets
from ddp.parallel.error_context import error_context
from ddp.parallel.zero.shards import Piece, Shard

Array = Any
Entry = dict[str, Any]  # the state of one parameter, or of a piece of it
Convert = Callable[..., Any]  # (name of a state, its value, p=the parameter): what this rank keeps of it


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """The state of one bucket on this rank.

    order: the parameters of the bucket by the number of their gradient; entries: of each of the shard's pieces
    """

    shard: Shard
    order: Mapping[int, int]
    entries: Sequence[Entry]

    def pieces(self) -> Iterator[tuple[int, Piece, Entry]]:
        """(parameter, piece, its state) of all that have one."""
        for piece, entry in zip(self.shard.pieces, self.entries, strict=True):
            if entry:
                yield self.order[piece.number], piece, entry


@dataclass(frozen=True, kw_only=True)
class StateKind:
    """What a rank says of a state.

    dtype: it has some of the state's elements, of that dtype; None: the state is `value`, the array of a tensor if
    `in_tensor`
    """

    dtype: Any = None
    value: Any = None
    in_tensor: bool = False


def join(
    states: Sequence[ShardState], unplaced: Mapping[int, Entry], comm: Communicator, where: device
) -> dict[int, Entry]:
    """The whole state of every parameter that has one, by its number, on every rank. Collective.

    states: of each bucket; unplaced: state of parameters without a bucket, each on one rank
    """
    kinds = {number: _kinds_of(entry, None) for number, entry in unplaced.items()}
    for state in states:
        kinds.update({number: _kinds_of(entry, piece) for number, piece, entry in state.pieces()})
    agreed = agree(comm.all_gather_object(kinds))
    whole: dict[int, Entry] = {
        number: {name: _value(each) for name, each in entry.items()} for number, entry in agreed.items()
    }
    for state in states:
        shard = state.shard
        dtypes = {
            (name, str(each.dtype)): each.dtype
            for number in state.order.values()
            for name, each in agreed.get(number, {}).items()
            if each.dtype is not None
        }
        for (name, text), dtype in sorted(dtypes.items()):
            # As text: NumPy says that None equals the dtype float64.
            having = {number for number, entry in agreed.items() if name in entry and str(entry[name].dtype) == text}
            mine = where.xp.zeros(shard.own.size, dtype)
            for number, piece, entry in state.pieces():
                if number in having:
                    mine[piece.at : piece.at + piece.stop - piece.start] = _array(entry[name])
            joined = shard.gather(mine, comm)
            for gradient, number in state.order.items():
                if number in having:
                    whole[number][name] = wrap(shard.cut(joined, gradient), where)
    return whole


def agree(everyones: Sequence[Mapping[int, Mapping[str, StateKind]]]) -> dict[int, dict[str, StateKind]]:
    """One answer for each state, in the order of parameters: elements only if all ranks that have it have elements."""
    agreed: dict[int, dict[str, StateKind]] = {}
    for kinds in everyones:
        for number, entry in kinds.items():
            known = agreed.setdefault(number, {})
            for name, each in entry.items():
                if name not in known or (known[name].dtype is not None and each.dtype is None):
                    known[name] = each
    return {number: agreed[number] for number in sorted(agreed)}


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


def _kinds_of(entry: Entry, piece: Piece | None) -> dict[str, StateKind]:
    """piece: what the state is of; None: of a whole parameter."""
    kinds = {}
    for name, value in entry.items():
        array = _array(value)
        if not hasattr(array, "dtype"):
            kinds[name] = StateKind(value=value)
        elif piece is not None and name != "step" and array.shape == (piece.stop - piece.start,):
            kinds[name] = StateKind(dtype=array.dtype)
        else:
            kinds[name] = StateKind(value=place(array, CPU), in_tensor=True)
    return kinds


def _value(kinds: StateKind) -> Any:
    return wrap(kinds.value, CPU) if kinds.in_tensor else kinds.value


def _array(value: Any) -> Any:
    return value.array if isinstance(value, TensorBase) else value


class ShardOptimizer:
    """Updates a shard.

    kind: the class, settings: what it is made with; groups: those of the whole optimizer, whose settings count
    numbers: of the optimizer's parameters, by id
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
        self._order = {gradient: numbers[id(p)] for gradient, p in shard.parameters.items()}
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
        if isinstance(self._optimizer, Tiled) and isinstance(other._optimizer, Tiled):
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

    def shard_state(self) -> ShardState:
        """The state of the pieces."""
        state: Mapping[Any, Entry] = {} if self._optimizer is None else self._optimizer.state
        return ShardState(
            shard=self.shard, order=self._order, entries=[state.get(leaf, {}) for leaf in self.shard.leaves]
        )

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
        return join([part.shard_state() for part in self._parts], self._unplaced, self._comm, self._where)

    def pieces(self) -> Iterator[tuple[int, int, int, Entry]]:
        """(parameter's number, start, stop, state) of what this rank holds: elements start to stop, thought of as flat.

        All ranks' pieces together are the whole state. State that rests is on one rank, whole.
        """
        for part in self._parts:
            for number, piece, entry in part.shard_state().pieces():
                yield number, piece.start, piece.stop, entry
        for number, entry in self._unplaced.items():
            yield number, 0, self.params[number].array.size, entry

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(parameter's number, start, stop) of what this rank holds, or would hold, a state of."""
        placed = set()
        for part in self._parts:
            for piece in part.shard.pieces:
                yield self._numbers[id(part.shard.parameters[piece.number])], piece.start, piece.stop
            placed |= {self._numbers[id(p)] for p in part.shard.parameters.values()}
        for number, p in enumerate(self.params):
            if number not in placed and number % self._comm.size == self._comm.rank:
                yield number, 0, p.array.size

    def put_pieces(self, find: Callable[[int, int, int], Entry], convert: Convert) -> None:
        """Replaces this rank's state. find: the state of elements start to stop of a parameter, {} if it has none"""
        placed = set()
        for part in self._parts:
            shard, entries = part.shard, []
            for piece in shard.pieces:
                p = shard.parameters[piece.number]
                found = find(self._numbers[id(p)], piece.start, piece.stop)
                entries.append({name: convert(name, value, p=p) for name, value in found.items()})
            part.put(entries)
            placed |= {self._numbers[id(p)] for p in shard.parameters.values()}
        self._unplaced = {}
        for number, p in enumerate(self.params):
            if number not in placed and number % self._comm.size == self._comm.rank:
                entry = {name: convert(name, value, p=p) for name, value in find(number, 0, p.array.size).items()}
                for name, value in entry.items():
                    if isinstance(value, TensorBase) and value.array.shape == (p.array.size,) and name != "step":
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
