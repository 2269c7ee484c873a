"""A pass that is left: whether it was a whole one follows from what was handed out, not from what was read ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from ddp.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from ddp.data.distributed_sampler import epoch_order
from tests.ddp.data.samples import Drawn, Failing


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
    return [DataLoader(dataset, batch, sampler=sampler, num_workers=workers) for sampler in samplers]


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


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_pass_that_another_has_followed_keeps_its_batches(kind: str) -> None:
    dataset = TensorDataset(np.arange(9))
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    if kind == "sampler":
        loader = DataLoader(dataset, 2, sampler=sampler)
    else:
        loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert [numbers(batch) for batch in first] == [[2, 3], [4, 5], [6, 7], [8]]
    assert loader.epoch == 0
    assert len(list(second)) == 5
    assert (loader.epoch, sampler.epoch) == (1, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_failed_begins_again(workers: int) -> None:
    dataset = Failing("raise")
    sampler = DistributedSampler(dataset, 1, 0)
    loader = DataLoader(dataset, 17, sampler=sampler, num_workers=workers)  # one batch, and its end is read with it
    with pytest.raises(ValueError, match="rotten"):
        list(loader)
    assert (loader.epoch, sampler.epoch) == (0, 0)
    dataset.fails = False
    assert [batch.tolist() for batch in loader] == [epoch_order(16, 0, 0).tolist()]


def test_a_sampler_that_fails_has_not_come_to_its_end() -> None:
    class Halting:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise OSError("the list has gone")

    loader = DataLoader(TensorDataset(np.arange(4)), 2, sampler=Halting())
    assert (taken(loader, 2), loader.epoch) == ([[0, 1], [2, 3]], 0)
    with pytest.raises(OSError, match="the list has gone"):
        list(loader)
    assert loader.epoch == 0


def test_random_numbers_of_a_pass_are_its_own() -> None:
    loader = DataLoader(Drawn(everywhere=False), 6)

    def drawn(batches: int) -> list[Any]:
        return [batch.tolist() for _, batch in zip(range(batches), loader, strict=False)]

    assert drawn(2) != drawn(2)
    assert drawn(1) == drawn(1)  # left early: the same pass
