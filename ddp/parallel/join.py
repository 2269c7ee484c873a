"""Uneven numbers of steps: a rank that is out of data contributes zeros until all ranks are out of data.

Inside `model.join()` ranks announce everything that they do together (the broadcast of buffers before a forward, a
synchronized backward) by one small all-reduce. A rank that has left its loop takes part in these all-reduces without an
announcement of its own, and then in what the other ranks have announced: in a backward it contributes zeros. When all
have left, a rank that ended last broadcasts the model, since ranks that ended earlier missed the last updates.

Outside of `join` nothing is announced. Source of the interface: PyTorch's `DistributedDataParallel.join`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from collectives.errors import name_ranks
from ddp._tensor.core import Tensor
from ddp.errors import DtypeError, EarlyStop, ParallelError
from ddp.parallel.error_context import error_context

FORWARD = "forward"
BACKWARD = "backward"
_KINDS = (FORWARD, BACKWARD)
# `_inside.join` is True while this thread is inside a join.
_inside = threading.local()


@contextlib.contextmanager
def single_join() -> Iterator[None]:
    """Marks this thread as inside a join. Raises: ParallelError if it is already inside a join of any model."""
    if getattr(_inside, "join", False):
        raise ParallelError("join inside join: a rank that is out of data can take part in one of them only")
    _inside.join = True
    try:
        yield
    finally:
        _inside.join = False


class JoinContext:
    """One `with model.join()` on this rank.

    throw: whether to raise on all ranks as soon as one has run out of data
    """

    def __init__(self, comm: Communicator, throw: bool) -> None:
        self._comm = comm
        self._throw = throw
        self.source = 0  # the lowest rank that still had data, at the last announcement

    def announce(self, kind_here: str | None) -> str | None:
        """Announces what this rank does next, FORWARD or BACKWARD; None: it has run out of data. Collective.

        Returns: what the ranks do next; None if all have run out of data
        Raises: EarlyStop on every rank, with `throw`, if some ranks have run out of data and others have not.
        """
        size = self._comm.size
        rank = self._comm.rank
        message = np.zeros(len(_KINDS) + size)
        if kind_here is not None:
            message[_KINDS.index(kind_here)] = message[len(_KINDS) + rank] = 1
        with error_context(
            f"join: waiting for what the others do next{'' if kind_here is None else f' (here: {kind_here})'}"
        ):
            self._comm.all_reduce(message, ReduceOp.SUM, out=message)
        active = np.flatnonzero(message[len(_KINDS) :]).tolist()
        if not active:
            return None
        self.source = active[0]
        if self._throw and len(active) < size:
            gone = sorted({*range(size)} - {*active})
            raise EarlyStop(
                f"{name_ranks(gone)} ran out of data, rank "
                f"{active[0]} has more: join(throw_on_early_termination=True) ends here on every rank"
            )
        return _KINDS[int(message[: len(_KINDS)].argmax())]


def checked(optimizers: Iterable[Any]) -> list[Any]:
    """Returns the optimizers as a list. Raises: DtypeError unless all of them have a `load_state_dict`."""
    given = list(optimizers) if isinstance(optimizers, Iterable) else None
    if given is None or not all(hasattr(item, "load_state_dict") for item in given):
        raise DtypeError(f"join: optimizers is a list of optimizers, got {optimizers!r:.60}")
    return given


def take_over(comm: Communicator, source: int, tensors: Sequence[Tensor], optimizers: Sequence[Any]) -> None:
    """Broadcasts parameters, buffers and the optimizers' states of rank `source`. Collective."""
    with error_context("join: the model of the last rank"):
        for tensor in tensors:
            comm.broadcast(tensor.array, source)
            tensor.version.count += 1
        for optimizer in optimizers:
            state = comm.broadcast_object(optimizer.state_dict() if comm.rank == source else None, source)
            if comm.rank != source:
                optimizer.load_state_dict(state)
