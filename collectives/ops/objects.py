"""Collectives for Python objects, such as configurations, metrics and vocabularies, which travel pickled.

Unpickling runs code that the sender chose. The ranks of one job trust each other; nothing here reads from a disk or
from outside the job.

If an object cannot be pickled, the reason is sent in its place. So ranks that wait for the object raise an error and do
not hang.
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
    """The collectives of a communicator for Python objects."""

    def broadcast_object(self, o: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Sends the root's object to every rank.

        o: anything that can be pickled, used on the root only; ranks trust each other (pickle runs code)
        Returns: the object itself on the root, a copy elsewhere
        Raises: ArgumentError if there is no such root; on every rank if o cannot be pickled; on a rank that cannot
        unpickle it.
        """
        root = self._check_root(root)
        data, refused = _pickled(o if self.rank == root else None)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call)
            length = np.array([len(data)], np.int64)
            yield self.transport.broadcast(as_bytes(length), root)
            received = data if self.rank == root else np.empty(int(length[0]), np.uint8)
            yield self.transport.broadcast(received, root)
            return o if self.rank == root and not refused else self._unpickled(received, root)

        return self._run(self._new_call(Plan("broadcast_object", f"root {root}"), steps), async_op)

    def gather_object(self, o: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Gathers all ranks' objects in rank order, on the root alone.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects on the root, None elsewhere
        Raises: ArgumentError if there is no such root; on the root and this rank if this rank's o cannot be pickled; on
        the root if it cannot unpickle an object.
        """
        return self._gather_objects("gather_object", o, self._check_root(root), async_op)

    def all_gather_object(self, o: Any, *, async_op: bool = False) -> Any:
        """Gathers all ranks' objects in rank order, on every rank.

        o: anything that can be pickled; ranks trust each other (pickle runs code)
        Returns: a list of `size` objects, all of them copies
        Raises: ArgumentError on every rank if an object cannot be pickled; on a rank that cannot unpickle one.
        """
        return self._gather_objects("all_gather_object", o, None, async_op)

    def _gather_objects(self, name: str, o: Any, root: int | None, async_op: bool) -> Any:
        """Runs `gather_object` or `all_gather_object`. root: None if every rank gets the result"""
        data, refused = _pickled(o)
        receives = root is None or self.rank == root

        def steps(call: CollectiveOp[list[Any] | None]) -> Steps[list[Any] | None]:
            yield from self.verify(call)
            counts = [count for (count,) in (yield from exchange_numbers(self.transport, [len(data)]))]
            joined = np.empty(sum(counts), np.uint8)
            if root is None:
                yield self.transport.all_gather(data, joined, counts)
            else:
                yield self.transport.gather(data, joined if receives else None, counts, root)
            if refused:
                self._unpickled(data, self.rank)  # Raises an ArgumentError, because o cannot be pickled.
            if not receives:
                return None
            parts = np.split(joined, np.cumsum(counts)[:-1])
            return [self._unpickled(part, rank) for rank, part in enumerate(parts)]

        return self._run(self._new_call(Plan(name, "" if root is None else f"root {root}"), steps), async_op)

    def scatter_object(self, objects: Sequence[Any] | None, root: int = 0, *, async_op: bool = False) -> Any:
        """Sends object r of the root's list to rank r.

        objects: `size` objects that can be pickled, used on the root only; ranks trust each other (pickle runs code)
        Returns: a copy of this rank's object
        Raises: ArgumentError if there is no such root; on the root alone if `objects` is not a sequence of `size`
        objects; on every rank if an object cannot be pickled; on a rank that cannot unpickle its object.
        """
        root = self._check_root(root)
        parts = [np.empty(0, np.uint8)] * self.size
        if self.rank == root:
            if not isinstance(objects, Sequence) or len(objects) != self.size:
                raise ArgumentError(f"objects should be a list of {self.size}, one a rank, is {objects!r:.60}")
            pickled = [_pickled(o) for o in objects]
            reasons = [part for part, refused in pickled if refused]
            parts = reasons[:1] * self.size or [part for part, _ in pickled]

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            yield from self.verify(call)
            lengths = np.array([len(part) for part in parts], np.int64)
            yield self.transport.broadcast(as_bytes(lengths), root)
            received = np.empty(lengths[self.rank], np.uint8)
            joined = np.concatenate(parts) if self.rank == root else None
            yield self.transport.scatter(joined, received, lengths.tolist(), root)
            return self._unpickled(received, root)

        return self._run(self._new_call(Plan("scatter_object", f"root {root}"), steps), async_op)

    def _unpickled(self, part: Array, source: int) -> Any:
        try:
            # In a context of its own: unpickling may import modules and set context variables.
            o = contextvars.copy_context().run(pickle.loads, part.data)
        except Exception as error:  # An object's own code may raise anything.
            raise ArgumentError(
                f"rank {self.rank}: the object of rank {source} cannot be unpickled here: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(o, _Unpicklable):
            raise ArgumentError(f"rank {self.rank}: objects travel pickled, but not that of rank {source}: {o}")
        return o


class _Unpicklable(str):
    """The reason why an object cannot be pickled; it is sent instead of the object."""

    __slots__ = ()


def _pickled(o: Any) -> tuple[Array, bool]:
    """The pickled object, (n,) uint8, and False; or the pickled reason and True if it cannot be pickled."""
    try:
        return np.frombuffer(pickle.dumps(o, _PROTOCOL), np.uint8), False
    except Exception as error:  # An object's own code may raise anything.
        reason = _Unpicklable(f"{type(error).__name__}: {error}")
        return np.frombuffer(pickle.dumps(reason, _PROTOCOL), np.uint8), True
