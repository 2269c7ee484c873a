"""`ReduceScatter`: the exchange of a sharded optimizer, in which each rank gets the mean of its own range alone.

A bucket keeps what this rank added up. So a second backward adds to that, and reduces both, as it should; but nobody
may take it for the mean, and reading `param.grad` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives import Communicator, ReduceOp, Work
from ddp._engine import Leaf
from ddp.parallel.control import ControlMessage
from ddp.parallel.exchange import Buckets, Times
from ddp.parallel.naming import naming
from ddp.parallel.zero.shard import Shard

_WITHHELD = (
    "grad: under ZeroOptimizer each rank has the mean gradient of its own part of the parameters alone, so no rank can "
    "show a whole one. To clip by the global norm: zero.clip_grad_norm_(max_norm), on all ranks; GradScaler takes "
    "the optimizer as it is"
)


class ReduceScatter:
    """See `Exchange`. leaves: of all parameters; move: makes the shards of new buckets, collective"""

    def __init__(self, comm: Communicator, leaves: Sequence[Leaf], move: Callable[[Buckets], Sequence[Shard]]) -> None:
        self._comm = comm
        self._leaves = leaves
        self._move = move
        self._works: list[Work[Any]] = []
        self._buckets: Buckets | None = None
        self._shards: Sequence[Shard]
        self._control: ControlMessage

    def follow(self, buckets: Buckets) -> None:
        self._works = []  # they keep the old buckets' memory
        self._shards = self._move(buckets)
        if self._buckets is not None:  # it follows a backward of this exchange
            self.withhold()
        self._buckets = buckets

    def begin(self, control: ControlMessage) -> None:
        self._works = []
        self._control = control

    def launch(self, index: int) -> None:
        assert self._buckets is not None
        shard = self._shards[index]
        work = self._comm.reduce_scatter(
            self._buckets.memory.buffers[index],
            ReduceOp.SUM,
            scale=self._control.scale,
            lengths=shard.lengths,
            out=shard.grad,
            async_op=True,
        )
        self._works.append(work)

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        assert self._buckets is not None
        for index, work in enumerate(self._works):
            with naming(self._buckets.words(index)):
                work.wait()
        self.withhold()

    def times(self) -> list[Times | None]:
        found = [work.times() for work in self._works]
        return [None if each is None else (each[0], each[2]) for each in found]

    def withhold(self) -> None:
        """The gradients that are there now are reduced, and not to be read."""
        for leaf in self._leaves:
            leaf.grad_buffer.withheld = _WITHHELD
