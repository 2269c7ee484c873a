"""A rank's part of each bucket: parameters, mean gradients and optimizer state of one range, in flat memory.

A rank owns one range of every bucket, so that its state and work are 1/size of the whole. The parameters of a bucket
lie in one flat array, at the places of their gradients, so that one all-gather brings back what the ranks have updated.
What a rank updates is a copy of its own range: the others read it while they write theirs.

`ShardedExchange` gives each rank the mean gradients of its range. The bucket keeps what this rank added up: a second
backward adds to that, and reduces both. So it is not the mean, and reading `param.grad` raises.

State is exchanged as pieces: (parameter's number in the optimizer, start, stop, entry), elements of a parameter thought
of as flat, and what the optimizer remembers of them. A state with an element for each of the piece's is cut and joined
like the parameter; anything else (a count of steps) is the same for all pieces of it. When the plan of buckets changes,
state and gradients move along. Parameters in no bucket (they were frozen when the model was wrapped) have no shard: the
state that was loaded for them is kept whole on one rank until they get a bucket.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator, ReduceOp, Work
from ddp._device import CPU, to_device
from ddp._layout import Place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.errors import StateDictError
from ddp.optim import Optimizer
from ddp.optim.optimizer import Group, copy_state
from ddp.parallel.buckets import Buckets
from ddp.parallel.control import ControlMessage
from ddp.parallel.error_context import error_context
from ddp.parallel.exchange import Exchange, Times

Array = Any
Entry = dict[str, Any]  # the state of one parameter, or of a piece of it
StatePiece = tuple[int, int, int, Entry]
_LINE = 64  # bytes
_WITHHELD = (
    "grad: under ZeroOptimizer each rank has the mean gradient of its own part of the parameters alone, so no rank can "
    "show a whole one. To clip by the global norm: zero.clip_grad_norm_(max_norm), on all ranks; GradScaler takes "
    "the optimizer as it is"
)


class Piece(NamedTuple):
    """What a range holds of one parameter: its elements `start` to `stop`, which stand in the range from `at` on."""

    number: int
    start: int
    stop: int
    at: int

    def of(self, mine: Array) -> Array:
        """Its part of an array of the range's length."""
        return mine[self.at : self.at + self.stop - self.start]


