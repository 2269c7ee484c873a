"""Communication hooks: functions that reduce a bucket of gradients instead of an all-reduce, for slow networks.

    hook           bytes that each of many ranks sends,    the mean is
                   for n gradients in float32
    allreduce      8n                                      exact; what DataParallel does without a hook
    bf16, fp16     4n                                      rounded to 8, 11 bits, summed in float32
    PowerSGD(r)    8r(rows + columns) for each matrix      approximated by matrices of rank r
    TopK(ratio)    8 * ratio * n * (ranks - 1)             the largest entries of each rank

Each rank keeps what PowerSGD and TopK leave out, and adds it to its next gradient. So these hooks have state: each
model needs a hook object of its own, and the checkpoint of every rank should contain the hook's `state_dict()`.

    model = ddp.DataParallel(net, comm_hook=ddp.parallel.comm_hooks.PowerSGD(matrix_approximation_rank=2))

A hook of one's own is a function of a `GradBucket`:

    def halved(bucket):                   # returns a Work that leaves half the mean in the buffer
        half = 0.5 * bucket.scale
        return bucket.comm.all_reduce(bucket.buffer, scale=half, out=bucket.buffer, async_op=True)

or a generator, if the result of a collective needs further work. It yields each Work that it waits for, and gets the
result from `yield` when the Work is complete; meanwhile backward goes on. (In a hook, never call `wait()`, or a
collective without `async_op=True`: backward would wait, and no communication would be hidden behind it.)

    def median(bucket):                   # the median of the ranks' gradients: one bad rank has little effect on it
        ranks = bucket.comm.size
        gradient = bucket.buffer * (bucket.scale * ranks)
        gradients = yield bucket.comm.all_gather(gradient[None], lengths="equal", async_op=True)
        bucket.buffer[...] = np.median(gradients, axis=0)

- `bucket.buffer` (n,) holds this rank's SUM of gradients. The sum over ranks times `bucket.scale` is the mean. The
  scale is 1 / size after `loss.backward()`, 1 / total weight after `model.backward(loss, weight=n)`, and may change at
  every step.
- All ranks must make the same calls of `bucket.comm` for the same bucket. Other buckets may be in flight at the same
  time: the order of calls of several buckets is taken care of.
- `bucket.names` and `bucket.gradients` (views of the buffer) are the parameters' names and gradients, `bucket.used`
  says whether any rank used each parameter in this step. Plans change after the first steps: keep state by name, not by
  `bucket.index`.
- A hook with a `state_dict` serves one model at a time. If a hook has an attribute `same_on_all_ranks`, a dict of
  settings, ranks compare it when a model is wrapped.
- A Work keeps its arrays alive; do not change them until it is complete.
- Arrays are NumPy's, or CuPy's with the hook on a stream of its own. A hook should not make the host wait.

An error in a hook is raised by backward, with the bucket's parameters in its message.
"""

from ddp.parallel.comm_hooks.grad_bucket import GradBucket
from ddp.parallel.comm_hooks.half_precision import allreduce, bf16, fp16
from ddp.parallel.comm_hooks.power_sgd import PowerSGD
from ddp.parallel.comm_hooks.top_k import TopK

__all__ = ["GradBucket", "PowerSGD", "TopK", "allreduce", "bf16", "fp16"]
