"""Training whose results do not depend on the number of ranks, to the last bit: a step consists of V micro-batches.

Work. Rank r of n computes a contiguous part of the V micro-batches, for any n from 1 to V. The first V % n ranks
compute one more than the others. Everything that otherwise depends on the rank depends on the micro-batch instead.

Order of sums. Gradients are added in one binary tree over the micro-batches 0 to V - 1: first 2k and 2k + 1, then
blocks of two, of four and so on. If V is not a power of two, a block without a neighbour stays as it is, and is added
later to a larger block. A rank adds its own blocks as soon as it has them. So it keeps at most log2(V) sums, rounded
up, in addition to the gradient (a few more if V is above 48, depending on where its part begins):

    V = 8 on 3 ranks    rank 0: 0 1 2          rank 1: 3 4 5          rank 2: 6 7
    sums of each rank   (0 + 1), 2             3, (4 + 5)             (6 + 7)
    the result          ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

Exchange. In the backward of a rank's last micro-batch, the rank's blocks of a bucket are complete when the bucket is
full. Each rank then sums one part of the bucket: it receives this part of all blocks by an all-to-all, adds them in the
order of the tree and scales the sum. An all-gather joins the parts. If each rank has one block and all but the last are
equally long, this is `all_reduce(order="tree")`, with the bandwidth of a ring, or a single reduction in shared memory.
Otherwise buckets go through these rounds as a pipeline (see `comm_hooks.hook_exchange`) while backward is still
running.

Random numbers are seeded by step and micro-batch. Batch norm normalizes by the statistics of one micro-batch. At the
end of a step the ranks exchange these statistics, and each updates its running statistics by all of them, in the order
of the micro-batches.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator, ReduceOp, Work
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
from ddp.parallel.exchange import Exchange, Times
from ddp.parallel.sync_batch_norm import SyncBatchNorm

Array = Any  # numpy.ndarray or cupy.ndarray


def micro_batches_of(micro_batches: int, rank: int, size: int) -> range:
    """The micro-batches of one rank.

    `[micro_batches_of(8, rank, 3) for rank in range(3)] == [range(0, 3), range(3, 6), range(6, 8)]`

    Raises: ArgumentError if there are fewer micro-batches than ranks.
    """
    if micro_batches < size:
        raise ArgumentError(f"micro_batches={micro_batches} on {size} ranks: each rank computes at least one")
    count, remainder = divmod(micro_batches, size)
    first = rank * count + min(rank, remainder)
    return range(first, first + count + (rank < remainder))


class Subtree(NamedTuple):
    """The sum of the micro-batches `start` to `start + length - 1`, which form a subtree of the tree."""

    start: int
    length: int
    total: Any

    def joins(self, following: Subtree) -> bool:
        """Whether this subtree and the following one are the two halves of a larger one, equal in length."""
        return self.length == following.length and self.start % (2 * self.length) == 0

    def add(self, following: Subtree, add: Callable[[Any, Any], Any]) -> Subtree:
        """The sum of this subtree and the following one."""
        return Subtree(self.start, self.length + following.length, add(self.total, following.total))


def blocks(micro_batches: range) -> list[tuple[int, int]]:
    """Splits a range into the largest subtrees with lengths that are powers of two. Returns their (start, length).

    `blocks(range(3, 8)) == [(3, 1), (4, 4)]`
    """
    stack: list[Subtree] = []
    for number in micro_batches:
        last = Subtree(number, 1, None)
        while stack and stack[-1].joins(last):
            last = stack.pop().add(last, lambda a, b: None)
        stack.append(last)
    return [(block.start, block.length) for block in stack]


def tree_sum(parts: Sequence[Subtree], add: Callable[[Any, Any], Any]) -> Any:
    """Adds the totals of adjacent blocks in the tree's order. Together the blocks are a subtree, or the whole tree."""
    totals = {part.start: part.total for part in parts}
    first = parts[0].start
    last = parts[-1]
    for left, right in tree(last.start + last.length - first, first):
        if right in totals:  # otherwise both are in one block
            totals[left] = add(totals[left], totals[right])
    return totals[first]


