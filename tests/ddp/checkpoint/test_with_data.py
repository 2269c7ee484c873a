"""The loop with the DataLoader itself: in the middle of an epoch, at another number of ranks, with its own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from ddp import nn
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from ddp.errors import ArgumentError
from ddp.optim import SGD
from tests.ddp.checkpoint.training import Interrupted, assert_same, everything, interrupted, net

ROWS, BATCH = 22, 8  # of all ranks; the last batch of a pass has 6


class Noisy(Dataset[Any]):
    """Samples that are augmented with random numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        x = np.random.default_rng(index).standard_normal(6)
        noise = ddp.randn(6, dtype=ddp.float64).numpy() * 0.1
        return index, x + noise, int(np.abs(x).argmax() % 3)


def training(folder: Path, **options: Any) -> Callable[..., Any]:
    def train(comm: collectives.Communicator, end: int | None) -> Any:
        model = ddp.DataParallel(net(dropout=0.2, dtype=ddp.float64), comm)
        ddp.manual_seed(50 + comm.rank)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = Noisy()
        sampler = DistributedSampler(data, comm=comm, tail="exact")
        loader = DataLoader(data, batch_size=BATCH // comm.size, sampler=sampler, **options)
        losses: dict[int, float] = {}
        seen: list[tuple[int, int]] = []
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm, every=1) as ckpt:
            for ids, x, y in ckpt.resume(loader, epochs=3):
                if ckpt.step == end:
                    raise Interrupted((losses, seen))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                model.backward(loss, weight=len(ids))
                optimizer.step()
                losses[ckpt.step] = loss.item()
                seen += [(loader.epoch, int(each)) for each in ids]
        return losses, seen, everything(model, [optimizer])

    return train


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["here", "in a worker"])
def test_it_goes_on_with_the_same_numbers(options: dict[str, Any], folder: Path) -> None:
    [whole] = interrupted(training(folder / "whole"), [None], 2)
    ends = [2, 3, 7, None] if not options else [4, None]
    parts = interrupted(training(folder / "parts", **options), ends, 2)
    for rank, (losses, seen, state) in enumerate(whole):
        got: dict[int, float] = {}
        for part in parts:
            got.update(part[rank][0])
        assert got == losses
        assert [each for part in parts for each in part[rank][1]] == seen
        assert_same(parts[-1][rank][2], state)


def test_another_number_of_ranks_has_every_sample_once(folder: Path) -> None:
    parts = interrupted(training(folder), [2, 4, None], [2, 1, 4])
    seen = Counter(each for part in parts for rank in part for each in rank[1])
    assert seen == Counter((epoch, row) for epoch in range(3) for row in range(ROWS))


def test_a_loop_that_is_left_goes_on_behind_its_last_batch(folder: Path) -> None:
    def run(end: int) -> tuple[list[int], int]:
        data = Noisy()
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
        seen: list[int] = []
        with Checkpointer(folder, user={}) as ckpt:
            for _ in range(2):
                for ids, _, _ in ckpt.resume(loader, epochs=2):
                    seen += map(int, ids)
                    if ckpt.step + 1 == end:
                        break
        return seen, ckpt.step

    first, step = run(4)
    assert step == 12  # six batches a pass: the second loop went on behind the break, to the end
    assert Counter(first) == Counter([*range(ROWS)] * 2)


def test_a_save_in_the_body_is_of_the_step_that_it_makes(folder: Path) -> None:
    def run(end: int | None) -> tuple[list[int], list[int]]:
        data = Noisy()
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
        seen, steps = [], []
        with Checkpointer(folder, user={}) as ckpt:
            for ids, _, _ in ckpt.resume(loader, epochs=1):
                seen += map(int, ids)
                steps.append(ckpt.step)
                if ckpt.step == end:
                    ckpt.save()
                    break
        return seen, steps

    first, steps = run(2)
    assert steps == [0, 1, 2]
    rest, steps = run(None)
    assert steps == [3, 4, 5]
    assert sorted(first + rest) == list(range(ROWS))


Draws = list[tuple[int, list[int], float]]


def drawing(folder: Path, epochs: int, *, shuffle: bool = True, end: int | None = None) -> Draws:
    """Batches, and a number that is drawn in the body of each. end: break in that step"""
    ddp.manual_seed(3)
    data = TensorDataset(np.arange(8))
    order: dict[str, Any] = {"shuffle": True} if shuffle else {"sampler": DistributedSampler(data, 1, 0)}
    loader = DataLoader(data, 4, **order)
    results = []
    with Checkpointer(folder, user={}) as ckpt:
        for (ids,) in ckpt.resume(loader, epochs):
            results.append((ckpt.step, ids.tolist(), ddp.rand(1).item()))
            if ckpt.step == end:
                break
        if end is not None:
            ckpt.save()
    return results


@pytest.mark.parametrize(("end", "shuffle"), [(0, True), (1, True), (1, False)])
def test_a_save_behind_a_loop_that_was_left_goes_on_with_the_same_numbers(
    end: int, shuffle: bool, folder: Path
) -> None:
    whole = drawing(folder / "whole", 3, shuffle=shuffle)
    first = drawing(folder / "parts", 2, shuffle=shuffle, end=end)
    rest = [each for epochs in (2, 3) for each in drawing(folder / "parts", epochs, shuffle=shuffle)]
    assert first + rest == whole  # more epochs go on, too


def test_micro_batches_want_the_data_parallel_not_the_module_inside(tmp_path: Path) -> None:
    samples = ddp.data.TensorDataset(ddp.ones(8, 6))
    loader = ddp.data.DataLoader(samples, 2, sampler=ddp.data.DistributedSampler(samples, micro_batches=2))
    model = ddp.DataParallel(net(), micro_batches=2)
    ckpt = Checkpointer(tmp_path, model=model.module)
    with pytest.raises(ArgumentError, match=r"micro_batches=2, .* should be the DataParallel"):
        next(iter(ckpt.resume(loader, epochs=1)))
    ckpt.close()
    model.close()
