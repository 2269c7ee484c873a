"""Decides which rank reads which samples: all ranks share one order, and one count of the samples that they have read.

The order follows from (seed, epoch) alone, even if a sampler draws it. The ranks take turns in it: rank r of W takes
every W-th sample from `cursor + r` on. So the samples that all ranks read in one step are a contiguous stretch of the
order, whatever W is, and another number of ranks can continue with exactly the next sample.

With `micro_batches=V` the V micro-batches of a step take turns in the order instead, and each rank reads consecutive
micro-batches. So the samples of a micro-batch do not depend on the number of ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import collectives
from ddp._tensor.dtypes import is_count
from ddp.data.fetching import mix_seed, restored_generators, seed_everything
from ddp.data.samplers import IndexSampler, Order, State, check_mapping, read_count
from ddp.errors import ArgumentError
from ddp.parallel.micro_batches import micro_batches_of

_TAILS = ("pad", "drop", "exact")


def count(left: int, rank: int, size: int, tail: str) -> int:
    """The number of samples that a rank takes, if `left` samples are left in the order.

    `[count(7, rank, 3, "exact") for rank in range(3)] == [3, 2, 2]`; "pad" gives [3, 3, 3], and "drop" [2, 2, 2]
    """
    if tail == "exact":
        return max(0, -(-(left - rank) // size))
    return left // size if tail == "drop" else -(-left // size)


class DistributedSampler(IndexSampler):
    """The indices of this rank, out of an order that all ranks share.

    dataset: anything with a length, the same on every rank; or a sampler with a length, e.g. a WeightedRandomSampler:
    the ranks share its indices, in its order, and `shuffle` is not used. The indices of a sampler of this package
    follow from (seed, epoch); its `generator` is not used. A sampler of another class is iterated once a pass on every
    rank, and must give the same indices on all. If it has `set_epoch`, `set_epoch(epoch)` is called first. It may draw
    from `ddp`, `numpy.random` or `random`: they are seeded from (seed, epoch) while it is iterated
    num_replicas, rank: the number of ranks, and this rank; None: those of `comm`
    shuffle: draw the order of each epoch anew, from (seed, epoch) alone; False: 0, 1, 2 and so on
    seed: the same on every rank
    drop_last: short for tail="drop"
    comm: the ranks; None: `collectives.init()`
    tail: what happens to the last samples if they cannot be divided evenly among the ranks. "pad" (as in PyTorch) gives
    every rank the same number by repeating samples from the beginning of the order; "drop" leaves the last samples out;
    "exact" does neither, so that ranks' counts differ by one at most. With "exact" the DataLoader hands an empty batch
    to a rank that has run out, and `model.backward(loss_sum, weight=len(batch))` gives the gradient of the exact mean.
    None: "drop" if drop_last, else "pad"
    micro_batches: the number of micro-batches of a step, on all ranks together; see `DataParallel`. A DataLoader's
    batch is one micro-batch, and `tail` is about micro-batches instead of ranks. None: one per rank

    Every `iter` is one epoch, and each epoch has its own order without a call of `set_epoch`. An epoch that is
    left early is begun again by the next `iter`, unless a state is loaded first. In a DataLoader the epoch is over when
    its last batch was handed out, whatever was read ahead.

    The position is `epoch` and a cursor: how many samples of the epoch's order all ranks together have read. A state
    that was saved at one number of ranks may be loaded at any other. With micro_batches the cursor advances by whole
    steps: a step of which this rank has read only a part is read again.

    `len()` is this rank's number of samples in a whole epoch, and `num_samples` the largest such number of any
    rank. With micro_batches, `num_samples` is the number of samples in the first micro-batches of all steps together.

    Raises: ArgumentError if num_replicas is not an integer of at least 1, if rank is not from 0 to num_replicas - 1, if
    micro_batches is not an integer or below the number of ranks, for a seed below 0, an unknown tail or one that
    contradicts drop_last, a dataset or sampler that has no length, and, when it is iterated, for a sampler that draws
    more or fewer indices than its length.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        comm: collectives.Communicator | None = None,
        tail: str | None = None,
        micro_batches: int | None = None,
    ) -> None:
        super().__init__()
        if tail is None:
            tail = "drop" if drop_last else "pad"
        if tail not in _TAILS or (drop_last and tail != "drop"):
            raise ArgumentError(f"tail should be one of {', '.join(_TAILS)}, is {tail!r}, with drop_last={drop_last}")
        if not hasattr(dataset, "__len__"):
            raise ArgumentError(f"DistributedSampler: a {type(dataset).__name__} has no length, so nothing to shard")
        if num_replicas is None or rank is None:
            comm = collectives.init() if comm is None else comm
            num_replicas = comm.size if num_replicas is None else num_replicas
            rank = comm.rank if rank is None else rank
        if not (is_count(num_replicas, 1) and is_count(rank) and rank < num_replicas):
            raise ArgumentError(
                f"num_replicas should be at least 1 and rank from 0 to below it, are {num_replicas!r} and {rank!r}"
            )
        self.dataset = dataset
        self.num_replicas = int(num_replicas)
        self.rank = int(rank)
        self._from_sampler = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
        if seed < 0:
            raise ArgumentError(f"seed should be a number of at least 0, is {seed}")
        self.shuffle = bool(shuffle) and not self._from_sampler
        self.seed = int(seed)
        self.tail = tail
        if micro_batches is not None and not is_count(micro_batches, 1):
            raise ArgumentError(f"micro_batches should be a number above 0, is {micro_batches!r}")
        self.micro_batches = micro_batches
        self.micro_batches_of_rank = (
            None if micro_batches is None else micro_batches_of(micro_batches, self.rank, self.num_replicas)
        )
        self._stride = micro_batches or self.num_replicas  # number of ranks or micro-batches that take turns
        self.epoch = 0
        self._counted = False  # whether `epoch` was set at the end of a pass, rather than by `set_epoch`

    @property
    def num_samples(self) -> int:
        """The largest number of samples that a rank reads in an epoch. Only with tail="exact" may ranks read fewer.

        With micro_batches: the number of samples in the first micro-batches of all steps together.
        """
        return self.most_after({"cursor": 0})

    @property
    def total_size(self) -> int:
        """The number of samples that all ranks together read in a whole epoch."""
        return len(self.dataset) if self.tail == "exact" else self.num_samples * self._stride

    def __len__(self) -> int:
        numbers = [self.rank] if self.micro_batches_of_rank is None else self.micro_batches_of_rank
        return sum(count(len(self.dataset), number, self._stride, self.tail) for number in numbers)

    def most_after(self, state: State) -> int:
        """The largest number of samples that a rank has left in the epoch of `state`, from its cursor on.

        With micro_batches: the number of samples in the first micro-batches of all steps that are left.
        """
        return count(len(self.dataset) - state["cursor"], 0, self._stride, self.tail)

    def __iter__(self) -> Iterator[int]:
        return (
            super().__iter__()
            if self.micro_batches_of_rank is None
            else itertools.chain.from_iterable(self.lists(1, False))
        )

    def lists(self, batch_size: int, drop_last: bool) -> Iterator[list[int]]:
        """The indices of this rank's micro-batches of `batch_size` samples, step after step.

        drop_last: leave out a step in which no micro-batch is full; in other steps shorter micro-batches become empty
        """
        assert self.micro_batches_of_rank is not None
        return self._lists(self._begin(), self.micro_batches_of_rank, batch_size, drop_last)

    def _lists(self, began: State, numbers: range, batch_size: int, drop_last: bool) -> Iterator[list[int]]:
        order = self._order(began)
        cursor = began["cursor"]
        while self.most_after({"cursor": cursor}) >= (batch_size if drop_last else 1):
            for number in numbers:
                left = count(len(order) - cursor, number, self._stride, self.tail)
                rows = 0 if drop_last and left < batch_size else min(left, batch_size)
                if number == numbers[-1] and self._began is began:
                    self._cursor = min(cursor + batch_size * self._stride, self._span())
                yield order[(cursor + number + self._stride * np.arange(rows)) % len(order)].tolist()
            cursor += batch_size * self._stride
        if self._began is began:
            self._cursor = None
            self._end(began)

    def batches_of(self, batches: int, all_ranks: bool) -> int:
        """Converts a number of batches of this rank to that of all ranks together, or back. Only whole steps count.

        all_ranks: True: converts this rank's number to that of all ranks; False: converts back
        """
        if self.micro_batches_of_rank is None:
            return batches
        own = len(self.micro_batches_of_rank)
        total = self._stride
        return batches // own * total if all_ranks else batches // total * own

    def state_after(self, state: State, count: int) -> State:
        """The position `count` indices after `state` in the same pass.

        With micro_batches, `count` must cover whole steps.
        """
        return super().state_after(
            state, count if self.micro_batches_of_rank is None else count // len(self.micro_batches_of_rank)
        )

    def number_of(self, batch: int) -> int:
        """Converts the number of a batch of this rank to its number among all ranks' micro-batches of the epoch."""
        assert self.micro_batches_of_rank is not None
        step, index = divmod(batch, len(self.micro_batches_of_rank))
        return step * self._stride + self.micro_batches_of_rank[index]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next `iter`. If a state of the same epoch was loaded, `iter` still continues from it.

        A call is not needed, since the sampler counts epochs. A loop with the calls that PyTorch needs works, too.

        Raises: ArgumentError for an epoch below 0.
        """
        if epoch < 0:
            raise ArgumentError(f"epoch should be a number of at least 0, is {epoch}")
        if self._loaded is not None and self._loaded["epoch"] != epoch:
            self._loaded = None
        self.epoch = int(epoch)  # int: json cannot write NumPy's integers
        self._counted = False

    def begin_again(self) -> None:
        """Makes the next `iter` repeat the epoch of the last pass, even if a loader has read ahead to the pass's end.

        Changes nothing if `set_epoch` or a loaded state has set the epoch since. A DataLoader calls this for a pass
        that was left early.
        """
        if self._counted and self._loaded is None:
            self.epoch = self._began["epoch"]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter` continue at this position, whatever number of ranks saved it.

        Raises: StateDictError if the state is not of a DistributedSampler, or if the length of its dataset, its seed,
        its `shuffle` or (if this sampler has micro_batches) its number of micro-batches differs. A sampler
        without micro_batches can load the state of one with micro_batches: the cursor counts the samples read so far.
        """
        check_mapping(self, state_dict)
        epoch = read_count(self, state_dict, "epoch", 2**63 - 1)
        super().load_state_dict(state_dict)
        self.epoch = epoch

    def _fixed(self) -> State:
        fixed = {"seed": self.seed, "length": len(self.dataset), "shuffle": self.shuffle}
        return fixed if self.micro_batches is None else {**fixed, "micro_batches": self.micro_batches}

    def _next(self, draw: bool) -> State:
        return {"epoch": self.epoch, "cursor": 0, **self._fixed()}

    def _indices(self, began: State) -> tuple[Order]:
        length = len(self.dataset)
        cursor = began["cursor"]
        order = self._order(began)
        count_here = count(length - cursor, self.rank, self.num_replicas, self.tail)
        places = cursor + self.rank + self.num_replicas * np.arange(count_here)
        return (order[places % length] if length else order,)  # modulo: for padding, the order begins again

    def _order(self, began: State) -> Order:
        """The order of all ranks in the epoch of a pass."""
        length = len(self.dataset)
        if self._from_sampler:
            return draw(self.dataset, self.seed, began["epoch"])
        return epoch_order(length, self.seed, began["epoch"]) if self.shuffle else np.arange(length)

    def _span(self) -> int:
        return len(self.dataset)

    def _end(self, began: State) -> None:
        if self.epoch == began["epoch"]:  # otherwise set_epoch was called during the pass
            self.epoch += 1
            self._counted = True


def epoch_order(length: int, seed: int, epoch: int) -> Order:
    """The order of an epoch: (length) int64, the same on every rank."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def draw(sampler: Any, seed: int, epoch: int) -> Order:
    """The indices that a sampler draws in an epoch: (len(sampler)). The caller's random numbers are not affected.

    Raises: ArgumentError if it draws more or fewer indices than its length.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(sampler, IndexSampler):  # gets this seed, instead of one from its own generator
        sampler._loaded = {**sampler._next(draw=False), "seed": [seed, epoch]}
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    with restored_generators():
        seed_everything(mix_seed(seed, epoch))
        try:
            order = np.fromiter(sampler, object)
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
    if len(order) != len(sampler):
        name = type(sampler).__name__
        raise ArgumentError(f"DistributedSampler: the {name} drew {len(order)} indices, its len() is {len(sampler)}")
    return order
