"""A rank's part of each bucket: parameters and mean gradients in flat memory, as leaves that an optimizer takes.

A rank owns one range of every bucket, so that its state and work are 1/size of the whole. The parameters of a bucket
lie in one flat array, at the places of their gradients, so that one all-gather brings back what the ranks have updated.
What a rank updates is a copy of its own range: the others read it while they write theirs.

`ReduceScatter` is the exchange that gives each rank the mean gradients of its range. The bucket keeps what this rank
added up: a second backward adds to that, and reduces both. So it is not the mean, and reading `param.grad` raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from collectives import Communicator, ReduceOp, Work
from ddp._device import device
from ddp._engine import Leaf
from ddp._layout import Place
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.parallel.buckets import Buckets
from ddp.parallel.exchange import Exchange

Array = Any
_LINE = 64  # bytes
_WITHHELD = (
    "grad: under ZeroOptimizer each rank has the mean gradient of its own part of the parameters alone, so no rank can "
    "show a whole one. To clip by the global norm: zero.clip_grad_norm_(max_norm), on all ranks; GradScaler takes "
    "the optimizer as it is"
)


class Piece(NamedTuple):
    """What a range holds of one gradient: its elements `start` to `stop`, which stand in the range from `at` on."""

    number: int
    start: int
    stop: int
    at: int


def split_bucket(length: int, line: int, size: int) -> list[int]:
    """How many elements of a bucket each rank owns: as even as possible in whole cache lines.

    A bucket of a multiple of line * size elements is split evenly; others need collectives of uneven lengths.

    length: elements; line: elements in a cache line. `split_bucket(100, 16, 3) == [32, 32, 36]`
    """
    lines = -(-length // line)
    ends = [min(length, lines * rank // size * line) for rank in range(size + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def cut_range(places: Sequence[tuple[int, Place]], first: int, last: int) -> list[Piece]:
    """What elements `first` to `last` of a bucket hold. An empty gradient is in every range that starts at 0.

    places: (number, place) of each gradient in the bucket
    """
    pieces = []
    for number, position in places:
        start, stop = max(position.start, first), min(position.stop, last)
        if start < stop:
            pieces.append(Piece(number, start - position.start, stop - position.start, start - first))
        elif position.start == position.stop and first == 0:
            pieces.append(Piece(number, 0, 0, 0))
    return pieces


class Shard:
    """One bucket on this rank.

    parameters: of the bucket, by the number of their gradient; their memory becomes part of `whole`
    where: their device

    lengths: elements that each rank owns; whole: (length,) all parameters; own: (lengths[rank],) those of this rank,
    while they are updated; grad: (lengths[rank],) the mean gradients of this rank's range
    places: of each gradient in the bucket, by number; pieces: what this rank's range holds of them; leaves: of each
    piece, a tensor of its parameters with its gradient
    """

    def __init__(
        self,
        buckets: Buckets,
        bucket: int,
        parameters: Mapping[int, Tensor],
        comm: Communicator,
        where: device,
    ) -> None:
        layout = buckets.memory.layout
        dtype, length = layout.buckets[bucket]
        xp = where.xp
        self.parameters = parameters
        self.lengths = split_bucket(length, max(1, _LINE // dtype.itemsize), comm.size)
        self.first = sum(self.lengths[: comm.rank])
        self.last = self.first + self.lengths[comm.rank]
        self.whole: Array = xp.zeros(length, dtype)
        # The others read it where it lies, if they can.
        shared = comm.empty(max(self.lengths), dtype, like=xp.empty(0))
        self.own: Array = shared[: self.last - self.first]
        self.grad: Array = xp.zeros(self.last - self.first, dtype)
        self.places: dict[int, Place] = {number: layout.places[number] for number in buckets.members[bucket]}
        self._home()
        self.pieces: list[Piece] = [
            piece for piece in cut_range(list(self.places.items()), self.first, self.last) if piece.number in parameters
        ]
        self._views = [self._piece_of(self.own, piece) for piece in self.pieces]
        self.leaves: list[Tensor] = []
        for piece, view in zip(self.pieces, self._views, strict=True):
            leaf = wrap(view, where).requires_grad_()
            leaf.leaf.grad_buffer.bind(self._piece_of(self.grad, piece))
            self.leaves.append(leaf)

    def load(self) -> bool:
        """Takes over which gradients are there, and the parameters as they are now; False if no gradient is there."""
        self._zero()
        for piece, leaf in zip(self.pieces, self.leaves, strict=True):
            leaf.leaf.grad_buffer.full = self._is_full(piece.number)
        if not any(map(self._is_full, self.parameters)):
            return False
        self._home()
        self.own[...] = self.whole[self.first : self.last]
        return True

    def store(self, comm: Communicator) -> Work[Any]:
        """Brings what the ranks have updated to all parameters. Collective."""
        for leaf, view in zip(self.leaves, self._views, strict=True):
            if leaf.array is not view:  # an optimizer that makes new arrays instead of writing into these
                view[...] = leaf.array
                leaf.array = view
        for number, p in self.parameters.items():
            if self._is_full(number):
                p.version.count += 1
        return comm.all_gather(self.own, lengths=self.lengths, out=self.whole, async_op=True)

    def gather(self, mine: Array, comm: Communicator) -> Array:
        """(length,) what all ranks have in their ranges. mine: (lengths[rank],). Collective."""
        return comm.all_gather(mine, lengths=self.lengths)

    def cut(self, whole: Array, number: int) -> Array:
        """A parameter's place in an array of the bucket's length, in its shape."""
        place = self.places[number]
        return whole[place.start : place.stop].reshape(place.shape)

    def fill(self, gradients: Mapping[int, Array]) -> None:
        """Takes this rank's part of whole mean gradients, by number."""
        for piece in self.pieces:
            self._piece_of(self.grad, piece)[...] = gradients[piece.number].reshape(-1)[piece.start : piece.stop]

    def gradients(self) -> list[Array]:
        """The mean gradients of this rank's range that are there, flat: in one array if all are."""
        self._zero()
        if len(self.parameters) == len(self.places) and all(map(self._is_full, self.places)):
            parts = [self.grad]
        else:
            parts = [self._piece_of(self.grad, piece) for piece in self.pieces if self._is_full(piece.number)]
        return [part for part in parts if part.size]

    def release(self) -> None:
        """Gives the parameters memory of their own, so that this can go."""
        for p in self.parameters.values():
            if p.array.base is self.whole:
                p.array = p.array.copy()

    def _home(self) -> None:
        """Whatever memory a parameter was put on from outside, its values move to its place in `whole`."""
        for number, p in self.parameters.items():
            if p.array.base is not self.whole:
                view = self.cut(self.whole, number)
                view[...] = p.array
                p.array = view

    def _zero(self) -> None:
        """Where zero_grad put zeros into gradients that were there, there are zeros here, too."""
        for piece in self.pieces:
            if self._is_full(piece.number) and self.parameters[piece.number].leaf.grad_buffer.zeroed:
                self._piece_of(self.grad, piece)[...] = 0

    def _is_full(self, number: int) -> bool:
        return self.parameters[number].leaf.grad_buffer.full

    def _piece_of(self, mine: Array, piece: Piece) -> Array:
        return mine[piece.at : piece.at + piece.stop - piece.start]


class ReduceScatter(Exchange):
    """See `Exchange`. leaves: of all parameters; make_shards: makes the shards of new buckets, collective"""

    def __init__(
        self, comm: Communicator, leaves: Sequence[Leaf], make_shards: Callable[[Buckets], Sequence[Shard]]
    ) -> None:
        super().__init__(comm)
        self._leaves = leaves
        self._make_shards = make_shards
        self._shards: Sequence[Shard] | None = None

    def set_buckets(self, buckets: Buckets) -> None:
        first, self._shards = self._shards is None, self._make_shards(buckets)
        super().set_buckets(buckets)
        if not first:  # gradients of a backward of this exchange have moved
            self._withhold()

    def _start(self, index: int) -> Work[Any]:
        assert self._shards is not None
        shard = self._shards[index]
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
        self._withhold()

    def _withhold(self) -> None:
        """The gradients that are there now are reduced, and not to be read."""
        for leaf in self._leaves:
            leaf.grad_buffer.withheld = _WITHHELD
