"""Python objects between ranks: pickled, so that configurations, metrics and vocabularies need no layout of their own.

Unpickling runs code of the sender's choice. The ranks of one job trust each other, and nobody else has a part in this:
nothing here reads from a disk or from outside the job.

Lengths are exchanged first. What cannot be pickled travels as a length below zero and the reason, so that every rank
raises instead of waiting for bytes that never come.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import as_bytes
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.errors import ArgumentError
from collectives.reduction import Array
from collectives.transport import Steps

_PROTOCOL = 5


class Objects(CommunicatorBase):
    """The object forms of a communicator's collectives."""

    def broadcast_object(self, o: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's object, on every rank.

        o: anything that can be pickled, ignored off the root; ranks trust each other (pickle runs code)
        Returns: the object itself on the root, a copy elsewhere
        Raises: ArgumentError if there is no such root; on every rank if o cannot be pickled.
        """
        root = self._check_root(root)
        length, mine = _pickled(o) if self.rank == root else (0, _NOTHING)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call, self._signature(call))
            lengths = np.array([length], np.int64)
            yield self.transport.broadcast(as_bytes(lengths), root)
            whole = mine if self.rank == root else np.empty(abs(int(lengths[0])), np.uint8)
            yield self.transport.broadcast(whole, root)
            self._check_pickled({root: int(lengths[0])}, {root: whole})
            return o if self.rank == root else self._unpickled(whole, root)

        return self._run(self._collective("broadcast_object", None, steps, f"root {root}"), async_op)

    def gather_object(self, o: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """All ranks' objects in rank order, on the root alone.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects on the root, None elsewhere
        Raises: ArgumentError if there is no such root; on every rank if an object cannot be pickled.
        """
        root = self._check_root(root)
        length, mine = _pickled(o)

        def steps(call: CollectiveOp[list[Any] | None]) -> Steps[list[Any] | None]:
            yield from self.verify(call, self._signature(call))
            lengths = yield from self._exchange_numbers(length)
            counts = [abs(n) for n in lengths]
            if min(lengths) < 0:  # for everybody, since the root alone could not tell the others
                return (yield from self._all_objects(mine, lengths))
            whole = np.empty(sum(counts), np.uint8) if self.rank == root else None
            yield self.transport.gather(mine, whole, counts, root)
            return None if whole is None else self._all_unpickled(_parts(whole, counts))

        return self._run(self._collective("gather_object", None, steps, f"root {root}"), async_op)

    def all_gather_object(self, o: Any, *, async_op: bool = False) -> Any:
        """All ranks' objects in rank order, on every rank.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects, copies all
        Raises: ArgumentError on every rank if an object cannot be pickled.
        """
        length, mine = _pickled(o)

        def steps(call: CollectiveOp[list[Any]]) -> Steps[list[Any]]:
            yield from self.verify(call, self._signature(call))
            lengths = yield from self._exchange_numbers(length)
            return (yield from self._all_objects(mine, lengths))

        return self._run(self._collective("all_gather_object", None, steps), async_op)

    def scatter_object(self, objects: Sequence[Any] | None, root: int = 0, *, async_op: bool = False) -> Any:
        """Object r of the root's list, on rank r.

        objects: `size` objects that can be pickled, ignored off the root; ranks trust each other (pickle runs code)
        Returns: a copy of this rank's object
        Raises: ArgumentError if there is no such root, or its list has another length; on every rank if an object
        cannot be pickled.
        """
        root = self._check_root(root)
        each: list[tuple[int, Array]] = [(0, _NOTHING)] * self.size
        if self.rank == root:
            if not isinstance(objects, Sequence) or len(objects) != self.size:
                raise ArgumentError(f"objects should be a list of {self.size}, one a rank, is {objects!r:.60}")
            each = [_pickled(o) for o in objects]
            failed = [(length, text) for length, text in each if length < 0]
            if failed:
                each = [failed[0]] * self.size

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call, self._signature(call))
            lengths = np.array([length for length, _ in each], np.int64)
            yield self.transport.broadcast(as_bytes(lengths), root)
            counts = [abs(int(n)) for n in lengths]
            mine = np.empty(counts[self.rank], np.uint8)
            whole = np.concatenate([part for _, part in each]) if self.rank == root else None
            yield self.transport.scatter(whole, mine, counts, root)
            self._check_pickled({root: int(lengths[self.rank])}, {root: mine})
            return self._unpickled(mine, root)

        return self._run(self._collective("scatter_object", None, steps, f"root {root}"), async_op)

    def _all_objects(self, mine: Array, lengths: list[int]) -> Steps[list[Any]]:
        counts = [abs(n) for n in lengths]
        whole = np.empty(sum(counts), np.uint8)
        yield self.transport.all_gather(mine, whole, counts)
        parts = _parts(whole, counts)
        self._check_pickled(dict(enumerate(lengths)), dict(enumerate(parts)))
        return self._all_unpickled(parts)

    def _all_unpickled(self, parts: list[Array]) -> list[Any]:
        return [self._unpickled(part, rank) for rank, part in enumerate(parts)]

    def _unpickled(self, part: Array, source: int) -> Any:
        try:
            return pickle.loads(part.data)
        except Exception as error:  # whatever an object's own code raises
            raise ArgumentError(
                f"rank {self.rank}: the object of rank {source} cannot be unpickled here: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _check_pickled(self, lengths: dict[int, int], parts: dict[int, Array]) -> None:
        reasons = [f"that of rank {rank}: {parts[rank].tobytes().decode()}" for rank, n in lengths.items() if n < 0]
        if reasons:
            raise ArgumentError(f"rank {self.rank}: objects travel pickled, and one cannot be: {'; '.join(reasons)}")


_NOTHING: Array = np.empty(0, np.uint8)


def _pickled(o: Any) -> tuple[int, Array]:
    """The object's length and bytes, (n,) uint8; a length below zero and the reason in words if it has none."""
    try:
        message = pickle.dumps(o, _PROTOCOL)
    except Exception as error:  # whatever an object's own code raises
        message = f"{type(error).__name__}: {error}".encode()
        return -len(message), np.frombuffer(message, np.uint8)
    return len(message), np.frombuffer(message, np.uint8)


def _parts(whole: Array, counts: Sequence[int]) -> list[Array]:
    return np.split(whole, np.cumsum(counts)[:-1])
