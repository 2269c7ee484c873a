"""Python objects between ranks: pickled, so that configurations, metrics and vocabularies need no layout of their own.

Unpickling runs code of the sender's choice. The ranks of one job trust each other, and nobody else has a part in this:
nothing here reads from a disk or from outside the job.

What cannot be pickled travels as the reason, so that the ranks that wait for it raise instead of waiting for ever.
"""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import as_bytes
from collectives.engine.array_header import exchange_numbers
from collectives.engine.call import CollectiveOp, Plan
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
        mine, refused = _pickled(o if self.rank == root else None)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call)
            length = np.array([len(mine)], np.int64)
            yield self.transport.broadcast(as_bytes(length), root)
            whole = mine if self.rank == root else np.empty(int(length[0]), np.uint8)
            yield self.transport.broadcast(whole, root)
            return o if self.rank == root and not refused else self._unpickled(whole, root)

        return self._run(self._described(Plan("broadcast_object", f"root {root}"), steps), async_op)

    def gather_object(self, o: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """All ranks' objects in rank order, on the root alone.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects on the root, None elsewhere
        Raises: ArgumentError if there is no such root; on the root and this rank if this one's cannot be pickled.
        """
        return self._gather_objects("gather_object", o, self._check_root(root), async_op)

    def all_gather_object(self, o: Any, *, async_op: bool = False) -> Any:
        """All ranks' objects in rank order, on every rank.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects, copies all
        Raises: ArgumentError on every rank if an object cannot be pickled.
        """
        return self._gather_objects("all_gather_object", o, None, async_op)

    def _gather_objects(self, name: str, o: Any, root: int | None, async_op: bool) -> Any:
        """root: None if every rank gets the result."""
        mine, refused = _pickled(o)
        receives = root is None or self.rank == root

        def steps(call: CollectiveOp[list[Any] | None]) -> Steps[list[Any] | None]:
            yield from self.verify(call)
            counts = [count for (count,) in (yield from exchange_numbers(self.transport, [len(mine)]))]
            whole = np.empty(sum(counts), np.uint8)
            if root is None:
                yield self.transport.all_gather(mine, whole, counts)
            else:
                yield self.transport.gather(mine, whole if receives else None, counts, root)
            if refused:
                self._unpickled(mine, self.rank)
            if not receives:
                return None
            parts = np.split(whole, np.cumsum(counts)[:-1])
            return [self._unpickled(part, rank) for rank, part in enumerate(parts)]

        return self._run(self._described(Plan(name, "" if root is None else f"root {root}"), steps), async_op)

    def scatter_object(self, objects: Sequence[Any] | None, root: int = 0, *, async_op: bool = False) -> Any:
        """Object r of the root's list, on rank r.

        objects: `size` objects that can be pickled, ignored off the root; ranks trust each other (pickle runs code)
        Returns: a copy of this rank's object
        Raises: ArgumentError if there is no such root, or its list has another length; on every rank if an object
        cannot be pickled.
        """
        root = self._check_root(root)
        each = [np.empty(0, np.uint8)] * self.size
        if self.rank == root:
            if not isinstance(objects, Sequence) or len(objects) != self.size:
                raise ArgumentError(f"objects should be a list of {self.size}, one a rank, is {objects!r:.60}")
            found = [_pickled(o) for o in objects]
            refused = [part for part, refused in found if refused]
            each = refused[:1] * self.size or [part for part, _ in found]

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call)
            lengths = np.array([len(part) for part in each], np.int64)
            yield self.transport.broadcast(as_bytes(lengths), root)
            mine = np.empty(lengths[self.rank], np.uint8)
            whole = np.concatenate(each) if self.rank == root else None
            yield self.transport.scatter(whole, mine, lengths.tolist(), root)
            return self._unpickled(mine, root)

        return self._run(self._described(Plan("scatter_object", f"root {root}"), steps), async_op)

    def _unpickled(self, part: Array, source: int) -> Any:
        try:
            o = contextvars.copy_context().run(pickle.loads, part.data)  # which may import modules, and set variables
        except Exception as error:  # whatever an object's own code raises
            raise ArgumentError(
                f"rank {self.rank}: the object of rank {source} cannot be unpickled here: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(o, _Unpicklable):
            raise ArgumentError(f"rank {self.rank}: objects travel pickled, but not that of rank {source}: {o}")
        return o


class _Unpicklable(str):
    """Why an object cannot be pickled; travels in its place."""

    __slots__ = ()


def _pickled(o: Any) -> tuple[Array, bool]:
    """The object's bytes, (n,) uint8, and False; those of the error and True if it cannot be pickled."""
    try:
        data, refused = pickle.dumps(o, _PROTOCOL), False
    except Exception as error:  # whatever an object's own code raises
        data, refused = pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}"), _PROTOCOL), True
    return np.frombuffer(data, np.uint8), refused
