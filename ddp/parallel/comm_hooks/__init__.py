"""Communication hooks: what becomes of a bucket of gradients instead of an all-reduce, when the network is slow.

    hook           bytes that each of many ranks sends,    the mean is
                   for n gradients in float32
    allreduce      8n                                      exact; what DataParallel does without a hook
    bf16, fp16     4n                                      rounded to 8, 11 bits, summed in float32
    PowerSGD(r)    8r(rows + columns) for each matrix      approximated by matrices of rank r
    TopK(ratio)    8 * ratio * n * (ranks - 1)             the largest entries of each rank

What PowerSGD and TopK leave out is not lost: each rank remembers it and adds it to its next gradient. Such a hook has a
state, so each model gets an object of its own, and `state_dict()` of it belongs into a checkpoint, on every rank.

    model = ddp.DataParallel(net, comm_hook=ddp.parallel.comm_hooks.PowerSGD(matrix_approximation_rank=2))

A hook of one's own is a function of a `GradBucket`:

    def halved(bucket):                   # returns a Work that leaves the mean in the buffer
        half = 0.5 * bucket.scale
        return bucket.comm.all_reduce(bucket.buffer, scale=half, out=bucket.buffer, async_op=True)

or a generator, where something is left to do with a result. It yields each Work that it waits for, and is sent its
result when that is there; meanwhile backward goes on. (Never call `wait()` in a hook, nor a collective without
`async_op=True`: backward would stand still, and nothing be hidden behind it.)

    def median(bucket):                   # of the ranks' gradients, which one bad rank does not spoil
        ranks = bucket.comm.size
        mine = bucket.buffer * (bucket.scale * ranks)
        everyones = yield bucket.comm.all_gather(mine[None], lengths="equal", async_op=True)
        bucket.buffer[...] = np.median(everyones, axis=0)

- `bucket.buffer` (n,) holds this rank's SUM of gradients, `bucket.scale` what makes of the sum over ranks the mean: 1 /
  size after `loss.backward()`, 1 / total weight after `model.backward(loss, weight=n)`. It may change at every step.
- All ranks must make the same calls of `bucket.comm` for the same bucket. Which buckets are under way besides need not
  concern a hook.
- `bucket.names`, `bucket.gradients` (views of the buffer) say whose gradients these are, `bucket.used` whether any rank
  used them in this step. Plans change after the first step: state is kept by name, not by `bucket.index`.
- A hook with a `state_dict` serves one model at a time. What its attribute `same_on_all_ranks` (a dict, if it has one)
  says of its settings is compared when a model is wrapped.
- A Work keeps its arrays alive, and until it is done they must not be changed.
- Arrays are NumPy's, or CuPy's with the hook on a stream of its own; nothing in it should make the host wait.

An error in a hook is raised by backward, with the bucket's parameters in its message.
"""

from ddp.parallel.comm_hooks.grad_bucket import GradBucket
from ddp.parallel.comm_hooks.half_precision import allreduce, bf16, fp16
from ddp.parallel.comm_hooks.power_sgd import PowerSGD
from ddp.parallel.comm_hooks.top_k import TopK

__all__ = ["GradBucket", "PowerSGD", "TopK", "allreduce", "bf16", "fp16"]
