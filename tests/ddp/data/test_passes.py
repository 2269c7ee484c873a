"""A pass that is left: whether it was a whole one follows from what was handed out, not from what was read ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from ddp.data.distributed_sampler import epoch_order


def numbers(batch: Any) -> list[int]:
    return [int(each) for each in batch[0]]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def taken(loader: DataLoader, batches: int) -> list[list[int]]:
    """So many batches of a pass that is then left, without being asked whether there are more."""
    return [numbers(batch) for _, batch in zip(range(batches), loader, strict=False)]


def ranks(length: int, batch: int, size: int, workers: int = 0, **options: Any) -> list[DataLoader]:
    dataset = TensorDataset(np.arange(length))
    samplers = [DistributedSampler(dataset, size, rank, **options) for rank in range(size)]
    return [DataLoader(dataset, batch, sampler=each, num_workers=workers) for each in samplers]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [8, 7, 5])
def test_all_batches_are_a_pass_on_every_rank(length: int, workers: int) -> None:
    loaders = ranks(length, 2, 2, workers, tail="exact")
    for epoch in range(3):
        together = [np.concatenate(taken(loader, len(loader))) for loader in loaders]
        order = epoch_order(length, 0, epoch).tolist()
        assert [each.tolist() for each in together] == [order[0::2], order[1::2]]
        assert [(loader.epoch, loader.sampler.epoch) for loader in loaders] == [(epoch + 1, epoch + 1)] * 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "batches"), [(16, 3), (15, 3), (13, 1), (16, 0)])
def test_a_pass_left_early_begins_again(length: int, batches: int, workers: int) -> None:
    (loader,) = ranks(length, 4, 1, workers)
    list(loader)
    order = epoch_order(length, 0, 1).tolist()
    for _ in range(2):
        iterator = iter(loader)
        assert flat(numbers(next(iterator)) for _ in range(batches)) == order[: 4 * batches]
        state = loader.state_dict()
        del iterator
        assert loader.state_dict() == state
        assert (loader.epoch, loader.sampler.epoch) == (1, 1)
    assert flat(map(numbers, loader)) == order


@pytest.mark.parametrize("workers", [0, 2])
def test_another_pass_while_the_whole_one_is_at_hand(workers: int) -> None:
    (loader,) = ranks(8, 4, 1, workers)
    iterator = iter(loader)
    for epoch in range(3):
        assert [numbers(next(iterator)) for _ in range(2)] == epoch_order(8, 0, epoch).reshape(2, 4).tolist()
        iterator = iter(loader)
    assert loader.epoch == 3


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_pass_that_another_has_followed_keeps_its_batches(kind: str) -> None:
    dataset = TensorDataset(np.arange(9))
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    given: dict[str, Any] = {"batch_size": 2, "sampler": sampler}
    if kind == "batch_sampler":
        given = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    loader = DataLoader(dataset, **given)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert [numbers(batch) for batch in first] == [[2, 3], [4, 5], [6, 7], [8]]
    assert loader.epoch == 0
    assert len(list(second)) == 5
    assert (loader.epoch, sampler.epoch) == (1, 1)


def test_a_state_after_a_whole_pass_is_the_beginning_of_the_next() -> None:
    (loader,) = ranks(6, 2, 1)
    taken(loader, 3)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    (other,) = ranks(6, 2, 1)
    other.load_state_dict(state)
    assert flat(map(numbers, other)) == epoch_order(6, 0, 1).tolist()
    assert other.epoch == 2


def test_the_rest_of_a_pass_at_another_number_of_ranks_is_a_whole_one() -> None:
    two = ranks(22, 2, 2, tail="exact")
    seen = flat(batch for loader in two for batch in taken(loader, 2))
    (one,) = ranks(22, 2, 1, tail="exact")
    one.load_state_dict(two[0].state_dict())
    seen += flat(taken(one, 7))
    assert (sorted(seen), one.epoch) == (list(range(22)), 1)


def test_what_set_epoch_says_holds() -> None:
    for batches in (1, 3):
        (loader,) = ranks(6, 2, 1)
        for _ in zip(range(batches), loader, strict=False):
            loader.sampler.set_epoch(5)
        assert loader.sampler.epoch == 5


class Halting:
    """A sampler whose end is found by asking, or which fails in its place."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.ends = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        if self.fails:
            raise OSError("the list has gone")
        self.ends += 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_without_a_length(workers: int) -> None:
    sampler = Halting(fails=False)
    loader = DataLoader(TensorDataset(np.arange(4)), 2, sampler=sampler, num_workers=workers)
    assert (taken(loader, 1), loader.epoch) == ([[0, 1]], 0)
    assert (taken(loader, 2), loader.epoch) == ([[0, 1], [2, 3]], 1)
    if not workers:
        assert sampler.ends == 1


def test_a_sampler_that_fails_has_not_come_to_its_end() -> None:
    loader = DataLoader(TensorDataset(np.arange(4)), 2, sampler=Halting(fails=True))
    assert (taken(loader, 2), loader.epoch) == ([[0, 1], [2, 3]], 0)
    with pytest.raises(OSError, match="the list has gone"):
        list(loader)
    assert loader.epoch == 0


class Failing(TensorDataset):
    """Fails as long as it shall."""

    fails = True

    def __getitem__(self, index: Any) -> Any:
        if self.fails:
            raise ValueError("not yet")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_failed_begins_again(workers: int) -> None:
    dataset = Failing(np.arange(3))
    sampler = DistributedSampler(dataset, 1, 0)
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=workers)  # one batch, and its end is read with it
    with pytest.raises(ValueError, match="not yet"):
        list(loader)
    assert (loader.epoch, sampler.epoch) == (0, 0)
    dataset.fails = False
    assert flat(map(numbers, loader)) == epoch_order(3, 0, 0).tolist()


class Noisy(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return [ddp.randint(0, 2**31, (1,)).item()]


def test_random_numbers_of_a_pass_are_its_own() -> None:
    loader = DataLoader(Noisy(np.arange(4)), 2)
    assert taken(loader, 2) != taken(loader, 2)
    assert taken(loader, 1) == taken(loader, 1)  # left early: the same pass


class Pairs:
    """A batch_sampler of somebody else's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        yield from (order[at : at + 2] for at in range(0, len(order), 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_that_reads_all_at_once(workers: int) -> None:
    dataset = TensorDataset(np.arange(6))
    loader = DataLoader(dataset, batch_sampler=Pairs(DistributedSampler(dataset, 1, 0)), num_workers=workers)
    for batches, epoch in ((1, 0), (3, 0), (2, 1), (3, 1), (1, 2)):
        assert flat(taken(loader, batches)) == epoch_order(6, 0, epoch).tolist()[: 2 * batches]
