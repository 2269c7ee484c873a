"""The loop with the DataLoader itself: in the middle of an epoch, at another number of ranks, with its own numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.checkpoint import Checkpointer
from ddp.data import DataLoader, DistributedSampler, TensorDataset
from ddp.errors import ArgumentError
from tests.ddp.checkpoint.training import SAMPLES, assert_same, interrupted, net, training_on_samples
from tests.ddp.data.samples import Augmented


@pytest.mark.parametrize(
    ("ends", "options"),
    [([2, 3, 7, None], {}), ([4, None], {"num_workers": 1})],
    ids=["here", "in a worker"],
)
def test_it_goes_on_with_the_same_numbers(ends: list[int | None], options: Any, folder: Path) -> None:
    random = {"noise": 0.1, "dropout": 0.2}
    [whole] = interrupted(training_on_samples(folder / "whole", **random), [None], 2)
    parts = interrupted(training_on_samples(folder / "parts", **random, **options), ends, 2)
    for rank, (losses, seen, state) in enumerate(whole):
        got = {}
        for part in parts:
            got.update(part[rank][0])
        assert got == losses
        assert [each for part in parts for each in part[rank][1]] == seen
        assert_same(parts[-1][rank][2], state)


def bare_loop(folder: Path, loops: int = 1, *, end: int = -1, save: bool = False) -> tuple[list[int], int]:
    """The samples that loops of as many passes had, and the step after them. end: the first breaks after that step"""
    data = Augmented(SAMPLES)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    seen = []
    with Checkpointer(folder, user={}) as ckpt:
        for _ in range(loops):
            for ids, _, _ in ckpt.resume(loader, epochs=loops):
                seen += map(int, ids)
                if ckpt.step == end:
                    if save:
                        ckpt.save()
                    break
    return seen, ckpt.step


def test_a_loop_that_is_left_goes_on_behind_its_last_batch(folder: Path) -> None:
    seen, step = bare_loop(folder, 2, end=3)
    assert step == 12  # six batches a pass: the second loop went on behind the break, to the end
    assert Counter(seen) == Counter([*range(SAMPLES)] * 2)


def test_a_save_in_the_body_is_of_the_step_that_it_makes(folder: Path) -> None:
    first, _ = bare_loop(folder, end=2, save=True)
    rest, step = bare_loop(folder)
    assert (len(first), step) == (12, 6)
    assert sorted(first + rest) == list(range(SAMPLES))


def drawing(folder: Path, epochs: int, *, shuffle: bool = True, end: int | None = None) -> list[Any]:
    """Batches, and a number that is drawn in the body of each. end: break in that step"""
    ddp.manual_seed(3)
    data = TensorDataset(np.arange(8))
    loader = DataLoader(data, 4, shuffle=shuffle, sampler=None if shuffle else DistributedSampler(data, 1, 0))
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
