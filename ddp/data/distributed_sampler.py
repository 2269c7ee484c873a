"""Which rank reads which samples: one order for all ranks, and one count of how far they have come in it together.

The order, also one that a sampler draws, follows from (seed, epoch) alone, and the ranks take turns in it: rank r of W
takes every W-th sample from `cursor + r` on. So what all ranks read in one step is a contiguous stretch of the order
whatever W is, and another number of ranks goes on with exactly the next sample.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

import collectives
from ddp.data.fetching import mix_seed, restored_generators, seed_everything
from ddp.data.samplers import IndexSampler, Order, State, check_count, is_count
from ddp.errors import ArgumentError

_TAILS = ("pad", "drop", "exact")


def count(left: int, rank: int, size: int, tail: str) -> int:
    """How many of the `left` samples up to the end of the order a rank takes.

    `[count(7, rank, 3, "exact") for rank in range(3)] == [3, 2, 2]`, "pad" gives 3 to each, "drop" 2
    """
    if tail == "exact":
        return max(0, -(-(left - rank) // size))
    return left // size if tail == "drop" else -(-left // size)


class DistributedSampler(IndexSampler):
    """The samples of this rank, of an order that all ranks share.

    dataset: anything with a length, the same on every rank; or a sampler with a length, e.g. a WeightedRandomSampler,
    of which the ranks share one draw, in its order. What a sampler of this package draws follows from (seed, epoch):
    its `generator`, and `shuffle`, are not used. One of another class is iterated once an epoch on every rank, and must
    give the same there: it may draw from `ddp`, `numpy.random` or `random`, which (seed, epoch) seeds meanwhile, or
    follow from `set_epoch(epoch)`, which is called if it exists
    num_replicas, rank: how many ranks there are and which this is; None: those of `comm`
    shuffle: draw the order of each epoch anew, from (seed, epoch) alone; False: 0, 1, 2 and so on
    seed: the same on every rank
    drop_last: short for tail="drop"
    comm: the ranks; None: `collectives.init()`
    tail: what becomes of the last samples where the ranks do not divide them. "pad" (as in PyTorch) gives every rank
    the same number by repeating samples from the beginning of the order; "drop" leaves the last ones out; "exact" does
    neither, so that ranks' counts differ by one at most. The DataLoader then hands a rank that has run out an empty
    batch, and `model.backward(loss_sum, weight=len(batch))` is the exact mean. None: "drop" if drop_last, else "pad"

    Every `iter` is one epoch, and the next one has an order of its own: `set_epoch` is not needed. An epoch that is
    left early is begun again by the next `iter`, unless a state is loaded first. In a DataLoader the epoch is over when
    its last batch was handed out, whatever was read ahead.

    The position is `epoch` and a cursor: how many samples of the epoch's order all ranks together have read. A state
    that was saved at one number of ranks may be loaded at any other.

    `len()` is this rank's number of samples in a whole epoch, and `num_samples` the largest of all ranks.

    Raises: ArgumentError if num_replicas is not a count of at least 1 or rank not one below it, for a seed below 0, a
    tail that is none of these, a dataset or sampler that has no length, or a sampler that draws another number.
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
        self.dataset, self.num_replicas, self.rank = dataset, int(num_replicas), int(rank)
        self._from_sampler = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
        if seed < 0:
            raise ArgumentError(f"seed should be a number of at least 0, is {seed}")
        self.shuffle, self.seed, self.tail = bool(shuffle) and not self._from_sampler, int(seed), tail
        self._stride = self.num_replicas
        self.epoch = 0
        self._counted = False  # the end of a pass has set `epoch`, and not `set_epoch`

    @property
    def num_samples(self) -> int:
        """The most samples that a rank reads in a whole epoch; all ranks as many, unless tail is "exact"."""
        return count(len(self.dataset), 0, self.num_replicas, self.tail)

    @property
    def total_size(self) -> int:
        """Samples of all ranks in a whole epoch."""
        return len(self.dataset) if self.tail == "exact" else self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return count(len(self.dataset), self.rank, self.num_replicas, self.tail)

    def most_after(self, state: State) -> int:
        """The most samples that a rank has left after `state` in its epoch: with tail="exact" others may have fewer."""
        return count(len(self.dataset) - state["cursor"], 0, self.num_replicas, self.tail)

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch; where a state of the same epoch was loaded, it goes on in the middle of it.

        Not needed, as epochs are counted here; a loop that calls it as PyTorch's must works as it does there.

        Raises: ArgumentError for one below 0.
        """
        if epoch < 0:
            raise ArgumentError(f"epoch should be a number of at least 0, is {epoch}")
        if self._loaded is not None and self._loaded["epoch"] != epoch:
            self._loaded = None
        self.epoch, self._counted = int(epoch), False  # NumPy's numbers are no JSON

    def begin_again(self) -> None:
        """The next `iter` is the epoch of the pass last begun, even if a reader ahead has come to its end.

        Unless it was said by `set_epoch`, or by a state, which it is. A DataLoader calls this for a pass left early.
        """
        if self._counted and self._loaded is None:
            self.epoch = self._began["epoch"]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on at this position, whatever the number of ranks was that saved it.

        Raises: StateDictError if the state is of a dataset of another length, of another order, or none at all.
        """
        epoch = check_count(self, state_dict, "epoch", 2**63 - 1)
        super().load_state_dict(state_dict)
        self.epoch = epoch

    def _fixed(self) -> State:
        return {"seed": self.seed, "length": len(self.dataset), "shuffle": self.shuffle}

    def _next(self, draw: bool) -> State:
        return {"epoch": self.epoch, "cursor": 0, **self._fixed()}

    def _indices(self, began: State) -> tuple[Order]:
        length, cursor = len(self.dataset), began["cursor"]
        if self._from_sampler:
            order = draw(self.dataset, self.seed, began["epoch"])
        else:
            order = epoch_order(length, self.seed, began["epoch"]) if self.shuffle else np.arange(length)
        mine = count(length - cursor, self.rank, self.num_replicas, self.tail)
        places = cursor + self.rank + self.num_replicas * np.arange(mine)
        return (order[places % length] if length else order,)  # past the end: from the beginning, to pad

    def _span(self) -> int:
        return len(self.dataset)

    def _end(self, began: State) -> None:
        if self.epoch == began["epoch"]:  # else set_epoch was called meanwhile
            self.epoch += 1
            self._counted = True


def epoch_order(length: int, seed: int, epoch: int) -> Order:
    """The order of an epoch: (length) int64, the same wherever it is drawn."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def draw(sampler: Any, seed: int, epoch: int) -> Order:
    """What a sampler draws in an epoch: (len(sampler)). The random number generators of the caller stay as they are.

    Raises: ArgumentError if it draws another number.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(sampler, IndexSampler):  # it would draw a seed from its own generator
        sampler._loaded = {**sampler._next(draw=False), "seed": [seed, epoch]}
    numpy_state, python_state = np.random.get_state(), random.getstate()
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
