"""Whoever fetches them, the batches are the same: contents, order, random numbers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

import ddp
from collectives.flight.reader import FlightReader
from collectives.flight.recorder import process_recorder
from ddp.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset
from ddp.data.dataloader import count_samples
from ddp.errors import ShapeError
from tests.ddp.data import samples
from tests.ddp.data.samples import Drawn, Mixed, Squares, Stream, Whoami


def values(batch: Any) -> Any:
    """A batch as something that can be compared."""
    if isinstance(batch, ddp.Tensor | np.ndarray):
        return type(batch).__name__, str(batch.dtype), batch.tolist()
    if isinstance(batch, dict):
        return {key: values(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch).__name__, [values(each) for each in batch]
    return batch


def batches(dataset: Any, workers: int, **options: Any) -> list[Any]:
    ddp.manual_seed(3)
    return [values(batch) for batch in DataLoader(dataset, num_workers=workers, **options)]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Squares(10), {"batch_size": 3}),
        (Squares(10), {"batch_size": 3, "drop_last": True, "shuffle": True}),
        (Squares(5), {"batch_size": 2, "collate_fn": samples.plain}),
        (Squares(5), {"batch_size": 2, "collate_fn": samples.long_text}),
        (Squares(9), {"batch_sampler": [[1, 2], [8], [0, 0, 0]]}),
        (Squares(9), {"batch_size": 2, "sampler": RandomSampler(range(9), replacement=True)}),
        (Squares(0), {"batch_size": 2}),
        (Mixed(), {"batch_size": 2}),
        (Mixed(), {"batch_size": None}),
        (Subset(TensorDataset(ddp.arange(14).reshape(7, 2)), [6, 0, 2]), {"batch_size": 2, "shuffle": True}),
        (Drawn(everywhere=False), {"batch_size": 2}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else " ".join(map(str, value)),
)
def test_the_same_with_any_number_of_workers(dataset: Any, options: Any) -> None:
    expected = batches(dataset, 0, **options)
    assert batches(dataset, 2, **options) == expected


@pytest.mark.parametrize("indices", [np.array([[1], [0]]), np.array([1, 0], object)], ids=["2-d", "objects"])
def test_a_subset_by_any_indices_that_its_dataset_takes(indices: Any) -> None:
    (batch,) = DataLoader(Subset(TensorDataset(np.arange(0, 50, 10)), indices), 2)
    assert batch[0].flatten().tolist() == [10, 0]


def test_a_mask_gives_no_samples() -> None:
    with pytest.raises(ShapeError):
        list(DataLoader(Subset(TensorDataset(np.arange(5)), np.arange(5) % 2 == 0), 2))


def test_a_batch_can_be_written_to_and_kept() -> None:
    kept = []
    for x, _ in DataLoader(Squares(400), batch_size=2, num_workers=2):
        x += 1
        kept.append(x)
    assert ddp.cat(kept)[:, 0].tolist() == [*range(1, 401)]


def test_random_numbers_belong_to_the_batch() -> None:
    alone, one, two = (batches(Drawn(everywhere=True), workers, batch_size=2) for workers in (0, 1, 2))
    assert one == two
    assert len({str(batch) for batch in one}) == 6
    assert [batch[1][0] for batch in alone] == [batch[1][0] for batch in one]


def test_random_numbers_differ_from_pass_to_pass_and_from_rank_to_rank() -> None:
    def passes(workers: int, rank: int) -> list[Any]:
        ddp.manual_seed(3)
        sampler = DistributedSampler(range(12), 2, rank, shuffle=False)
        loader = DataLoader(Drawn(everywhere=False), 2, sampler=sampler, num_workers=workers)
        return [[values(batch) for batch in loader] for _ in range(2)]

    for rank in (0, 1):
        assert passes(0, rank) == passes(2, rank)
    results = [str(batch) for rank in (0, 1) for each in passes(0, rank) for batch in each]
    assert len(set(results)) == len(results) == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_leaves_the_users_random_numbers_alone(workers: int) -> None:
    ddp.manual_seed(1)
    loader = DataLoader(Drawn(everywhere=False), batch_size=2, num_workers=workers)
    iterator = iter(loader)  # here the loader draws its own seed
    between = [ddp.rand(1).item() for _ in iterator]
    ddp.manual_seed(1)
    iter(DataLoader(Drawn(everywhere=False), batch_size=2))
    assert between == [ddp.rand(1).item() for _ in between]


def test_workers_take_turns_and_know_who_they_are() -> None:
    loader = DataLoader(Whoami(), batch_size=2, num_workers=2, worker_init_fn=samples.mark)
    indices, pids, workers, counts, marks = np.concatenate([batch.numpy() for batch in loader]).T.tolist()
    assert indices == list(range(8))
    assert workers == [0, 0, 1, 1] * 2
    assert counts == [2] * 8
    assert marks == [10, 10, 11, 11] * 2
    assert len(set(pids)) == 2
    assert next(iter(DataLoader(Whoami())))[0, 2].item() == -1
    assert Whoami.marks == 0


def pids(loader: DataLoader) -> set[int]:
    return {pid for batch in loader for pid in batch[:, 1].tolist()}


def test_persistent_workers_stay() -> None:
    loader = DataLoader(Whoami(), batch_size=2, num_workers=2, persistent_workers=True)
    first = pids(loader)
    next(iter(loader))  # left early
    rows = [batch[:, 0].tolist() for batch in loader]
    assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pids(loader) == first
    fresh = DataLoader(Whoami(), batch_size=2, num_workers=2)
    assert pids(fresh) != pids(fresh)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_which_drop_last_leaves_nothing_is_told(workers: int) -> None:
    loader = DataLoader(Stream(2), batch_size=3, num_workers=workers, drop_last=True)
    with pytest.warns(UserWarning, match="had no batch: .* gave each process fewer than batch_size=3 ") as told:
        assert list(loader) == []
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(Stream(7), batch_size=3, num_workers=workers, drop_last=True))) == 2
        assert list(DataLoader(Stream(0), batch_size=3, num_workers=workers)) == []


@pytest.mark.parametrize("dataset", [samples.Epoch, samples.EpochStream])
def test_what_is_set_on_the_dataset_between_passes_reaches_persistent_workers(dataset: Any) -> None:
    data = dataset()
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)

    def rows() -> list[Any]:
        return [row.tolist() for row in loader]

    first = rows()
    (_, pid), _ = first
    assert first == rows() == [[0, pid]] * 2
    data.set_epoch(1)
    changed = rows()
    assert [epoch for epoch, _ in changed] == [1, 1]
    data.handle = threading.Lock()  # which cannot be pickled, as a file that is opened when a sample is read here
    with pytest.warns(UserWarning, match="cannot be sent .* persistent workers keep the copy") as told:
        assert rows() == changed
    assert told[0].filename == __file__


def test_two_iterations_at_once() -> None:
    loader = DataLoader(Squares(6), batch_size=2, num_workers=1)
    seen = [(a[1][0].item(), b[1][0].item()) for a in loader for b in loader]
    assert seen == [(a, b) for a in (0, 2, 4) for b in (0, 2, 4)]
    persistent = DataLoader(Squares(6), batch_size=2, num_workers=1, persistent_workers=True)
    first, second = iter(persistent), iter(persistent)
    with pytest.raises(ddp.errors.ArgumentError, match="another iteration"):
        next(first)
    assert len(list(second)) == 3


def test_whole_batches_are_taken_at_once() -> None:
    class Whole(Squares):
        answers = 2

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.reads.append(list(indices))
            return [self[index] for index in indices][: self.answers]

    dataset = Whole(4)
    assert len(list(DataLoader(dataset, batch_size=2))) == 2
    assert dataset.reads == [[0, 1], 0, 1, [2, 3], 2, 3]
    dataset.answers = 0
    with pytest.raises(ddp.errors.ArgumentError, match=r"Whole\.__getitems__: asked for 2 samples, it returned 0"):
        next(iter(DataLoader(dataset, batch_size=2)))


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"batch_size": 3}, 4),
        ({"batch_size": 3, "drop_last": True}, 3),
        ({"batch_size": None}, 10),
        ({"batch_sampler": BatchSampler(range(7), 2, False)}, 4),
    ],
)
def test_lengths(options: Any, length: int) -> None:
    assert len(DataLoader(Squares(10), **options)) == length
    with pytest.raises(TypeError):
        len(DataLoader(Stream(10)))


@pytest.mark.parametrize("make", [np.arange, ddp.arange])
def test_a_subset_of_what_is_not_there_is_no_other_sample(make: Any) -> None:
    whole = TensorDataset(make(10))
    for part in (Subset(whole, [1, 11]), Subset(whole, [1, -11]), Subset(Subset(whole, [4, 1]), [1, 2])):
        with pytest.raises(IndexError):
            list(DataLoader(part, batch_size=2))
        [(sample,)] = DataLoader(part, sampler=[0])
        assert sample.tolist() == [1]
    [(batch,)] = DataLoader(Subset(Subset(whole, [4, -1]), [-1, 0]), 2)
    assert batch.tolist() == [9, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
        ({"sampler": [1], "shuffle": True}, "shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler"),
        ({"num_workers": -1}, "num_workers"),
        ({"timeout": 1}, "timeout"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor"),
        ({"persistent_workers": True}, "persistent_workers"),
        ({"num_workers": 1, "timeout": float("nan")}, "timeout"),
        ({"multiprocessing_context": "fork"}, "MPI, CUDA"),
        ({"multiprocessing_context": "thread"}, "thread"),
        ({"dataset": Stream(4), "shuffle": True}, "IterableDataset"),
        ({"dataset": Stream(4), "batch_sampler": [[1]]}, "IterableDataset"),
        ({"dataset": iter(())}, "a stream such as tuple_iterator goes into an IterableDataset"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_excludes_each_other_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ddp.errors.ArgumentError, match=message):
        DataLoader(**{"dataset": Squares(4), **options})


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((3, 5)), 3),
        ((("a", "b"), ddp.zeros(2, 4)), 2),
        ({"name": ["a"], "x": {"y": np.zeros(4)}}, 4),
        ((np.zeros(5), np.zeros(())), 5),
        (["a", 1.0], 1),
        ([], 1),
    ],
)
def test_how_many_samples_a_batch_has(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


def test_samples_that_are_handed_out_are_counted() -> None:
    def counted() -> Any:
        return FlightReader(process_recorder().peek).newest(0)["samples"]

    before = counted()
    next(iter(DataLoader(np.zeros((7, 2)), batch_size=3)))
    assert counted() - before == 3
    list(DataLoader(np.zeros((7, 2)), batch_size=None))
    assert counted() - before == 10
