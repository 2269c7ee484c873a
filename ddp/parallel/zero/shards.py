"""Shards: the parameters, mean gradients and optimizer state of a rank's range of each bucket, in flat memory.

A rank owns one range of every bucket, so its state and work are about 1/size of the whole. The parameters of a bucket
are stored in one flat array, with the same layout as their gradients, so that one all-gather distributes the updated
ranges. A rank updates a copy of its range, because the other ranks read that copy while the all-gather writes to the
flat array.

`ShardedExchange` gives each rank the mean gradients of its range. The bucket keeps this rank's own sum. A second
backward adds to this sum, and the total is reduced. The bucket does not contain the mean, so reading `param.grad`
raises an error.

State is exchanged as pieces: (number of the parameter in the optimizer, start, stop, entry). The entry is the state of
elements start to stop of the flattened parameter. An elementwise state, which has one value for each element, is cut
and joined like the parameter; any other state (a step count) is equal for all pieces. A parameter of one element keeps
its shape, so that its elementwise states can be told from single values. When the plan of buckets changes, state and
gradients move to their new owners. Parameters without a bucket (they were frozen when the model was wrapped) have no
shard: one rank keeps the whole state that was loaded for them until they get a bucket.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator, ReduceOp, Work
from ddp._device import CPU, to_device
from ddp._engine.grad_buffer import EMPTY, FULL, ZEROED
from ddp._layout import BucketSlice
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
# The state of a parameter, or of a piece of it, by name.
Entry = dict[str, Any]
# (number of the parameter, start, stop, entry).
StatePiece = tuple[int, int, int, Entry]
# By (number of the parameter, start, stop): the entry, {} if there is none.
Pieces = Mapping[tuple[int, int, int], Entry]
# Takes the number of a parameter, start and stop. Returns the state of these elements, {} if there is none.
FindState = Callable[[int, int, int], Mapping[str, Any]]
# Bytes of a cache line.
_LINE = 64
_READ_ERROR = (
    "grad: under ZeroOptimizer each rank has the mean gradient of its own part of the parameters alone, so no rank can "
    "show a whole one. To clip by the global norm: zero.clip_grad_norm_(max_norm), on all ranks; GradScaler takes "
    "the optimizer as it is"
)


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter, which begin at `offset` in a rank's range of the bucket."""

    number: int
    start: int
    stop: int
    offset: int

    def of(self, array: Array) -> Array:
        """The view of this piece in an array that covers the range."""
        return array[self.offset : self.offset + self.stop - self.start]


