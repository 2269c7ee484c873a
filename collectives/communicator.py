"""The collectives as users call them: one place each, whatever the backend.

Every method checks its arguments in the caller, describes its steps as a generator over the transport's nonblocking
operations, and hands them to the communicator's line, which runs them now (`async_op=False`) or from the helper thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from collectives import header
from collectives.arrays import (
    as_array,
    as_bytes,
    check_lengths,
    check_out,
    contiguous,
    even_lengths,
    flat,
    row_bytes,
    rows,
    writable,
)
from collectives.errors import ArgumentError, MismatchError
from collectives.family import Family
from collectives.progress import Call, CallQueue, Steps, Work
from collectives.reduction import Array, ReduceOp, check_scale, finish, wire_dtype, wire_op
from collectives.site import user_site
from collectives.transport import Transport

T = TypeVar("T")
Scale = float | Callable[[], float] | None
Lengths = Sequence[int] | Literal["equal"] | None


class Communicator:
    """A group of ranks that call the same collectives in the same order.

    rank, size: this rank and how many there are
    local_rank, local_size, node: the same among the ranks of this node, and which node it is
    backend: "single", "mpi" or "threads"
    timeout: seconds after which a collective raises CollectiveTimeout

    Every collective takes `async_op=True` to return a `Work` at once. Arrays may be anything that NumPy can read
    without a copy; they may be 0-d, empty, strided, or read-only where they are only read. Results are new
    C-contiguous arrays unless `out` is given.

    Ranks that bring different shapes or dtypes to a reduction or a broadcast are not told so over MPI, which then gives
    wrong numbers or fails; the lengths of gather and all_gather are compared unless they are given.

    Raises: ArgumentError on this rank alone for arguments that no rank could mean; CollectiveTimeout, PeerLeft and
    CollectivesError when the ranks do not meet, after which the communicator raises the same error for ever.
    """

    def __init__(self, transport: Transport, timeout: float, family: Family | None = None) -> None:
        self._transport = transport
        self._duplicates = itertools.count()
        self.family = Family() if family is None else family
        self.queue = CallQueue(transport, lambda: self.family.leave(transport.key))
        self.family.join(transport.key, self.queue)
        self.timeout = timeout
        self.rank = transport.rank
        self.size = transport.size
        self.local_rank = transport.local_rank
        self.local_size = transport.local_size
        self.node = transport.node
        self.backend = transport.name

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.backend}>"

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: ReduceOp | str = ReduceOp.SUM, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The reduction of all ranks' x, on every rank.

        x: (...), the same shape and dtype on every rank
        op: what `ReduceOp` has; a mean of integers is rounded toward zero
        scale: the result is multiplied by it; a function is called when the sum is there, so that it may depend on an
        earlier asynchronous call of this communicator
        out: (...) of x's dtype; `out=x` reduces in place
        Returns: (...) of x's dtype
        Raises: DtypeError if op has no meaning for the dtype; ArgumentError if out does not fit.
        """
        source = as_array(x)
        op = ReduceOp.parse(op)
        wire = wire_dtype(source.dtype, op)
        check_scale(source.dtype, scale)
        target = _target(out, x, source)

        def steps() -> Steps[Array]:
            sent, total = _buffers(source, target, wire)
            wire_in = flat(sent)
            yield self._transport.all_reduce(wire_in, wire_in if total is sent else flat(total), wire_op(op))
            return _deliver(total, target, op, self.size, scale, source.dtype)

        return self._run("all_reduce", source, steps(), async_op, op.value)

    def reduce(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        scale: Scale = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction of all ranks' x, on the root alone.

        x, op, scale, out: as in `all_reduce`; out is used on the root only
        Returns: (...) of x's dtype on the root, None elsewhere
        Raises: as `all_reduce`; ArgumentError if there is no such root.
        """
        source = as_array(x)
        op = ReduceOp.parse(op)
        wire = wire_dtype(source.dtype, op)
        check_scale(source.dtype, scale)
        self._check_root(root)
        target = _target(out, x, source) if self.rank == root else None

        def steps() -> Steps[Array | None]:
            sent = _to_wire(source, wire)
            total = np.empty(source.shape, wire) if self.rank == root else None
            yield self._transport.reduce(flat(sent), None if total is None else flat(total), wire_op(op), root)
            return None if total is None else _deliver(total, target, op, self.size, scale, source.dtype)

        return self._run("reduce", source, steps(), async_op, f"{op.value} root {root}")

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x as an array
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        array = as_array(x)
        self._check_root(root)
        if self.rank != root:
            writable(array, "x")

        def steps() -> Steps[Array]:
            moved = contiguous(array)
            yield self._transport.broadcast(as_bytes(moved), root)
            if moved is not array and self.rank != root:
                np.copyto(array, moved)
            return array

        return self._run("broadcast", array, steps(), async_op, f"root {root}")

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        self._check_root(root)
        part, known = self._part(x, lengths)
        target = None if out is None or self.rank != root else as_array(out, "out")

        def steps() -> Steps[Array | None]:
            counts = known if known is not None else (yield from self._exchange_lengths(part))
            whole = _room((sum(counts), *part.shape[1:]), part, target) if self.rank == root else None
            width = row_bytes(part)
            room = None if whole is None else as_bytes(whole)
            yield self._transport.gather(as_bytes(contiguous(part)), room, [n * width for n in counts], root)
            return None if whole is None else _hand_out(whole, target)

        return self._run("gather", part, steps(), async_op, f"root {root}")

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        part, known = self._part(x, lengths)
        target = None if out is None else as_array(out, "out")

        def steps() -> Steps[Array]:
            counts = known if known is not None else (yield from self._exchange_lengths(part))
            whole = _room((sum(counts), *part.shape[1:]), part, target)
            width = row_bytes(part)
            yield self._transport.all_gather(as_bytes(contiguous(part)), as_bytes(whole), [n * width for n in counts])
            return _hand_out(whole, target)

        return self._run("all_gather", part, steps(), async_op)

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The root's x split along axis 0, one part for each rank.

        x: (n, ...) on the root, ignored elsewhere; lengths: the parts' lengths, read on the root only; None:
        `np.array_split`'s rule, as even as possible, longer parts first; out: (n_r, ...)
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        self._check_root(root)
        whole = _splittable(x) if self.rank == root else None
        told = header.empty(self.size)
        if whole is not None:
            counts = even_lengths(len(whole), self.size) if lengths is None else check_lengths(lengths, self.size)
            if sum(counts) != len(whole):
                raise ArgumentError(f"lengths {counts} add up to {sum(counts)}, x has {len(whole)} rows")
            told = header.encode(whole, counts)
        target = None if out is None else as_array(out, "out")

        def steps() -> Steps[Array]:
            # What the other ranks cannot know: dtype, shape and lengths.
            yield self._transport.broadcast(told, root)
            dtype, row_shape, parts = header.decode(told)
            room = _room((parts[self.rank], *row_shape), np.empty(0, dtype), target)
            width = row_bytes(room)
            sent = None if whole is None else as_bytes(contiguous(whole))
            yield self._transport.scatter(sent, as_bytes(room), [n * width for n in parts], root)
            return _hand_out(room, target)

        return self._run("scatter", whole, steps(), async_op, f"root {root}")

    def barrier(self, *, async_op: bool = False) -> Any:
        """Returns once every rank has called it."""

        def steps() -> Steps[None]:
            yield self._transport.barrier()

        return self._run("barrier", None, steps(), async_op)

    # Life ------------------------------------------------------------------------------------------------------------

    def duplicate(self) -> Communicator:
        """A communicator of the same ranks whose calls never mix with this one's. Collective."""
        key = f"{self._transport.key}.{next(self._duplicates)}"

        def steps() -> Steps[Communicator]:
            transport, test = self._transport.duplicate(key)
            yield test
            return Communicator(transport, self.timeout, self.family)

        twin: Communicator = self._run("duplicate", None, steps(), False)
        return twin

    def close(self) -> None:
        """Takes no further calls; those under way are finished. May be called at any time, in any order, repeatedly."""
        self.queue.close()

    @property
    def key(self) -> str:
        """The same text on every rank, and another one for each communicator of a world."""
        return self._transport.key

    # Shared parts ----------------------------------------------------------------------------------------------------

    @overload
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: Literal[False], more: str = "") -> T: ...
    @overload
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: bool, more: str = "") -> T | Work[T]: ...
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: bool, more: str = "") -> T | Work[T]:
        call = Call(name, _Words(x, more), user_site(), steps, self.timeout)
        if not async_op:
            return self.queue.run(call)
        self.queue.submit(call)
        return Work(call)

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ArgumentError(f"root should be a rank from 0 to {self.size - 1}, is {root!r}")

    def _part(self, x: Any, lengths: Lengths) -> tuple[Array, list[int] | None]:
        part = rows(as_array(x))
        if lengths is None:
            return part, [len(part)] if self.size == 1 else None
        if isinstance(lengths, str):
            if lengths != "equal":
                raise ArgumentError(f'lengths should be a list, "equal" or None, is {lengths!r}')
            return part, [len(part)] * self.size
        known = check_lengths(lengths, self.size)
        if known[self.rank] != len(part):
            raise ArgumentError(f"lengths[{self.rank}] is {known[self.rank]}, but x has {len(part)} rows on this rank")
        return part, known

    def _exchange_lengths(self, part: Array) -> Steps[list[int]]:
        told = np.empty((self.size, 2), np.int64)
        mine = np.array([len(part), header.fingerprint(part)], np.int64)
        yield self._transport.all_gather(as_bytes(mine), as_bytes(told), [mine.nbytes] * self.size)
        if (told[:, 1] != told[0, 1]).any():
            table = ", ".join(f"rank {rank}: {mark:08x}" for rank, mark in enumerate(told[:, 1]))
            raise MismatchError(
                f"rank {self.rank} brings rows of {part.dtype} {part.shape[1:]}; only the length along axis 0 may "
                f"differ between ranks, and these fingerprints of dtype and row shape should be equal: {table}"
            )
        return told[:, 0].tolist()