class TreeExchange(HookExchange):
    """Adds the gradients of all ranks' micro-batches in the tree's order, and keeps this rank's partial sums.

    names: of all parameters in the control message; target: their device; count: micro-batches in a step
    """

    joinable = False  # a rank that is out of data has no micro-batch

    def __init__(self, comm: Communicator, names: Sequence[str], target: device, count: int) -> None:
        super().__init__(self.sum_in_tree_order, comm, names, target)
        self._xp = target.xp
        ranges = [micro_batches_of(count, rank, comm.size) for rank in range(comm.size)]
        self._blocks = [blocks(numbers) for numbers in ranges]
        # If each rank has one block, and all have the same length (the last may be shorter), the tree over the blocks
        # is the tree over the ranks.
        length = self._blocks[0][0][1]
        self._by_rank = all(own[1:] == [] and own[0][0] == rank * length for rank, own in enumerate(self._blocks))
        self._last = ranges[comm.rank][-1]
        self._sums: list[list[Subtree]] = []  # by bucket: partial sums of this rank, in order
        self._free: list[list[Array]] = []  # by bucket: memory for partial sums

    def set_buckets(self, buckets: Buckets) -> None:
        super().set_buckets(buckets)
        assert not any(self._sums), "the plan changes between steps"
        self._sums = [[] for _ in buckets.members]
        self._free = [[] for _ in buckets.members]

    def add(self, bucket: int, number: int) -> Subtree:
        """Called when a bucket holds the gradients of micro-batch `number`. Adds kept sums to the bucket.

        While the last kept sum and the bucket are the two halves of a larger subtree, that sum is added to the bucket.

        Returns: the largest subtree that is complete now; its sum is in the bucket
        """
        sums = self._sums[bucket]
        block = Subtree(number, 1, self._buckets.memory.buffers[bucket])
        while sums and sums[-1].joins(block):
            self._free[bucket].append(sums[-1].total)
            block = sums.pop().add(block, self._add)
        return block

    def keep(self, number: int) -> None:
        """Called after a micro-batch that is not this rank's last one.

        Adds kept sums to the buckets as `add` does, and copies the results out of the buckets.
        """
        for bucket, free in enumerate(self._free):
            block = self.add(bucket, number)
            memory = free.pop() if free else self._xp.empty_like(block.total)
            memory[...] = block.total
            self._sums[bucket].append(block._replace(total=memory))

    def discard(self) -> None:
        """Drops the partial sums, and keeps their memory. Called after a step, or before a state is loaded."""
        for sums, free in zip(self._sums, self._free, strict=True):
            free += [block.total for block in sums]
            sums.clear()

    def launch(self, index: int) -> None:
        with np.errstate(all="ignore"):
            self._sums[index].append(self.add(index, self._last))
        if self._by_rank:
            Exchange.launch(self, index)  # starts now; a hook would wait for the control message
        else:
            super().launch(index)

    def _start(self, index: int) -> Work[Any]:
        buffer = self._buckets.memory.buffers[index]
        scale = self._control.scale
        return self._comm.all_reduce(buffer, ReduceOp.SUM, scale=scale, order="tree", out=buffer, async_op=True)

    def times(self) -> list[Times | None]:
        return Exchange.times(self) if self._by_rank else super().times()

    def finish(self) -> None:
        if self._by_rank:
            Exchange.finish(self)
        else:
            super().finish()
        for sums in self._sums:
            sums.pop()  # the last block, whose sum is in the bucket's own memory
        self.discard()

    def sum_in_tree_order(self, bucket: GradBucket) -> Steps:
        """Replaces this rank's gradients in a bucket by the scaled sum of all ranks' micro-batches."""
        buffer = bucket.buffer
        comm = self._comm
        sums = self._sums[bucket.index]
        if comm.size == 1:
            tree_sum(sums, self._add)
            self._xp.multiply(buffer, bucket.scale, out=buffer)
        else:
            ends = [len(buffer) * rank // comm.size for rank in range(comm.size + 1)]
            ranges = list(itertools.pairwise(ends))
            lengths = [stop - start for start, stop in ranges]
            sent = buffer
            if len(sums) > 1:
                sent = self._xp.concatenate([block.total[start:stop] for start, stop in ranges for block in sums])
            table = [[len(own) * length for length in lengths] for own in self._blocks]
            received = yield comm.all_to_all(sent, lengths=table, async_op=True)
            all_blocks = list(itertools.chain.from_iterable(self._blocks))
            parts = received.reshape(len(all_blocks), lengths[comm.rank])
            total = tree_sum([Subtree(*block, part) for block, part in zip(all_blocks, parts, strict=True)], self._add)
            self._xp.multiply(total, bucket.scale, out=total)
            yield comm.all_gather(total, lengths=lengths, out=buffer, async_op=True)

    def _add(self, left: Array, right: Array) -> Array:
        return self._xp.add(left, right, out=right)


class _Latest(threading.local):
    """The MicroBatches that this thread made last."""

    reference: Callable[[], MicroBatches | None] = staticmethod(lambda: None)


_latest = _Latest()


def begin_micro_batch(first: bool) -> None:
    """Seeds this thread's random numbers for the next micro-batch of a model with micro_batches.

    Of several such models, the one that this thread wrapped last counts. Does nothing if there is none. A DataLoader
    calls this before it returns a micro-batch, so that results do not depend on how many random numbers were drawn
    before.

    first: whether it is the first micro-batch of a pass

    Raises: ParallelError if a pass begins while the model is in the middle of a step.
    """
    micro_batches = _latest.reference()
    if micro_batches is None:
        return
    if first and micro_batches.pending:
        raise ParallelError(
            f"a pass begins while the model is before micro-batch {micro_batches.number} of its step: leave a loop "
            "over micro-batches only where model.accumulating is False"
        )
    micro_batches.seed_draws()


class MicroBatches:
    """This rank's progress through the micro-batches of a step.

    module: the trained module; count: micro-batches in a step
    own: the micro-batches of this rank; number: the number of the next micro-batch; step: how many steps have ended
    used: numbers of the parameters that this step's micro-batches have used; weights: of these micro-batches, None for
    one without a weight

    Raises: ArgumentError for fewer micro-batches than ranks; ParallelError if the module has a SyncBatchNorm or 16-bit
    parameters, with which results would depend on the number of ranks.
    """

    def __init__(self, comm: Communicator, module: Module, count: int) -> None:
        self.count = count
        self.own = micro_batches_of(count, comm.rank, comm.size)
        self.number = self.own[0]
        self.step = 0
        self.used: set[int] = set()
        self.weights: list[float | None] = []
        self.seed = int(comm.broadcast_object(_device.initial_seed(), root=0))
        self._comm = comm
        self._module = module
        self._forward_seeded = False
        _latest.reference = weakref.ref(self)
        self._records: RecordedStatistics = []
        self._recorded = 0  # the number of records of earlier micro-batches
        self._outer: RecordedStatistics | None = None  # `deferred.records` before a backward
        for name, layer in module.named_modules():
            if isinstance(layer, SyncBatchNorm):
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
        """Whether this rank is between two micro-batches of a step."""
        return self.number != self.own[0]

    def begin_backward(self) -> None:
        """Called before a backward. If a checkpoint recomputes a batch norm there, it only records its statistics."""
        self._outer = deferred.records
        deferred.records = self._records

    def end_backward(self) -> None:
        """Called after a backward. Batch norms no longer record for this model."""
        if deferred.records is self._records:
            deferred.records = self._outer

    def begin_again(self) -> None:
        """Called after a backward that has failed. The micro-batch can be repeated with the same random numbers.

        A micro-batch may be split into several backwards inside `no_sync()`. If one of them fails after it has added to
        gradients, `zero_grad()` has to be called, and the micro-batch is repeated from its first part.
        """
        self.end_backward()
        self._uncount(self._records[self._recorded :])
        del self._records[self._recorded :]
        self.seed_draws()

    def seed_draws(self, of_forward: bool = False) -> None:
        """Seeds this thread's random numbers for the next micro-batch.

        of_forward: True when the forward of the micro-batch starts. This second seeding makes the forward independent
        of numbers that were drawn after the first one, as by an evaluation
        """
        self._forward_seeded = of_forward
        entropy = [self.seed, self.step, self.number, int(of_forward)]
        _device.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))

    def forward(self, run: Callable[[], Any]) -> Any:
        """Runs the module in training. Raises: ParallelError if it changes a buffer other than batch norm's."""
        if not self._forward_seeded:
            self.seed_draws(of_forward=True)
        before = self._buffer_versions()
        with deferred.into(self._records):
            result = run()
        changed = [name for name, version in self._buffer_versions().items() if before.get(name) != version]
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
        """Records what a micro-batch uses and its weight. Called before the backward that completes it.

        used: the parameters that this backward uses; weight: of the micro-batch, or None

        Raises: ParallelError if some micro-batches have weights and others do not.
        """
        del self.weights[self.number - self.own.start :]  # a backward that failed has left its weight
        if self.weights and (weight is None) != (self.weights[-1] is None):
            raise ParallelError(
                "micro-batches with and without a weight cannot be added up: use model.backward(loss, weight=...) for "
                "all of them, or for none"
            )
        self.weights.append(weight)
        self.used |= used

    def complete(self) -> None:
        """Called after the backward that completes a micro-batch. The last one ends the step, which is collective."""
        if self.last:
            self._update_statistics()
            self.step += 1
            self._begin_step()
        else:
            self.number += 1
        self._recorded = len(self._records)
        self.seed_draws()

    def state(self) -> dict[str, Any]:
        """JSON values for `load_state`, with the properties of this process on which the last bits depend."""
        return {"count": self.count, "seed": self.seed, "step": self.step, "machine": machine()}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continues from this state, on any number of ranks. Rank 0 warns if the last bits may differ on this machine.

        Raises: ParallelError if the state is None, or has another number of micro-batches; then nothing has changed.
        """
        if state is None or state["count"] != self.count:
            saved = None if state is None else state["count"]
            raise ParallelError(
                f"the state is of micro_batches={saved}, this model has {self.count}: gradients would be added in "
                "another order, so give the number that it was saved with"
            )
        seed = int(state["seed"])
        step = int(state["step"])
        saved = state["machine"]
        differences = [
            f"{name} {saved.get(name)}, here {value}" for name, value in machine().items() if saved.get(name) != value
        ]
        self.seed = seed
        self.step = step
        self._begin_step()
        if differences and self._comm.rank == 0:  # `machine()` is the same on all ranks: DataParallel has checked it
            warnings.warn(
                f"the state was saved with {'; '.join(differences)}: the last bits may differ from now on. The number "
                "of BLAS threads is that of the environment, OPENBLAS_NUM_THREADS, when Python starts",
                stacklevel=4,
            )
        self.seed_draws()

    def _begin_step(self) -> None:
        self.number = self.own[0]
        self.used = set()
        self.weights = []
        self._records.clear()
        self._recorded = 0

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """(id, version) of all buffers by name, except the counts of batch norm."""
        versions = {}
        for prefix, module in self._module.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                if not (isinstance(module, BatchNorm) and name == "num_batches_tracked"):
                    versions[f"{prefix}.{name}" if prefix else name] = id(tensor), tensor.version.count
        return versions

    def _norms(self) -> list[BatchNorm]:
        """The batch norm layers that keep running statistics, in the model's order."""
        return [m for m in self._module.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]

    def _uncount(self, records: RecordedStatistics) -> None:
        """Subtracts these records from the counts of the layers."""
        for norm in self._norms():
            norm.num_batches_tracked.sub_(sum(record[0] is norm.running_mean for record in records))

    def _update_statistics(self) -> None:
        """Updates running statistics by the micro-batches of all ranks, in order. Collective.

        Does nothing if no batch norm of the module keeps running statistics.
        """
        norms = self._norms()
        if not norms:
            return
        numbers = {id(norm.running_mean): number for number, norm in enumerate(norms)}
        # For each record in turn: number of the layer, number of values in a channel, means, variances.
        fields: list[Any] = [np.zeros(0)]
        for running_mean, mean, var, count in self._records:
            fields += [
                [numbers[id(running_mean)], count],
                to_device(mean, CPU).reshape(-1),
                to_device(var, CPU).reshape(-1),
            ]
        with error_context("the statistics of batch norm, at the end of a step"):
            rows = self._comm.all_gather(np.concatenate(fields))
        self._uncount(self._records)  # `count_batch` counts them again, in order
        start = 0
        while start < len(rows):
            number, count = rows[start : start + 2].astype(int).tolist()
            norm = norms[number]
            start += 2
            stop = start + 2 * norm.num_features
            dtype = np.promote_types(norm.running_mean.array.dtype, np.float32)
            mean, var = norm.running_mean.device.xp.asarray(rows[start:stop].reshape(2, -1).astype(dtype))
            running_stats_update(norm.running_mean, norm.running_var, norm.count_batch())(mean, var, count)
            start = stop


def machine() -> dict[str, Any]:
    """Properties of this process on which the last bits of results depend."""
    kernels = "none" if _native.library is None else Path(_native.library._name).name
    return {"BLAS threads": _native.blas_threads(), "kernels": kernels}
