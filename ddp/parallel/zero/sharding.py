"""All shards of a plan on this rank, and what becomes of them when the plan changes: state and gradients move along.

Parameters that are in no bucket (frozen ones, or such that no rank has used for long) have no shard. The state that
they may have rests on one rank until they are placed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from collectives import Communicator
from ddp._device import place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp.optim import Optimizer
from ddp.optim.optimizer import Group
from ddp.parallel.exchange import Buckets
from ddp.parallel.naming import naming
from ddp.parallel.zero.moving import Entry, check, cut, join
from ddp.parallel.zero.partial import Partial
from ddp.parallel.zero.shard import Shard

Adopt = Callable[..., Any]  # (name of a state, its value, p=the parameter): what this rank keeps


class Sharding:
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
        self._partial = partial(Partial, kind=kind, settings=settings, groups=groups, numbers=self._numbers)
        self._comm = comm
        self._where = self.params[0].device
        self._parts: list[Partial] = []  # one a bucket
        self._buckets: Buckets
        self._resting: dict[int, Entry] = {}

    def follow(self, buckets: Buckets) -> list[Shard]:
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
            with naming(f"ZeroOptimizer.step: the parameters of {self._buckets.words(bucket)}"):
                work.wait()

    def gradients(self) -> list[Any]:
        """The mean gradients that this rank has, as flat arrays."""
        return [each for part in self._parts for each in part.shard.gradients()]

    def state(self) -> dict[int, Entry]:
        """The whole state of every parameter that has one, by its number. Collective."""
        return join([part.holding() for part in self._parts], self._resting, self._comm, self._where)

    def pieces(self) -> Iterator[tuple[int, int, int, Entry]]:
        """(parameter's number, start, stop, state) of what this rank holds: elements start to stop, thought of as flat.

        All ranks' pieces together are the whole state. State that rests is on one rank, whole.
        """
        for part in self._parts:
            for number, piece, entry in part.holding().pieces():
                yield number, piece.start, piece.stop, entry
        for number, entry in self._resting.items():
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

    def put_pieces(self, find: Callable[[int, int, int], Entry], adopt: Adopt) -> None:
        """Replaces this rank's state. find: the state of elements start to stop of a parameter, {} if it has none"""
        placed = set()
        for part in self._parts:
            shard, entries = part.shard, []
            for piece in shard.pieces:
                p = shard.parameters[piece.number]
                found = find(self._numbers[id(p)], piece.start, piece.stop)
                entries.append({name: adopt(name, value, p=p) for name, value in found.items()})
            part.put(entries)
            placed |= {self._numbers[id(p)] for p in shard.parameters.values()}
        self._resting = {}
        for number, p in enumerate(self.params):
            if number not in placed and number % self._comm.size == self._comm.rank:
                entry = {name: adopt(name, value, p=p) for name, value in find(number, 0, p.array.size).items()}
                for name, value in entry.items():
                    if isinstance(value, TensorBase) and value.array.shape == (p.array.size,) and name != "step":
                        entry[name] = wrap(value.array.reshape(p.shape), value.device)
                if entry:
                    self._resting[number] = entry

    def put_state(self, whole: Mapping[int, Entry], adopt: Adopt) -> None:
        """Keeps of the whole state what is this rank's.

        Raises: StateDictError, on every rank, for a state of a wrong shape; nothing has changed then.
        """
        for number, entry in whole.items():
            check(self._names[id(self.params[number])], entry, self.params[number].shape)
        placed = set()
        for part in self._parts:
            shard, entries = part.shard, []
            for piece in shard.pieces:
                p = shard.parameters[piece.number]
                entry = whole.get(self._numbers[id(p)], {})
                entries.append(cut(entry, p.shape, piece, partial(adopt, p=p)))
            part.put(entries)
            placed |= {self._numbers[id(p)] for p in shard.parameters.values()}
        self._resting = {
            number: {name: adopt(name, value, p=self.params[number]) for name, value in entry.items()}
            for number, entry in whole.items()
            if number not in placed and number % self._comm.size == self._comm.rank
        }


def _kept(name: str, value: Any, p: Tensor) -> Any:
    """A state as it is, in memory of its own, where its parameter is; a count of steps stays on the host."""
    if not isinstance(value, TensorBase):
        return value
    where = p.device if value.array.ndim and name != "step" else value.device
    return wrap(place(value.array, where).copy(), where)
