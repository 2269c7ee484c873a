"""Killed anywhere, a loader goes on with the next batch: of the same pass, in the same order, with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from ddp.errors import StateDictError
from tests.ddp.data.samples import Counted, Numbered, Squares, Stream


class Foreign:
    """A sampler that keeps no position."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11, -1, -1))

    def __len__(self) -> int:
        return 12


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "sequential": lambda: {"sampler": SequentialSampler(range(12))},
    "generator": lambda: {"sampler": RandomSampler(range(12), generator=ddp.Generator().manual_seed(4))},
    "weighted": lambda: {"sampler": WeightedRandomSampler(np.arange(12), 12)},
    "distributed": lambda: {"sampler": DistributedSampler(range(12), 1, 0)},
    "foreign": lambda: {"sampler": Foreign()},
    "lists": lambda: {"batch_sampler": [[2 * k, 2 * k + 1] for k in range(6)], "batch_size": 1},
    "no batches": lambda: {"sampler": RandomSampler(range(12), num_samples=6), "batch_size": None},
}


def passes(loader: DataLoader, until: int) -> Iterator[tuple[int, Any]]:
    while loader.epoch < until:
        for batch in loader:
            yield loader.epoch, batch.tolist()


@pytest.mark.parametrize(
    ("order", "workers"), [*((order, (0, 0)) for order in ORDERS), ("shuffle", (3, 1)), ("foreign", (0, 2))]
)
def test_a_new_process_goes_on_with_the_next_batch(order: str, workers: tuple[int, int]) -> None:
    before, after = workers

    def loader(workers: int) -> DataLoader:
        return DataLoader(Numbered(), num_workers=workers, **{"batch_size": 2, **ORDERS[order]()})

    ddp.manual_seed(1)
    whole = list(passes(loader(before), 3))
    assert len(whole) == 18
    for handed in (6, 8) if before else (1, 6, 8):  # the last of a pass, and within the next
        ddp.manual_seed(1)
        first = loader(before)
        iterator = passes(first, 3)
        got = [next(iterator) for _ in range(handed)]
        state = json.loads(json.dumps(first.state_dict()))
        random = ddp.get_rng_state()
        del iterator
        left = json.loads(json.dumps(first.state_dict()))  # also when the pass was left
        assert left == state or (handed == 6 and (left["epoch"], left["batches"]) == (1, 0))
        for each in (state, left):
            ddp.set_rng_state(random)  # as a checkpoint has it
            second = loader(after)
            second.load_state_dict(each)
            assert second.state_dict()["batches"] == each["batches"]
            assert got + list(passes(second, 3)) == whole
            assert second.epoch == 3


def test_what_a_state_is() -> None:
    loader = DataLoader(Squares(6), batch_size=2, num_workers=2, sampler=SequentialSampler(range(6)))

    def check(epoch: int, batches: int, seed: int | None) -> None:
        sampler = {"sampler": {"cursor": 2 * batches, "length": 6}}
        assert loader.state_dict() == {"epoch": epoch, "batches": batches, "seed": seed, "sampler": sampler}

    check(0, 0, None)
    iterator = iter(loader)
    next(iterator)
    seed = loader.state_dict()["seed"]
    assert type(seed) is int
    check(0, 1, seed)
    list(iterator)
    check(1, 0, seed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("rank", "last"), [(0, (1, [4])), (1, (0, []))])
def test_a_rank_that_has_run_out_gets_empty_batches(workers: int, rank: int, last: Any) -> None:
    sampler = DistributedSampler(range(5), 2, rank, shuffle=False, tail="exact")
    loader = DataLoader(Squares(5), batch_size=2, sampler=sampler, num_workers=workers)
    rows = [(x.shape, x.dtype, index.tolist()) for x, index in loader]
    assert rows == [((2, 2), ddp.float32, [rank, rank + 2]), ((last[0], 2), ddp.float32, last[1])]
    assert (loader.epoch, len(loader)) == (1, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, Counted])
