"""A world of one on a GPU: whatever is sent arrives, by a copy on the device, and neither NCCL nor MPI is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives._gpu.carrier import Rest
from collectives._gpu.cuda import Cuda
from collectives.engine.call import Steps
from collectives.reduction import ReduceOp


class Alone:
    """The carrier of a communicator of one rank."""

    name = "single"
    capturable = True

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream = cuda.stream()

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Rest]:
        self._copy(x, out)
        yield from ()
        return Rest(op, factor)

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, root: int) -> Steps[Rest]:
        return self.all_reduce(x, out, op, factor)

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Rest]:
        return self.all_reduce(x, out, op, factor)

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        yield from ()

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        return self.all_gather(x, out, counts)

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        self._copy(x, out)
        yield from ()

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        return self.all_gather(x, out, counts)

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        return self.all_gather(x, out, ())

    def watch(self, event: Any, call: object) -> None:
        return  # a copy on the device waits for nobody

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    def _copy(self, x: Any, out: Any) -> None:
        if out is not x:
            with self._cuda.on(self.stream):
                self._cuda.xp.copyto(out, x)