class _Words:
    """A call's dtype, shape and options, put into words only when an error needs them."""

    __slots__ = ("dtype", "more", "shape")

    def __init__(self, x: Array | None, more: str) -> None:
        self.dtype = None if x is None else x.dtype
        self.shape = None if x is None else x.shape
        self.more = more

    def __str__(self) -> str:
        array = "" if self.dtype is None else f"{self.dtype} {self.shape}"
        return " ".join(part for part in (self.more, array) if part)


def _to_wire(source: Array, wire: np.dtype[Any]) -> Array:
    if wire == source.dtype:
        return contiguous(source)
    if source.dtype.kind == "b":
        return contiguous(source).view(wire)
    return source.astype(wire, order="C")


def _deliver(total: Array, target: Array | None, op: ReduceOp, size: int, scale: Scale, dtype: np.dtype[Any]) -> Array:
    finish(total, op, size, scale() if callable(scale) else scale)
    if target is total:
        return total
    if target is None:
        return total if total.dtype == dtype else total.astype(dtype)
    np.copyto(target, total, casting="unsafe")  # back from the wire's dtype
    return target


def _target(out: Any, x: Any, source: Array) -> Array | None:
    if out is None:
        return None
    return writable(source, "out") if out is x else check_out(out, source.shape, source.dtype)