def split_bucket(length: int, line: int, size: int) -> list[int]:
    """How many elements of a bucket each rank owns: as even as possible in whole cache lines.

    A bucket of a multiple of line * size elements is split evenly; others need collectives of uneven lengths.

    length: elements; line: elements in a cache line. `split_bucket(100, 16, 3) == [32, 32, 36]`
    """
    lines = -(-length // line)
    ends = [min(length, lines * rank // size * line) for rank in range(size + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def cut_range(places: Mapping[int, Place], first: int, last: int) -> list[Piece]:
    """What elements `first` to `last` of a bucket hold. An empty parameter is in every range that starts at 0."""
    pieces = []
    for number, position in places.items():
        start, stop = max(position.start, first), min(position.stop, last)
        if start < stop:
            pieces.append(Piece(number, start - position.start, stop - position.start, start - first))
        elif position.start == position.stop and first == 0:
            pieces.append(Piece(number, 0, 0, 0))
    return pieces


class Shard:
    """One bucket on this rank, and the optimizer of its range.

    kind: dtype and length of the bucket; params: those of the optimizer, by their number there; their memory becomes
    part of `whole`; places: theirs in the bucket; alone: nothing else lies in it

    lengths: elements that each rank owns; whole: (length,) all parameters; own: (lengths[rank],) those of this rank,
    while they are updated; grad: (lengths[rank],) the mean gradients of this rank's range
    pieces: what this rank's range holds; leaves: by number, a tensor of each piece's parameters with its gradient
    """

    def __init__(
        self,
        kind: tuple[Any, int],
        params: Mapping[int, Tensor],
        places: Mapping[int, Place],
        alone: bool,
        comm: Communicator,
        xp: Any,
    ) -> None:
        dtype, length = kind
        self.params, self.places, self._alone = params, places, alone
        self.lengths = split_bucket(length, max(1, _LINE // dtype.itemsize), comm.size)
        first = sum(self.lengths[: comm.rank])
        self._range = slice(first, first + self.lengths[comm.rank])
        self.whole: Array = xp.zeros(length, dtype)
        # The others read it where it lies, if they can.
        shared = comm.empty(max(self.lengths), dtype, like=xp.empty(0))
        self.own: Array = shared[: self.lengths[comm.rank]]
        self.grad: Array = xp.zeros(self.lengths[comm.rank], dtype)
        self._home()
        self.pieces = cut_range(places, first, self._range.stop)
        self._views = {piece.number: piece.of(self.own) for piece in self.pieces}
        self.leaves: dict[int, Tensor] = {}
        for piece in self.pieces:
            leaf = wrap(self._views[piece.number], params[piece.number].device).requires_grad_()
            leaf.leaf.grad_buffer.bind(piece.of(self.grad))
            self.leaves[piece.number] = leaf
        self.optimizer: Any = None
        self._groups: list[tuple[Group, Group]] = []  # (the optimizer's own, the one whose settings it takes)

    def make_optimizer(self, kind: type[Optimizer], settings: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Makes the optimizer of this range. groups: of all parameters, whose settings count at each step"""
        leaf_of = {id(self.params[number]): leaf for number, leaf in self.leaves.items()}
        leaves = [[leaf_of[id(p)] for p in group["params"] if id(p) in leaf_of] for group in groups]
        own = [(group, mine) for group, mine in zip(groups, leaves, strict=True) if mine]
        if own:
            self.optimizer = kind([{**_settings(group), "params": mine} for group, mine in own], **settings)
            self._groups = list(zip(self.optimizer.param_groups, [group for group, _ in own], strict=True))

    def step(self, found: Any = None) -> bool:
        """Updates this rank's range, with the settings as they are now. Returns False if no gradient is there.

        found: see `ShardedExchange.step`
        """
        self._zero()
        for piece in self.pieces:
            self.leaves[piece.number].leaf.grad_buffer.full = self._is_full(piece.number)
        reduced = any(map(self._is_full, self.params))
        if reduced:
            self._home()
            self.own[...] = self.whole[self._range]
        for own, group in self._groups:
            own.update(_settings(group))
        if self.optimizer is not None:
            self.optimizer.found_inf = found  # GradScaler sees to it that the class is one that looks at it
            self.optimizer.step()
        return reduced

    def gather_params(self, comm: Communicator) -> Work[Any]:
        """Brings what the ranks have updated to all parameters. Collective."""
        for number, view in self._views.items():
            leaf = self.leaves[number]
            if leaf.array is not view:  # an optimizer that makes new arrays instead of writing into these
                view[...] = leaf.array
                leaf.array = view
        for number, p in self.params.items():
            if self._is_full(number):
                p.version.count += 1
        return comm.all_gather(self.own, lengths=self.lengths, out=self.whole, async_op=True)

    def gather_grads(self, comm: Communicator) -> dict[int, Array]:
        """The whole mean gradient of each parameter, by number. Collective."""
        whole = comm.all_gather(self.grad, lengths=self.lengths)
        return {number: _view(whole, place) for number, place in self.places.items()}

    def take_grad(self, bucket: Array) -> None:
        """The bucket holds the mean gradients of all ranges: this rank's are copied from it."""
        self.grad[...] = bucket[self._range]

    def gradients(self) -> list[Array]:
        """The mean gradients of this rank's range that are there, flat: in one array if all are."""
        self._zero()
        if self._alone and all(map(self._is_full, self.places)):
            parts = [self.grad]
        else:
            parts = [piece.of(self.grad) for piece in self.pieces if self._is_full(piece.number)]
        return [part for part in parts if part.size]

    def state(self) -> Iterator[StatePiece]:
        """The state of this rank's pieces that have one."""
        for piece in self.pieces:
            if entry := self.optimizer.state.get(self.leaves[piece.number]):
                yield piece.number, piece.start, piece.stop, entry

    def put_state(self, find: Callable[[int, int, int], Entry]) -> None:
        """Replaces the state. find: of elements start to stop of a parameter, {} where there is none"""
        if self.optimizer is not None:
            state: defaultdict[Any, Entry] = defaultdict(dict)
            for piece in self.pieces:
                if entry := find(piece.number, piece.start, piece.stop):
                    state[self.leaves[piece.number]] = entry
            self.optimizer.state = state

    def release(self) -> None:
        """Gives the parameters memory of their own, so that this can go."""
        for p in self.params.values():
            if p.array.base is self.whole:
                p.array = p.array.copy()

    def _home(self) -> None:
        """Whatever memory a parameter was put on from outside, its values move to its place in `whole`."""
        for number, p in self.params.items():
            if p.array.base is not self.whole:
                view = _view(self.whole, self.places[number])
                view[...] = p.array
                p.array = view

    def _zero(self) -> None:
        """Where zero_grad put zeros into gradients that were there, there are zeros here, too."""
        for piece in self.pieces:
            if self._is_full(piece.number) and self.params[piece.number].leaf.grad_buffer.zeroed:
                piece.of(self.grad)[...] = 0

    def _is_full(self, number: int) -> bool:
        return self.params[number].leaf.grad_buffer.full


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _view(whole: Array, place: Place) -> Array:
    return whole[place.start : place.stop].reshape(place.shape)


class ShardedExchange(Exchange):
    """Reduces each bucket to the ranks that own its ranges, and holds the optimizers of this rank's.

    kind, settings: the class of what updates a range, and what it is made with
    groups: of the parameters, whose settings count at each step
    named: all parameters of the model that can be trained, those in no group too
    """

    joinable = False  # the step of the optimizer is collective, and a rank without data makes none

    def __init__(
        self,
        comm: Communicator,
        kind: type[Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Group],
        named: Mapping[str, Tensor],
    ) -> None:
        super().__init__(comm)
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.names = {id(p): name for name, p in named.items()}
        self.shards: list[Shard] = []  # one a bucket
        self._kind, self._settings, self._groups, self._named = kind, settings, groups, named
        self._numbers = {id(p): number for number, p in enumerate(self.params)}
        self._resting: dict[int, Entry] = {}  # the state of parameters without a bucket that this rank keeps

    def set_buckets(self, buckets: Buckets) -> None:
        """Makes the shards of these buckets; state and gradients go to the ranks that own them now. Collective."""
        super().set_buckets(buckets)
        first, state = not self.shards, self.state()
        gradients: dict[int, Any] = {}
        for shard in self.shards:
            gradients |= shard.gather_grads(self._comm)
            shard.release()
        self.shards, layout = [], buckets.memory.layout
        for members, kind in zip(buckets.members, layout.buckets, strict=True):
            inside = {
                self._numbers[id(p)]: gradient
                for gradient in members
                if id(p := self._named[buckets.names[gradient]]) in self._numbers
            }
            shard = Shard(
                kind,
                {number: self.params[number] for number in inside},
                {number: layout.places[gradient] for number, gradient in inside.items()},
                len(inside) == len(members),
                self._comm,
                self.params[0].device.xp,
            )
            shard.make_optimizer(self._kind, self._settings, self._groups)
            for piece in shard.pieces if not first else ():
                # What had no place was reduced as a whole, and stands in the bucket.
                whole: Array = gradients.get(piece.number, buckets.memory.views[inside[piece.number]])
                piece.of(shard.grad)[...] = whole.reshape(-1)[piece.start : piece.stop]
            self.shards.append(shard)
        self.put_state(state)
        if not first:  # gradients of a backward of this exchange have moved
            self._withhold()

    def _start(self, index: int) -> Work[Any]:
        shard, buffer = self.shards[index], self._buckets.memory.buffers[index]
        scale, lengths = self._control.scale, shard.lengths
        work: Work[Any] = self._comm.reduce_scatter(
            buffer, ReduceOp.SUM, scale=scale, lengths=lengths, out=shard.grad, async_op=True
        )
        return work

    def finish(self) -> None:
        super().finish()
        self._withhold()

    def _withhold(self) -> None:
        """The gradients that are there now are reduced, and not to be read."""
        for p in self._named.values():
            p.leaf.grad_buffer.withheld = _WITHHELD

    def step(self, found: Any = None) -> None:
        """Updates this rank's pieces, and gathers those of the others: of one bucket while the next is updated.

        found: a float32 on the GPU; the pieces stay as they are where it is not zero
        """
        works: list[tuple[str, Work[Any]]] = []
        for bucket, shard in enumerate(self.shards):
            if shard.step(found):
                what = f"ZeroOptimizer.step: the parameters of {self._buckets.describe(bucket)}"
                with error_context(what):  # of a rank that has left by then, the call itself raises
                    works.append((what, shard.gather_params(self._comm)))
        for what, work in works:
            with error_context(what):
                work.wait()

    def gradients(self) -> list[Any]:
        """The mean gradients that this rank has, as flat arrays."""
        return [each for shard in self.shards for each in shard.gradients()]

    def state(self) -> dict[int, Entry]:
        """The whole state of every parameter that has one, by its number. Collective."""
        mine = [(*piece, {name: _on_host(value) for name, value in entry.items()}) for *piece, entry in self.pieces()]
        return join_state(itertools.chain.from_iterable(self._comm.all_gather_object(mine)), self.params)

    def pieces(self) -> Iterator[StatePiece]:
        """The state that this rank holds. All ranks' pieces together are the whole."""
        for shard in self.shards:
            if shard.optimizer is not None:
                yield from shard.state()
        for number, entry in self._resting.items():
            yield number, 0, self.params[number].array.size, entry

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(parameter's number, start, stop) of what this rank holds, or would hold, a state of."""
        for shard in self.shards:
            yield from (piece[:3] for piece in shard.pieces)
        for number in self._without_bucket():
            yield number, 0, self.params[number].array.size

    def _without_bucket(self) -> list[int]:
        """The parameters without a bucket whose state this rank keeps."""
        placed = {number for shard in self.shards for number in shard.params}
        return [n for n in range(self._comm.rank, len(self.params), self._comm.size) if n not in placed]

    def put_pieces(self, find: Callable[[int, int, int], Mapping[str, Any]]) -> None:
        """Replaces this rank's state. find: the state of elements start to stop of a parameter, {} if it has none"""

        def copied(number: int, start: int, stop: int) -> Entry:
            entry: Entry = copy_state(number, dict(find(number, start, stop)), self.params[number])
            return entry

        for shard in self.shards:
            shard.put_state(copied)
        wholes = {number: copied(number, 0, self.params[number].array.size) for number in self._without_bucket()}
        self._resting = {number: entry for number, entry in wholes.items() if entry}

    def put_state(self, whole: Mapping[int, Entry]) -> None:
        """Keeps of the whole state what is this rank's.

        Raises: StateDictError, on every rank, for a state that is neither of its parameter's shape nor one value;
        nothing has changed then.
        """
        for number, entry in whole.items():
            p = self.params[number]
            for name, value in entry.items():
                array = array_of(value)
                if not has_elements(name, value, p.shape) and getattr(array, "size", 1) != 1:
                    name_of = self.names[id(p)]
                    raise StateDictError(f"state {name!r} of shape {array.shape} for {name_of} of shape {p.shape}")

        def find(number: int, start: int, stop: int) -> Entry:
            found, shape = {}, self.params[number].shape
            for name, value in whole.get(number, {}).items():
                if has_elements(name, value, shape):
                    value = wrapped_like(value, array_of(value).reshape(-1)[start:stop])
                found[name] = value
            return found

        self.put_pieces(find)


class WholeGradientExchange(ShardedExchange):
    """With micro_batches: a tree adds whole gradients on every rank, and each rank's optimizer updates its part.

    So memory of optimizer state is shared out, and an all-reduce costs what it does without.

    tree: the model's own exchange; others: see ShardedExchange
    """

    def __init__(self, tree: Exchange, *others: Any) -> None:
        self._tree = tree
        super().__init__(*others)

    def set_buckets(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        self._tree.set_buckets(buckets)

    def begin(self, control: ControlMessage) -> None:
        self._tree.begin(control)

    def launch(self, index: int) -> None:
        self._tree.launch(index)

    def poll(self) -> None:
        self._tree.poll()

    def finish(self) -> None:
        self._tree.finish()
        for shard, buffer in zip(self.shards, self._buckets.memory.buffers, strict=True):
            shard.take_grad(buffer)
        self._withhold()

    def times(self) -> list[Times | None]:
        return self._tree.times()


def join_state(pieces: Iterable[StatePiece], params: Sequence[Tensor]) -> dict[int, Entry]:
    """The whole state of every parameter that has one, by its number. pieces: of all ranks, arrays on the host

    A state has elements if in all pieces it has as many as the piece: a piece of one element cannot say.
    """
    found: dict[int, dict[str, list[tuple[int, Any]]]] = {}
    for number, start, stop, entry in sorted(pieces, key=lambda piece: piece[:2]):
        for name, value in entry.items():
            found.setdefault(number, {}).setdefault(name, []).append((stop - start, value))
    return {
        number: {name: _joined(name, parts, params[number]) for name, parts in entry.items()}
        for number, entry in found.items()
    }


def _joined(name: str, parts: Sequence[tuple[int, Any]], p: Tensor) -> Any:
    first = parts[0][1]
    if name == "step" or not all(hasattr(value, "__dlpack__") for _, value in parts):
        return first
    if any(array_of(value).shape not in ((length,), p.shape) for length, value in parts):
        return first
    whole = np.concatenate([array_of(value).reshape(-1) for _, value in parts]).reshape(p.shape)
    return wrap(to_device(whole, p.device), p.device) if isinstance(first, TensorBase) else whole


def has_elements(name: str, value: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether a state, a tensor or an array, has an element for each one of its parameter. shapes: of the latter"""
    return name != "step" and hasattr(value, "__dlpack__") and array_of(value).shape in shapes


def array_of(value: Any) -> Any:
    """The array of a tensor; anything else as it is."""
    return value.array if isinstance(value, TensorBase) else value


def wrapped_like(value: Any, array: Array) -> Any:
    """`array`; as a tensor if `value` is a tensor."""
    return wrap(array, value.device) if isinstance(value, TensorBase) else array


def _on_host(value: Any) -> Any:
    if isinstance(value, TensorBase):
        return wrap(to_device(value.array, CPU), CPU)
    return to_device(value, CPU) if hasattr(value, "__dlpack__") else value
