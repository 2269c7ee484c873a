"""Bits that do not depend on the number of ranks: a step is V micro-batches, whichever rank computes them.

Who computes what. Rank r of n computes a contiguous share of the V micro-batches, for any n from 1 to V; the first
V % n ranks have one more than the others. What depends on a rank elsewhere depends on a micro-batch here.

The order of sums. Gradients are added in one binary tree over the micro-batches 0 to V - 1: those of 2k and 2k + 1
first, then blocks of two, of four and so on; where V is no power of two, a block without a neighbour goes up as it is.
A rank adds up its own blocks as micro-batches come, so that no more than log2(V) sums, rounded up, are kept beside the
gradient (where V is above 48 and the shares begin badly, one or two more):

    V = 8 on 3 ranks    rank 0: 0 1 2          rank 1: 3 4 5          rank 2: 6 7
    what they bring     (0 + 1), 2             3, (4 + 5)             (6 + 7)
    what all have       ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

What ranks exchange. In the backward of a rank's last micro-batch each bucket that is full is added to that rank's own
blocks as far as they are neighbours. What is left goes by all-to-all, each rank's part of the bucket to that rank; it
adds the blocks in the tree's order, scales the sum, and an all-gather brings the parts together. Where each rank has
one block and these are as long, that is `all_reduce(order="tree")`: the bandwidth of a ring, and in the shared memory
of a node nothing more than a reduction. Buckets go through these rounds in the order of a pipeline (see
`comm_hooks.hook_exchange`), while backward is still running.

Draws, and running statistics. Random numbers are seeded by step and micro-batch. Batch norm normalizes by a
micro-batch's statistics; they are kept until the step ends, exchanged, and every rank moves its running statistics by
all of them, in the micro-batches' order.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator, ReduceOp
from collectives.reduction import tree
from ddp import _device, _native
from ddp._device import CPU, device, to_device
from ddp.errors import ArgumentError, ParallelError
from ddp.nn import Module
from ddp.nn.normalization import BatchNorm, RecordedStatistics, deferred, running_stats_update
from ddp.parallel.buckets import Buckets
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Steps
from ddp.parallel.comm_hooks.hook_exchange import HookExchange
from ddp.parallel.error_context import error_context
from ddp.parallel.sync_batch_norm import SyncBatchNorm

Array = Any  # numpy.ndarray or cupy.ndarray


def share(micro_batches: int, rank: int, size: int) -> range:
    """The micro-batches of one rank.

    `[share(8, rank, 3) for rank in range(3)] == [range(0, 3), range(3, 6), range(6, 8)]`

    Raises: ArgumentError if there are fewer micro-batches than ranks.
    """
    if micro_batches < size:
        raise ArgumentError(f"micro_batches={micro_batches} on {size} ranks: each rank computes at least one")
    each, more = divmod(micro_batches, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


class Subtree(NamedTuple):
    """The sum of the micro-batches `start` to `start + length - 1`, a subtree of the tree."""

    start: int
    length: int
    total: Any

    def joins(self, following: Subtree) -> bool:
        """Whether the tree adds these two to each other."""
        return self.length == following.length and self.start % (2 * self.length) == 0

    def add(self, following: Subtree, add: Callable[[Any, Any], Any]) -> Subtree:
        """The sum of both."""
        return Subtree(self.start, self.length + following.length, add(self.total, following.total))


def blocks(micro_batches: range) -> list[tuple[int, int]]:
    """(start, length) of the subtrees that a share consists of. `blocks(range(3, 8)) == [(3, 1), (4, 4)]`"""
    stack: list[Subtree] = []
    for number in micro_batches:
        last = Subtree(number, 1, None)
        while stack and stack[-1].joins(last):
            last = stack.pop().add(last, lambda a, b: None)
        stack.append(last)
    return [(block.start, block.length) for block in stack]


def tree_sum(parts: Sequence[Subtree], add: Callable[[Any, Any], Any]) -> Any:
    """The sum of blocks that together are a subtree, or the tree, in its order. add: of a block and the following"""
    totals = {part.start: part.total for part in parts}
    first, last = parts[0].start, parts[-1]
    for left, right in tree(last.start + last.length - first, first):
        if right in totals:  # else both are in one block
            totals[left] = add(totals[left], totals[right])
    return totals[first]


class TreeExchange(HookExchange):
    """Adds the gradients of all ranks' micro-batches in the tree's order, and keeps this rank's partial sums.

    names: of all parameters that the control message speaks of; where: their device; count: micro-batches of a step
    """

    joinable = False  # a rank that is out of data has no micro-batch

    def __init__(self, comm: Communicator, names: Sequence[str], where: device, count: int) -> None:
        super().__init__(self.sum_in_tree_order, comm, names, where)
        self._xp = where.xp
        self._blocks = [blocks(share(count, rank, comm.size)) for rank in range(comm.size)]
        # Each rank has one block, all are as long but the last: the tree over them is that over ranks.
        length = self._blocks[0][0][1]
        self._by_rank = all(len(each) == 1 and each[0][0] == rank * length for rank, each in enumerate(self._blocks))
        self._last = share(count, comm.rank, comm.size)[-1]
        self._kept: list[list[Subtree]] = []  # by bucket: partial sums of this rank, in order
        self._free: list[list[Array]] = []  # by bucket: memory for these

    def set_buckets(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        assert not any(self._kept), "the plan changes between steps"
        self._kept, self._free = [[] for _ in buckets.members], [[] for _ in buckets.members]

    def add(self, bucket: int, number: int) -> Subtree:
        """Adds the kept sums to the micro-batch in the bucket, as far as the tree does; their memory is free then."""
        buffer, kept = self._buckets.memory.buffers[bucket], self._kept[bucket]
        block = Subtree(number, 1, buffer)
        while kept and kept[-1].joins(block):
            self._free[bucket].append(kept[-1].total)
            block = kept.pop().add(block, self._add)
        return block

    def keep(self, number: int) -> None:
        """A micro-batch that is not this rank's last one is complete: its gradients leave the buckets."""
        for bucket in range(len(self._kept)):
            block, free = self.add(bucket, number), self._free[bucket]
            memory = free.pop() if free else self._xp.empty_like(block.total)
            memory[...] = block.total
            self._kept[bucket].append(block._replace(total=memory))

    def discard(self) -> None:
        """Frees the partial sums: the step has ended, or is given up."""
        for kept, free in zip(self._kept, self._free, strict=True):
            free += [block.total for block in kept]
            kept.clear()

    def launch(self, index: int) -> None:
        with np.errstate(all="ignore"):
            self._kept[index].append(self.add(index, self._last))
        super().launch(index)

    def finish(self) -> None:
        super().finish()
        for kept in self._kept:
            kept.pop()  # the bucket itself
        self.discard()

    def sum_in_tree_order(self, bucket: GradBucket) -> Steps:
        """Makes of the ranks' blocks of a bucket the scaled sum of all micro-batches."""
        buffer, comm = bucket.buffer, self._comm
        kept = self._kept[bucket.index]
        counts = [len(each) for each in self._blocks]
        if comm.size == 1:
            tree_sum(kept, self._add)
            self._xp.multiply(buffer, bucket.scale, out=buffer)
        elif self._by_rank:
            yield comm.all_reduce(buffer, ReduceOp.SUM, scale=bucket.scale, order="tree", out=buffer, async_op=True)
        else:
            ends = [len(buffer) * rank // comm.size for rank in range(comm.size + 1)]
            lengths = [stop - start for start, stop in itertools.pairwise(ends)]
            sent = buffer
            if len(kept) > 1:
                ranges = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
                sent = self._xp.concatenate([block.total[part] for part in ranges for block in kept])
            table = [[count * length for length in lengths] for count in counts]
            received = yield comm.all_to_all(sent, lengths=table, async_op=True)
            parts = received.reshape(sum(counts), lengths[comm.rank])
            numbers = itertools.chain.from_iterable(self._blocks)
            total = tree_sum([Subtree(*number, part) for number, part in zip(numbers, parts, strict=True)], self._add)
            self._xp.multiply(total, bucket.scale, out=total)
            yield comm.all_gather(total, lengths=lengths, out=buffer, async_op=True)

    def _add(self, left: Array, right: Array) -> Array:
        return self._xp.add(left, right, out=right)


class _Latest(threading.local):
    """The progress that was made last in this thread."""

    progress: Callable[[], MicroBatches | None] | None = None


_latest = _Latest()


def begin_micro_batch(first: bool) -> None:
    """Seeds this thread's random numbers for the next micro-batch of the model that was wrapped last in it, if any.

    A DataLoader calls it as it hands out a micro-batch, so that draws since the last one change nothing in it.
    first: it is the first one of a step

    Raises: ParallelError where the model is in the middle of a step then.
    """
    progress = None if _latest.progress is None else _latest.progress()
    if progress is None:
        return
    if first and progress.pending:
        raise ParallelError(
            f"a pass begins while the model is before micro-batch {progress.number} of its step: leave a loop over "
            "micro-batches only where model.accumulating is False"
        )
    progress.seed_draws()


class MicroBatches:
    """Where this rank is in the micro-batches of a step, and what of them is still to be exchanged.

    module: the one that is trained; count: micro-batches of a step
    own: those of this rank; number: the next one; step: steps that have ended
    used: by number, the parameters that micro-batches of this step have used; weights: theirs, (count,) None: not given

    Raises: ParallelError for what cannot be exact.
    """

    def __init__(self, comm: Communicator, module: Module, count: int) -> None:
        self.count, self.own = count, share(count, comm.rank, comm.size)
        self.number, self.step = self.own[0], 0
        self.used: set[int] = set()
        self.weights: list[float | None] = []
        self.seed = int(comm.broadcast_object(_device.initial_seed(), root=0))
        self._comm, self._module = comm, module
        self._drawn = False  # the forward of this micro-batch has begun
        _latest.progress = weakref.ref(self)
        self._records: RecordedStatistics = []
        self._recorded = 0  # of earlier micro-batches
        self._outer: RecordedStatistics | None = None
        for name, each in module.named_modules():
            if isinstance(each, SyncBatchNorm):
                raise ParallelError(
                    f"micro_batches: {name or 'the module'} is a SyncBatchNorm, whose statistics depend on the number "
                    "of ranks: use BatchNorm, whose statistics are a micro-batch's"
                )
        for name, p in module.named_parameters():
            if p.is_floating_point() and p.array.dtype.itemsize < 4:
                raise ParallelError(
                    f"micro_batches: {name} is {p.array.dtype}, and partial sums would be rounded to that: keep "
                    "parameters in float32 and compute under autocast"
                )
        self.seed_draws()

    @property
    def last(self) -> bool:
        """Whether the next micro-batch is this rank's last one of the step."""
        return self.number == self.own[-1]

    @property
    def pending(self) -> bool:
        """Whether some micro-batches of this rank are done, and others of the same step are not."""
        return self.number != self.own[0]

    def begin_backward(self) -> None:
        """A backward begins: what it computes again moves no running statistics either."""
        self._outer, deferred.records = deferred.records, self._records

    def end_backward(self) -> None:
        """That backward has ended."""
        if deferred.records is self._records:
            deferred.records = self._outer

    def begin_again(self) -> None:
        """That backward has failed: the micro-batch may be computed again, with the same draws."""
        self.end_backward()
        self._uncount(self._records[self._recorded :])
        del self._records[self._recorded :]
        self.seed_draws()

    def seed_draws(self, of_forward: bool = False) -> None:
        """Seeds this thread's random numbers for the next micro-batch.

        of_forward: anew, in its forward, so that draws between two steps, as in an evaluation, change nothing there
        """
        self._drawn = of_forward
        entropy = [self.seed, self.step, self.number, int(of_forward)]
        _device.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))

    def forward(self, run: Callable[[], Any]) -> Any:
        """Runs the module in training. Raises: ParallelError if it changes a buffer whose changes have no order."""
        if not self._drawn:
            self.seed_draws(of_forward=True)
        before = self._buffers()
        with deferred.into(self._records):
            result = run()
        changed = [name for name, seen in self._buffers().items() if before.get(name) != seen]
        known = {id(norm.running_mean) for norm in self._norms()}
        if not all(id(record[0]) in known for record in self._records):
            changed.append("of running statistics")
        if changed:
            raise ParallelError(
                f"micro_batches: forward has changed the buffer {changed[0]}, and each rank would change its own: of "
                "buffers only the running statistics of BatchNorm are updated in the micro-batches' order"
            )
        return result

    def advance(self, used: set[int], weight: float | None) -> None:
        """The backward begins that completes a micro-batch of this rank.

        Raises: ParallelError if some have weights, and others not.
        """
        del self.weights[self.number - self.own.start :]  # of a backward that failed
        if self.weights and (weight is None) != (self.weights[-1] is None):
            raise ParallelError(
                "micro-batches with and without a weight cannot be added up: use model.backward(loss, weight=...) for "
                "all of them, or for none"
            )
        self.weights.append(weight)
        self.used |= used

    def complete(self) -> None:
        """That backward has ended; where it was the last one, so has the step. Collective then."""
        if self.last:
            self._move_statistics()
            self.step += 1
            self._begin_step()
        else:
            self.number += 1
        self._recorded = len(self._records)
        self.seed_draws()

    def state(self) -> dict[str, Any]:
        """JSON values: what `load_state` takes, and what the last bits depend on besides."""
        return {"count": self.count, "seed": self.seed, "step": self.step, "machine": machine()}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes on where that state was, on any number of ranks. Warns if the last bits may differ here.

        Raises: ParallelError if it is of another number of micro-batches.
        """
        if state is None or state["count"] != self.count:
            saved = None if state is None else state["count"]
            raise ParallelError(
                f"the state is of micro_batches={saved}, this model has {self.count}: gradients would be added in "
                "another order, so give the number that it was saved with"
            )
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self._begin_step()
        here, saved = machine(), state["machine"]
        odd = [f"{name} {saved.get(name)}, here {value}" for name, value in here.items() if saved.get(name) != value]
        if odd:
            warnings.warn(
                f"the state was saved with {'; '.join(odd)}: the last bits may differ from now on. The number "
                "of BLAS threads is that of the environment, OPENBLAS_NUM_THREADS, when Python starts",
                stacklevel=4,
            )
        self.seed_draws()

    def _begin_step(self) -> None:
        self.number, self.used, self.weights = self.own[0], set(), []
        self._records.clear()
        self._recorded = 0

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """What tells whether a buffer has changed, of all but those of batch norm."""
        seen = {}
        for prefix, each in self._module.named_modules():
            for name, tensor in each.named_buffers(recurse=False):
                if not (isinstance(each, BatchNorm) and name == "num_batches_tracked"):
                    seen[f"{prefix}.{name}" if prefix else name] = id(tensor), tensor.version.count
        return seen

    def _norms(self) -> list[BatchNorm]:
        """The layers that keep running statistics, in the model's order."""
        norms = [each for each in self._module.modules() if isinstance(each, BatchNorm)]
        return [each for each in norms if each.running_mean is not None]

    def _uncount(self, records: RecordedStatistics) -> None:
        """Takes these out of the layers' own counts."""
        for norm in self._norms():
            norm.num_batches_tracked.sub_(sum(record[0] is norm.running_mean for record in records))

    def _move_statistics(self) -> None:
        """Moves running statistics by all ranks' micro-batches, in their order. Collective if there are any."""
        norms = self._norms()
        if not norms:
            return
        records = self._records
        numbers = {id(each.running_mean): number for number, each in enumerate(norms)}
        rows = [
            np.concatenate([[numbers[id(mean_of)], count], *(to_device(x, CPU).reshape(-1) for x in (mean, var))])
            for mean_of, mean, var, count in records
        ]
        mine = np.concatenate([np.zeros(0), *rows])
        with error_context("the statistics of batch norm, at the end of a step"):
            everyones = self._comm.all_gather(mine)
        self._uncount(records)  # they are counted below, in order
        for number, count, mean, var in _parsed(everyones, norms):
            norm = norms[number]
            xp = norm.running_mean.device.xp
            move = running_stats_update(norm.running_mean, norm.running_var, norm.count_batch())
            move(xp.asarray(mean), xp.asarray(var), count)


def _parsed(rows: np.ndarray[Any, Any], norms: Sequence[BatchNorm]) -> Iterator[tuple[int, int, Array, Array]]:
    """(number of the layer, values a channel, means, variances) of each record, in float32 at least."""
    at = 0
    while at < len(rows):
        number, count = int(rows[at]), int(rows[at + 1])
        channels = norms[number].num_features
        dtype = np.promote_types(norms[number].running_mean.array.dtype, np.float32)
        mean, var = rows[at + 2 : at + 2 + 2 * channels].reshape(2, channels).astype(dtype)
        yield number, count, mean, var
        at += 2 + 2 * channels


def machine() -> dict[str, Any]:
    """What of this process the last bits of a product or an op depend on."""
    kernels = "none" if _native.library is None else Path(_native.library._name).name
    return {"BLAS threads": _native.blas_threads(), "kernels": kernels}
