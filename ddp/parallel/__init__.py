"""Training on many devices: `DataParallel` and its parts, and collectives with gradients.

The objective of these collectives is the SUM over ranks of each rank's loss: `x.grad` on rank s is the derivative of
that sum by rank s's x. Forward and backward are each one collective, and each is the adjoint of the other:

    forward                     backward
    all_reduce sum, mean        all_reduce sum, mean
    reduce sum, mean            broadcast from the root (mean: divided by the number of ranks)
    reduce_scatter sum, mean    all_gather (mean: divided by the number of ranks)
    all_gather                  reduce_scatter sum
    broadcast                   reduce sum to the root
    gather                      scatter from the root
    scatter                     gather to the root
    all_to_all                  all_to_all, the lengths transposed

DataParallel divides the sum over ranks by their number, so under it `param.grad` is the gradient of the MEAN over ranks
of each rank's loss. With `model.backward(loss_sum, weight=n)` it is the gradient of the sum of all losses divided by
the sum of all weights.

Before the forward collective, the ranks exchange one small message, except under `no_grad`: does their tensor require
grad? If any does (in `scatter`: if the root's does), the results on all ranks require grad, and every rank must run
backward from its own result. Integers pass without a gradient. The calls go over a duplicate of `comm` (None:
`collectives.init()`). The first call makes the duplicate, and closing `comm` closes the duplicate.

Under create_graph the backward of a collective is recorded, so that it has a gradient, too. Every rank must run the
same backwards: other ranks wait in a collective even if this rank needs no gradient from it. `backward` runs every
collective of the graph, and so does `autograd.grad(create_graph=True)` if all its inputs are leaves. Without
create_graph, `autograd.grad` and `backward(inputs=...)` run only the collectives on the way to their inputs.
"""

from ddp.parallel import comm_hooks
from ddp.parallel.bucket_plan import Plan, plan_buckets
from ddp.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from ddp.parallel.data_parallel import DataParallel
from ddp.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from ddp.parallel.zero import ZeroOptimizer

__all__ = [
    "DataParallel",
    "Plan",
    "SyncBatchNorm",
    "ZeroOptimizer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "comm_hooks",
    "convert_sync_batchnorm",
    "gather",
    "plan_buckets",
    "reduce",
    "reduce_scatter",
    "scatter",
]