def split_bucket(length: int, line: int, size: int) -> list[int]:
    """How many elements of a bucket each rank owns: whole cache lines, as evenly as possible.

    The last range also contains the end of the bucket, which may be a part of a cache line.

    length: of the bucket; line: elements in a cache line; size: number of ranks

    `split_bucket(100, 16, 3) == [32, 32, 36]`
    """
    lines = -(-length // line)
    ends = [min(length, lines * rank // size * line) for rank in range(size + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def cut_range(slices: Mapping[int, BucketSlice], first: int, last: int) -> list[Piece]:
    """The pieces in elements `first` to `last` of a bucket. An empty parameter belongs to every range that starts at 0.

    slices: of the parameters in the bucket, by number
    """
    pieces = []
    for number, part in slices.items():
        start = max(part.start, first)
        stop = min(part.stop, last)
        if start < stop:
            pieces.append(Piece(number, start - part.start, stop - part.start, start - first))
        elif part.start == part.stop and first == 0:
            pieces.append(Piece(number, 0, 0, 0))
    return pieces


class Shard:
    """One bucket on this rank, and the optimizer of this rank's range of it.

    dtype, length: of the bucket; params: the optimizer's parameters in it, by number; they become views of `whole`
    slices: of these parameters in the bucket; complete: the bucket contains no other parameters

    lengths: how many elements each rank owns; whole: (length,) all parameters; own: (lengths[rank],) the copy of this
    rank's range that is updated; grad: (lengths[rank],) the mean gradients of this rank's range
    pieces: of this rank's range; leaves: by number, a tensor for each piece in `own`, with its gradient
    """

    def __init__(
        self,
        dtype: Any,
        length: int,
        params: Mapping[int, Tensor],
        slices: Mapping[int, BucketSlice],
        complete: bool,
        comm: Communicator,
        xp: Any,
    ) -> None:
        self.params = params
        self.slices = slices
        self._complete = complete
        self.lengths = split_bucket(length, max(1, _LINE // dtype.itemsize), comm.size)
        own_length = self.lengths[comm.rank]
        first = sum(self.lengths[: comm.rank])
        self._range = slice(first, first + own_length)
        self.whole: Array = xp.zeros(length, dtype)
        # In shared memory, if possible: the other ranks of the node read this range directly.
        shared = comm.empty(max(self.lengths), dtype, like=xp.empty(0))
        self.own: Array = shared[:own_length]
        self.grad: Array = xp.zeros(own_length, dtype)
        self._move_params()
        self.pieces = cut_range(slices, first, self._range.stop)
        self._views: dict[int, Array] = {}
        self.leaves: dict[int, Tensor] = {}
        for piece in self.pieces:
            p = params[piece.number]
            shape = piece_shape(p, piece.stop - piece.start)
            view = piece.of(self.own).reshape(shape)
            leaf = wrap(view, p.device).requires_grad_()
            leaf.leaf.grad_buffer.bind(piece.of(self.grad).reshape(shape))
            self._views[piece.number] = view
            self.leaves[piece.number] = leaf
        self.optimizer: Any = None
        self._groups: list[tuple[Group, Group]] = []  # (group of `optimizer`, the group whose settings it takes)

    def make_optimizer(
        self, optimizer_class: type[Optimizer], settings: Mapping[str, Any], groups: Sequence[Group]
    ) -> None:
        """Makes the optimizer of this range. groups: of all parameters; their settings apply at each step"""
        leaf_of = {id(self.params[number]): leaf for number, leaf in self.leaves.items()}
        sources = []
        leaf_groups = []
        for group in groups:
            leaves = [leaf_of[id(p)] for p in group["params"] if id(p) in leaf_of]
            if leaves:
                sources.append(group)
                leaf_groups.append({**_settings(group), "params": leaves})
        if leaf_groups:
            self.optimizer = optimizer_class(leaf_groups, **settings)
            self._groups = list(zip(self.optimizer.param_groups, sources, strict=True))

    def step(self, found_inf: Any = None) -> bool:
        """Updates this rank's range, with the current settings. Returns False if the bucket has no gradient.

        found_inf: see `ShardedExchange.step`
        """
        self._zero_grads()
        for piece in self.pieces:
            self.leaves[piece.number].leaf.grad_buffer.state = FULL if self._is_full(piece.number) else EMPTY
        has_grads = any(map(self._is_full, self.params))
        if has_grads:
            self._move_params()
            self.own[...] = self.whole[self._range]
        for group, source in self._groups:
            group.update(_settings(source))
        if self.optimizer is not None:
            self.optimizer.found_inf = found_inf  # GradScaler gives one only to classes that read it; else None
            self.optimizer.step()
        return has_grads

    def gather_params(self, comm: Communicator) -> Work[Any]:
        """Gathers the updated ranges of all ranks into `whole`. Collective."""
        for number, view in self._views.items():
            leaf = self.leaves[number]
            if leaf.array is not view:  # the optimizer has assigned a new array instead of writing into the view
                view[...] = leaf.array
                leaf.array = view
        for number, p in self.params.items():
            if self._is_full(number):
                p.version.count += 1
        return comm.all_gather(self.own, lengths=self.lengths, out=self.whole, async_op=True)

    def gather_grads(self, comm: Communicator) -> dict[int, Array]:
        """The whole mean gradients, by the numbers of the parameters. Collective."""
        whole = comm.all_gather(self.grad, lengths=self.lengths)
        return {number: _view(whole, part) for number, part in self.slices.items()}

    def copy_grads(self, bucket: Array) -> None:
        """Copies this rank's range of a bucket that contains all mean gradients."""
        self.grad[...] = bucket[self._range]

    def gradients(self) -> list[Array]:
        """The mean gradients of this rank's range, flat, without empty arrays.

        They are one array if the optimizer has all parameters of the bucket and each has a gradient. Otherwise each
        parameter that has a gradient has an array of its own.
        """
        self._zero_grads()
        if self._complete and all(map(self._is_full, self.slices)):
            parts = [self.grad]
        else:
            parts = [piece.of(self.grad) for piece in self.pieces if self._is_full(piece.number)]
        return [part for part in parts if part.size]

    def state(self) -> Iterator[StatePiece]:
        """The pieces of state on this rank. The bucket's optimizer must exist."""
        for piece in self.pieces:
            if entry := self.optimizer.state.get(self.leaves[piece.number]):
                yield piece.number, piece.start, piece.stop, entry

    def put_state(self, pieces: Pieces) -> None:
        """Replaces the state. pieces: those of this bucket must be among them"""
        if self.optimizer is not None:
            state: defaultdict[Any, Entry] = defaultdict(dict)
            for piece in self.pieces:
                if entry := pieces[piece[:3]]:
                    state[self.leaves[piece.number]] = entry
            self.optimizer.state = state

    def release(self) -> None:
        """Copies the parameters out of `whole`, so that it can be freed."""
        for p in self.params.values():
            if p.array.base is self.whole:
                p.array = p.array.copy()

    def _move_params(self) -> None:
        """Makes all parameters views of `whole`, including those whose array was replaced from outside."""
        for number, p in self.params.items():
            if p.array.base is not self.whole:
                view = _view(self.whole, self.slices[number])
                view[...] = p.array
                p.array = view

    def _zero_grads(self) -> None:
        """Sets a mean gradient to zero if zero_grad has set the gradient in the bucket to zero."""
        for piece in self.pieces:
            if self.params[piece.number].leaf.grad_buffer.state is ZEROED:
                piece.of(self.grad)[...] = 0

    def _is_full(self, number: int) -> bool:
        return self.params[number].leaf.grad_buffer.full


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _view(whole: Array, part: BucketSlice) -> Array:
    return whole[part.start : part.stop].reshape(part.shape)


class ShardedExchange(Exchange):
    """Reduces the ranges of each bucket to the ranks that own them, and holds the optimizers of this rank's ranges.

    optimizer_class, settings: class and arguments of the optimizer of a range
    groups: of the parameters; their settings apply at each step
    named: all floating-point parameters of the model by name, including those in no group
    """

    joinable = False  # the optimizer's step is collective, and a rank without data makes no step

    def __init__(
        self,
        comm: Communicator,
        optimizer_class: type[Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Group],
        named: Mapping[str, Tensor],
    ) -> None:
        super().__init__(comm)
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.names = {id(p): name for name, p in named.items()}
        self.shards: list[Shard] = []  # one for each bucket
        self._optimizer_class = optimizer_class
        self._settings = settings
        self._groups = groups
        self._named = named
        self._numbers = {id(p): number for number, p in enumerate(self.params)}
        self._unplaced: dict[int, Entry] = {}  # this rank's share of the state of parameters without a bucket

    def set_buckets(self, buckets: Buckets) -> None:
        """Makes the shards of new buckets, and moves state and gradients to the ranks that own them now. Collective."""
        super().set_buckets(buckets)
        old_shards = self.shards
        state = self.state()
        gradients: dict[int, Any] = {}
        for shard in old_shards:
            gradients |= shard.gather_grads(self._comm)
            shard.release()
        self.shards = []
        layout = buckets.memory.layout
        for members, (dtype, length) in zip(buckets.members, layout.buckets, strict=True):
            indices = {}
            for index in members:
                p = self._named[buckets.names[index]]
                if id(p) in self._numbers:
                    indices[self._numbers[id(p)]] = index
            shard = Shard(
                dtype,
                length,
                {number: self.params[number] for number in indices},
                {number: layout.slices[index] for number, index in indices.items()},
                len(indices) == len(members),
                self._comm,
                self.params[0].device.xp,
            )
            shard.make_optimizer(self._optimizer_class, self._settings, self._groups)
            if old_shards:
                for piece in shard.pieces:
                    # A parameter that had no bucket had no shard: its whole mean is in the new bucket.
                    whole: Array = gradients.get(piece.number, buckets.memory.views[indices[piece.number]])
                    piece.of(shard.grad)[...] = whole.reshape(-1)[piece.start : piece.stop]
            self.shards.append(shard)
        self.put_pieces(self.split_state(state))
        if old_shards:  # there may be mean gradients of an earlier backward
            self._forbid_reading()

    def _start(self, index: int) -> Work[Any]:
        shard = self.shards[index]
        work: Work[Any] = self._comm.reduce_scatter(
            self._buckets.memory.buffers[index],
            ReduceOp.SUM,
            scale=self._control.scale,
            lengths=shard.lengths,
            out=shard.grad,
            async_op=True,
        )
        return work

    def finish(self) -> None:
        super().finish()
        self._forbid_reading()

    def _forbid_reading(self) -> None:
        """Makes reading `param.grad` raise an error, for each parameter that has a gradient."""
        for p in self._named.values():
            p.leaf.grad_buffer.read_error = _READ_ERROR

    def step(self, found_inf: Any = None) -> None:
        """Updates this rank's ranges and gathers those of all ranks: one bucket is gathered while the next is updated.

        found_inf: None, or a float32 on the GPU; if that is not zero, nothing is updated
        """
        works: list[tuple[str, Work[Any]]] = []
        for bucket, shard in enumerate(self.shards):
            if shard.step(found_inf):
                context = f"ZeroOptimizer.step: the parameters of {self._buckets.describe(bucket)}"
                with error_context(context):  # if another rank has left, the call itself raises
                    works.append((context, shard.gather_params(self._comm)))
        for context, work in works:
            with error_context(context):
                work.wait()

    def gradients(self) -> list[Any]:
        """The mean gradients of this rank's ranges, as flat arrays."""
        return [grad for shard in self.shards for grad in shard.gradients()]

    def state(self) -> dict[int, Entry]:
        """The whole state, by the numbers of the parameters. Collective."""
        pieces = [(*piece, {name: _on_host(value) for name, value in entry.items()}) for *piece, entry in self.pieces()]
        return join_state(itertools.chain.from_iterable(self._comm.all_gather_object(pieces)), self.params)

    def pieces(self) -> Iterator[StatePiece]:
        """The state on this rank. The pieces of all ranks together are the whole state."""
        for shard in self.shards:
            if shard.optimizer is not None:
                yield from shard.state()
        for number, entry in self._unplaced.items():
            yield number, 0, self.params[number].array.size, entry

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(number of the parameter, start, stop) of all pieces whose state belongs on this rank."""
        for shard in self.shards:
            yield from (piece[:3] for piece in shard.pieces)
        for number in self._without_bucket():
            yield number, 0, self.params[number].array.size

    def _without_bucket(self) -> list[int]:
        """The parameters without a bucket whose state this rank keeps."""
        placed = {number for shard in self.shards for number in shard.params}
        return [n for n in range(self._comm.rank, len(self.params), self._comm.size) if n not in placed]

    def read_pieces(self, find: FindState) -> Pieces:
        """Copies of what `find` returns for each piece whose state belongs on this rank."""
        return {piece: copy_state(piece[0], dict(find(*piece)), self.params[piece[0]]) for piece in self.ranges()}

    def put_pieces(self, pieces: Pieces) -> None:
        """Replaces the state on this rank. pieces: an entry for each of `ranges`; entries are not copied"""
        for shard in self.shards:
            shard.put_state(pieces)
        without_bucket = set(self._without_bucket())
        self._unplaced = {number: entry for (number, *_), entry in pieces.items() if number in without_bucket and entry}

    def check_state(self, whole: Mapping[int, Entry]) -> None:
        """Checks shapes. Raises: StateDictError for a state that has neither its parameter's shape nor one element."""
        for number, entry in whole.items():
            p = self.params[number]
            for name, value in entry.items():
                array = array_of(value)
                if not has_elements(name, value, p.shape) and getattr(array, "size", 1) != 1:
                    param = self.names[id(p)]
                    raise StateDictError(f"state {name!r} of shape {array.shape} for {param} of shape {p.shape}")

    def split_state(self, whole: Mapping[int, Entry]) -> Pieces:
        """Copies of the pieces of the whole state that belong on this rank."""

        def find(number: int, start: int, stop: int) -> Entry:
            entry = dict(whole.get(number, {}))
            p = self.params[number]
            for name, value in entry.items():
                if has_elements(name, value, p.shape):
                    piece = array_of(value).reshape(-1)[start:stop]
                    entry[name] = wrapped_like(value, piece.reshape(piece_shape(p, stop - start)))
            return entry

        return self.read_pieces(find)


class WholeGradientExchange(ShardedExchange):
    """The exchange with micro_batches: every rank gets the whole mean gradients, and updates its ranges.

    Optimizer state is sharded all the same. The reduction of gradients costs as much as without a ZeroOptimizer, and
    `step` gathers the parameters in addition.

    tree: the exchange that the model had before; arguments: see ShardedExchange
    """

    def __init__(self, tree: Exchange, *arguments: Any) -> None:
        self._tree = tree
        super().__init__(*arguments)

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
            shard.copy_grads(buffer)
        self._forbid_reading()

    def times(self) -> list[Times | None]:
        return self._tree.times()


def join_state(pieces: Iterable[StatePiece], params: Sequence[Tensor]) -> dict[int, Entry]:
    """Joins the pieces of all ranks, with arrays on the host, into the whole state, by the numbers of the parameters.

    A state is elementwise if in every piece it has as many elements as the piece. All pieces count, because in a piece
    of length 1 any single value would look elementwise.
    """
    # By number and name: (length, value) of each piece.
    parts: dict[int, dict[str, list[tuple[int, Any]]]] = {}
    for number, start, stop, entry in sorted(pieces, key=lambda piece: piece[:2]):
        for name, value in entry.items():
            parts.setdefault(number, {}).setdefault(name, []).append((stop - start, value))
    return {
        number: {name: _join(name, values, params[number]) for name, values in entry.items()}
        for number, entry in parts.items()
    }


def _join(name: str, parts: Sequence[tuple[int, Any]], p: Tensor) -> Any:
    first = parts[0][1]
    if not all(has_elements(name, value, piece_shape(p, length)) for length, value in parts):
        return first
    whole = np.concatenate([array_of(value).reshape(-1) for _, value in parts]).reshape(p.shape)
    return wrap(to_device(whole, p.device), p.device) if isinstance(first, TensorBase) else whole


def piece_shape(p: Tensor, length: int) -> tuple[int, ...]:
    """The shape of a piece of `length` elements: a parameter of one element keeps its shape, any other is flat."""
    return p.array.shape if p.array.size == 1 else (length,)


def has_elements(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a state is elementwise: a tensor or array of this shape, not named "step".

    shape: of the parameter, or of a piece of it
    """
    return name != "step" and hasattr(value, "__dlpack__") and array_of(value).shape == shape


def array_of(value: Any) -> Any:
    """The array of a tensor; any other value unchanged."""
    return value.array if isinstance(value, TensorBase) else value


def wrapped_like(value: Any, array: Array) -> Any:
    """`array`, as a tensor if `value` is one."""
    return wrap(array, value.device) if isinstance(value, TensorBase) else array


def _on_host(value: Any) -> Any:
    if isinstance(value, TensorBase):
        return wrap(to_device(value.array, CPU), CPU)
    return to_device(value, CPU) if hasattr(value, "__dlpack__") else value
