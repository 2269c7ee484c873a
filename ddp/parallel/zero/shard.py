"""A rank's part of one bucket: parameters and mean gradients in flat memory, as leaves that an optimizer takes.

The parameters of a bucket lie in one flat array, at the places of their gradients, so that one all-gather brings back
what the ranks have updated. What a rank updates is a copy of its own range: the others read it while they write theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives import Communicator, Work
from ddp._device import device
from ddp._layout import Place
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.parallel.exchange import Buckets
from ddp.parallel.zero.ranges import Piece, cut_range, split_bucket

Array = Any
_LINE = 64  # bytes


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
        room = comm.empty(max(self.lengths), dtype) if xp is np else xp.zeros(max(self.lengths), dtype)
        self.own: Array = room[: self.last - self.first]
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
