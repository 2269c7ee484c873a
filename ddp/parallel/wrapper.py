"""DataParallel: one model on every rank, its gradients averaged while backward is still running."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import collectives
from ddp._layout import FlatBuckets, lay_out
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ParallelError
from ddp.nn import Module
from ddp.parallel.accumulation import weighing
from ddp.parallel.agreement import Description, check_agreement
from ddp.parallel.frozen import Frozen
from ddp.parallel.plan import plan_buckets
from ddp.parallel.reducer import Reducer

_MB = 1 << 20


class DataParallel(Module):
    """Wraps a module so that every backward leaves the mean gradient over all ranks in `param.grad`.

    module: the same on every rank: rank 0's parameters and buffers are broadcast to all
    comm: the ranks; None: `collectives.init()`. Reductions go over a duplicate of it.
    bucket_cap_mb: MiB of gradients that are reduced together; first_bucket_mb: MiB of the first bucket, small so that
    communication starts early

    Call it like the module. `loss.backward()` averages over ranks; `model.backward(loss_sum, weight=n)` divides the sum
    of all ranks' gradients by the sum of their weights, which is exact for batches of different sizes. Parameters that
    a backward does not reach need no flag: their grad is None where no rank used them.

    What requires grad when the module is wrapped is what is trained: a backward that reaches a parameter that was
    frozen then raises. `close()` gives the module back.

    Raises: ArgumentError for buckets of no size; ParallelError if the ranks' modules differ, no parameter requires
    grad, or the module is wrapped already.
    Source: Li et al. 2020, arXiv:2006.15704.
    """

    def __init__(
        self,
        module: Module,
        comm: collectives.Communicator | None = None,
        *,
        bucket_cap_mb: float = 4.0,
        first_bucket_mb: float = 1.0,
    ) -> None:
        super().__init__()
        self.module = module
        if not (bucket_cap_mb > 0 and first_bucket_mb > 0):
            raise ArgumentError(f"buckets hold more than 0 MiB, not {bucket_cap_mb!r} and {first_bucket_mb!r}")
        comm = collectives.init() if comm is None else comm
        tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
        for name, tensor in tensors:
            if tensor._leaf.watcher is not None:
                raise ParallelError(
                    f"{name} is already part of a DataParallel: use that one, or call its close() first"
                )
        check_agreement(comm, [_describe(name, tensor) for name, tensor in tensors])
        trained = [(name, tensor) for name, tensor in tensors if tensor.requires_grad]
        if not trained:
            raise ParallelError("no parameter of this module requires grad: there is nothing to reduce")
        self.comm = comm.duplicate()
        for _, tensor in tensors:
            self.comm.broadcast(tensor._array, root=0)
        leaves = [tensor._leaf for _, tensor in trained]
        arrays = [tensor._array for _, tensor in trained]
        dtypes = [array.dtype for array in arrays]
        self.plan = plan_buckets(
            [array.nbytes for array in arrays],
            cap=int(bucket_cap_mb * _MB),
            first=int(min(first_bucket_mb, bucket_cap_mb) * _MB),
            kinds=dtypes,
        )
        layout = lay_out(self.plan, [array.shape for array in arrays], dtypes)
        xp = trained[0][1].device.xp
        # On the CPU the ranks of a node reduce their buckets where they lie.
        buckets = FlatBuckets(layout, self.comm.empty if xp is np else xp.zeros)
        self._reducer = Reducer([name for name, _ in trained], leaves, buckets, self.comm)
        for name, tensor in tensors:
            if not tensor.requires_grad:
                tensor._leaf.watcher = Frozen(name)

    def close(self) -> None:
        """Gives the module back: its backward is its own again, and it may be wrapped anew. Gradients stay."""
        self._reducer.release()
        for tensor in itertools.chain(self.module.parameters(), self.module.buffers()):
            if isinstance(tensor._leaf.watcher, Frozen):
                tensor._leaf.watcher = None
        self.comm.close()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def backward(self, loss_sum: Tensor, weight: float) -> None:
        """Backward of a sum over `weight` samples (or tokens); gradients become sum of gradients / sum of weights.

        loss_sum: (), the sum of the losses on this rank, not their mean
        weight: how many they are, 0 for an empty batch; weights add up over `no_sync()`

        Raises: ParallelError if gradients of an earlier synchronized backward are still there, if other ranks call
        `loss.backward()` instead, or if the weight is negative. A loss that reaches no parameter takes part with zeros.
        """
        if not weight >= 0:
            raise ParallelError(f"weight should be a number of samples, at least 0, is {weight!r}")
        with weighing(float(weight)):
            if loss_sum.requires_grad:
                loss_sum.backward()
            self._reducer.take_part()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank alone; the next backward outside reduces them with its own.

        What counts is where `backward` is called; forward may be inside or outside.
        """
        before = self._reducer.sync
        self._reducer.sync = False
        try:
            yield
        finally:
            self._reducer.sync = before


def _describe(name: str, tensor: Tensor) -> Description:
    array = tensor._array
    return name, list(array.shape), str(array.dtype), bool(tensor.requires_grad), bool(array.flags.writeable)