def _buffers(source: Array, target: Array | None, wire: np.dtype[Any]) -> tuple[Array, Array]:
    """What a reduction sends, and where its total arrives: the same array for in place."""
    if target is source and wire == source.dtype and source.flags.c_contiguous:
        return source, source
    sent = _to_wire(source, wire)
    if not np.may_share_memory(sent, source):
        return sent, sent  # a private copy can take the result as well
    fits = target is not None and target.dtype == wire and target.flags.c_contiguous
    if target is not None and fits and not np.may_share_memory(sent, target):
        return sent, target
    return sent, np.empty(source.shape, wire)


def _room(shape: tuple[int, ...], part: Array, target: Array | None) -> Array:
    """Where a result of this shape and of part's dtype arrives: in `target` if it can be there at once."""
    if target is None or target.shape != shape or target.dtype != part.dtype:
        return np.empty(shape, part.dtype)
    at_once = target.flags.c_contiguous and target.flags.writeable and not np.may_share_memory(target, part)
    return target if at_once else np.empty(shape, part.dtype)


def _hand_out(whole: Array, target: Array | None) -> Array:
    if target is None or target is whole:
        return whole
    np.copyto(check_out(target, whole.shape, whole.dtype), whole)
    return target


def _splittable(x: Any) -> Array:
    whole = as_array(x)
    if whole.ndim == 0:
        raise ArgumentError("scatter splits axis 0, and x is 0-d")
    return whole
