"""A world of one rank, which needs no MPI library. A collective at most copies and scales an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from collectives.errors import BackendError, no_rank
from collectives.reduction import Array, ReduceOp
from collectives.transport import Epilogue, ExitNotice, RankInfo, Signature, Steps, Test, Transport, completed, then
from collectives.world import World


def join(expected: World | None, timeout: float, checks: int | None) -> tuple[SingleTransport, None]:
    """Returns the transport of a world of one rank. Raises: BackendError in a world of several ranks."""
    if expected is not None and expected.size > 1:
        raise BackendError(f'backend "single" was asked for in a world of {expected.size} ranks')
    return SingleTransport(), None


class SingleTransport(Transport):
    """The transport of a communicator of one rank."""

    name = "single"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    node = 0

    def __init__(self, key: str = "world") -> None:
        self.key = key

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        return completed

    def root_prefix(self, buffer: Array, root: int) -> Test:
        return completed

    def all_prefixes(self, prefix: Array, buffer: Array) -> Test:
        return _copy(prefix, buffer[0])

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Test:
        return self.reduce(x, out, op, 0, epilogue)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        return then(_copy(x, out), epilogue, out)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
    ) -> Test:
        return then(_copy(x, out), epilogue, out)

    def broadcast(self, x: Array, root: int) -> Test:
        return completed

    def _move(self, x: Any, out: Any, *_: Any, **more: Any) -> Test:
        return _copy(x, out)

    gather = all_gather = scatter = all_to_all = _move

    def _no_other_rank(self, *_: Any, **more: Any) -> NoReturn:
        raise AssertionError("a world of one has no other rank")

    send = recv = _no_other_rank

    def arrived(self) -> tuple[int, Array] | None:
        return None

    def barrier(self) -> Test:
        return completed

    def group(self, members: Sequence[int], key: str, number: int) -> Steps[SingleTransport]:
        yield from ()
        return SingleTransport(key)

    def exit_notices(self) -> Mapping[int, ExitNotice]:
        return {}


def _copy(x: Array, out: Array | None) -> Test:
    assert out is not None
    if out is not x:
        np.copyto(out, x)
    return completed


class DetachedTransport(SingleTransport):
    """The transport of a process that a rank has forked or started. It has the rank's numbers; its collectives raise.

    A worker that reads data needs its rank's numbers to choose its part of the data. In a world of one it would read
    everything.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__()
        self.rank_info = rank_info

    def _refuse(self, *_: Any, **more: Any) -> NoReturn:
        raise no_rank(self.rank, self.size)

    exchange_signatures = send = recv = arrived = group = _refuse