def test_a_stream_goes_on_with_the_next_batch(kind: Any, workers: int) -> None:
    def rows(batch: Any) -> Any:
        return batch[0].tolist() if kind is Stream else batch[:, 0].tolist()

    def loader() -> DataLoader:
        return DataLoader(kind(13), batch_size=2, num_workers=workers)

    ddp.manual_seed(2)
    whole = [rows(batch) for batch in loader()]
    assert len(whole) == (7 if kind is Stream or workers < 2 else 7 * workers)
    for handed in (1, len(whole) - 1, len(whole)):
        first = loader()
        iterator = iter(first)
        got = [rows(next(iterator)) for _ in range(handed)]
        state = json.loads(json.dumps(first.state_dict()))
        second = loader()
        second.load_state_dict(state)
        rest = list(second)
        assert got + [rows(batch) for batch in rest] == whole
        if kind is Counted and rest and handed > 1:
            assert rest[-1][0, 1].item() == 1  # it was told, not read from the beginning
        assert second.epoch == 1
        third = loader()
        third.load_state_dict(second.state_dict())  # after a pass that was gone on with
        assert [rows(batch) for batch in third] == whole


class Ranged(IterableDataset[int]):
    """1 to 5. Its state after the last number is that of the end."""

    start = at = 0

    def __iter__(self) -> Iterator[int]:
        start = self.start
        self.start = 0
        for self.at in range(start + 1, 6):
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def test_a_pass_follows_one_that_was_resumed_at_its_end() -> None:
    batches = zip(range(3), first := DataLoader(Ranged(), 2), strict=False)
    whole = [batch.tolist() for _, batch in batches]
    second = DataLoader(Ranged(), 2)
    second.load_state_dict(first.state_dict())
    assert [[batch.tolist() for batch in second] for _ in range(2)] == [[], whole]


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_shorter_than_it_was_is_at_its_end(workers: int, size: int | None) -> None:
    iterator = iter(first := DataLoader(Stream(12), size, num_workers=workers))
    for _ in range(5):
        next(iterator)
    second = DataLoader(Stream(3), size, num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert list(second) == []
    assert len(list(second)) == (3 if size is None else 2)


def test_streams_that_end_at_different_times() -> None:
    results = [batch[0].flatten().tolist() for batch in DataLoader(Stream(7), batch_size=2, num_workers=3)]
    assert results == [[0, 3], [1, 4], [2, 5], [6]]
    drawn = [batch[1].tolist() for batch in DataLoader(Stream(7), batch_size=2, num_workers=3, drop_last=True)]
    assert len(drawn) == 3
    one = [each[0].item() for each in DataLoader(Stream(5), batch_size=None, num_workers=2)]
    assert one == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"epoch": -1, "batches": 0, "sampler": None}, "epoch -1"),
        ({"epoch": 0, "batches": 0}, "expected 'sampler'"),
        (None, "the state has None, expected 'sampler'"),
        ({"epoch": 0, 3: 4}, r"the state has \['epoch', 3\], expected 'sampler'"),
        ({"epoch": 0, "batches": 0, "seed": 1, "sampler": None}, "the state has none of a sampler"),
        ({"epoch": 0, "batches": 0, "seed": 1, "sampler": {"sampler": {"length": 3}}}, "length 3"),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any, said: str) -> None:
    with pytest.raises(StateDictError, match=said):
        DataLoader(Squares(6)).load_state_dict(state)


def test_a_stream_is_read_by_as_many_as_before() -> None:
    first = DataLoader(Stream(7), num_workers=2)
    next(iter(first))
    with pytest.raises(StateDictError, match="that 2 processes read"):
        DataLoader(Stream(7)).load_state_dict(first.state_dict())
    with pytest.raises(StateDictError, match="expected 'streams'"):
        DataLoader(Stream(7)).load_state_dict(DataLoader(Squares(3)).state_dict())
    good = {"states": [None], "handed": [1], "turns": [0]}
    for wrong in (5, {"states": [None]}, {**good, "handed": []}, {**good, "handed": [None]}, {**good, "turns": [1]}):
        with pytest.raises(StateDictError, match="no position in an IterableDataset"):
            DataLoader(Stream(7)).load_state_dict({"epoch": 0, "batches": 1, "seed": 1, "streams": wrong})
