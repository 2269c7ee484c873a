"""Orders of one process, and that each of them is gone on with at the next index in another process."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddp
from ddp.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from ddp.errors import ArgumentError, StateDictError

WEIGHTS = [0.1, 0.0, 0.4, 0.2, 0.3]


MAKERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(11)),
    "random": lambda: RandomSampler(range(11)),
    "random, replaced": lambda: RandomSampler(range(4), replacement=True, num_samples=11),
    "random, more": lambda: RandomSampler(range(4), num_samples=11),
    "subset": lambda: SubsetRandomSampler([*range(3, 14)]),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 11),
    "weighted, not replaced": lambda: WeightedRandomSampler(np.arange(20.0), 11, replacement=False),
    "own generator": lambda: RandomSampler(range(11), generator=ddp.Generator().manual_seed(3)),
    "distributed": lambda: DistributedSampler(range(11), 1, 0),
    "batches": lambda: BatchSampler(RandomSampler(range(33)), 3, False),
    "batches, cut": lambda: BatchSampler(RandomSampler(range(35)), 3, True),
    "batches of batches": lambda: BatchSampler(BatchSampler(RandomSampler(range(33)), 1, True), 3, True),
}
every_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    again = json.loads(json.dumps(state))
    assert again == state
    return again


@every_sampler
@given(read=st.integers(0, 12), more=st.integers(0, 12), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_another_process_goes_on_with_the_next_index(make: Any, read: int, more: int, seed: int) -> None:
    ddp.manual_seed(seed)
    sampler = make()
    assert len(sampler) == 11
    indices = iter(sampler)
    began = through_json(sampler.state_dict())
    whole = list(itertools.islice(indices, read))
    position = sampler.state_after(began, read)
    if read <= 11:
        assert sampler.state_dict() == position
    drawn = ddp.get_rng_state()
    whole += list(indices)
    assert len(whole) == 11
    follows = list(sampler)

    ddp.manual_seed(seed + 1)  # what is drawn there must not matter to the pass that is gone on with
    resumed = make()
    resumed.load_state_dict(position)
    assert through_json(resumed.state_dict()) == position
    ddp.set_rng_state(drawn)
    again = iter(resumed)
    assert resumed.state_dict() == position
    rest = list(itertools.islice(again, more))
    assert rest == whole[read : read + more]
    if len(rest) == more:
        assert resumed.state_dict() == sampler.state_after(began, read + more)
    rest += list(again)
    assert rest == whole[read:]
    assert list(resumed) == follows
    resumed.load_state_dict(began)
    assert list(resumed) == whole


@every_sampler
def test_between_two_passes_nothing_is_drawn_yet_and_a_pass_left_early_is_no_position(make: Any) -> None:
    ddp.manual_seed(0)
    sampler = make()
    state = through_json(sampler.state_dict())
    first, second = list(sampler), list(sampler)
    ddp.manual_seed(0)
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [list(resumed), list(resumed)] == [first, second]
    iterator = iter(sampler)
    next(iterator)  # left early
    assert len(list(sampler)) == 11
    assert len(list(iterator)) == 10


LARGE = 10**10  # indices of 8 bytes would take 75 GiB


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(4), replacement=True, num_samples=LARGE),
        lambda: RandomSampler(range(1000), num_samples=LARGE),
        lambda: SequentialSampler(range(LARGE)),
    ],
    ids=["replaced", "orders", "sequential"],
)
def test_a_pass_larger_than_memory_is_drawn_in_parts(make: Any) -> None:
    sampler = make()
    assert len(sampler) == LARGE
    tracemalloc.start()
    try:
        indices = iter(sampler)
        first = list(itertools.islice(indices, 70_000))
        state = sampler.state_dict()
        assert state["cursor"] == len(first)
        follows = list(itertools.islice(indices, 1000))
        resumed = make()
        resumed.load_state_dict(through_json(state))
        assert list(itertools.islice(resumed, 1000)) == follows
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_weights_are_probabilities() -> None:
    ddp.manual_seed(0)
    result = Counter(WeightedRandomSampler([10 * weight for weight in WEIGHTS], 20_000))
    for index, weight in enumerate(WEIGHTS):
        assert abs(result[index] - 20_000 * weight) <= 5 * (20_000 * weight) ** 0.5, index


def test_nothing_to_draw_is_an_empty_pass() -> None:
    for sampler in (RandomSampler([]), SubsetRandomSampler([]), WeightedRandomSampler([], 0), SequentialSampler([])):
        assert list(sampler) == []
        assert len(sampler) == 0


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_pytorchs(drop_last: bool) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    for length, size in itertools.product(range(9), range(1, 5)):
        mine, theirs = (each.BatchSampler(range(length), size, drop_last) for each in (ddp.data, torch_data))
        assert (list(mine), len(mine)) == (list(theirs), len(theirs))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RandomSampler(range(3), num_samples=-1), "num_samples should be a count of at least 0, is -1"),
        (lambda: RandomSampler([], num_samples=2), "2 samples of an empty dataset"),
        (lambda: WeightedRandomSampler([1.0, -0.1], 1), "weights"),
        (lambda: WeightedRandomSampler([0.0, 0.0], 1), "0 of 2 weights are above 0"),
        (lambda: WeightedRandomSampler([0.0, 1.0], 2, replacement=False), "2 samples, but 1 of 2 weights"),
        (lambda: BatchSampler(range(3), 0, False), "batch_size should be a number above 0, is 0"),
    ],
)
def test_misuse(make: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        make()


RANDOM = {"seed": 1, "cursor": 1, "length": 11, "num_samples": 11, "replacement": False}


@pytest.mark.parametrize(
    ("name", "state", "told"),
    [
        ("sequential", {"cursor": 1, "length": 12}, "length 12, this sampler 11"),
        ("sequential", {"cursor": 12, "length": 11}, "cursor 12, expected 0 to 11"),
        ("random", {**RANDOM, "num_samples": 9}, "num_samples 9"),
        ("random", {**RANDOM, "seed": -1}, "seed -1"),
        ("random", {"generator": "00"}, "the state has one of a generator, and this sampler none"),
        ("own generator", {"cursor": 1}, "the state has no state of its generator"),
        ("batches", {"sampler": 3}, "expected the state of a sampler, got .*3"),
        ("batches", {"sampler": {"cursor": 1}}, "length None"),
        ("own generator", {**RANDOM, "generator": "00"}, "generator '00', expected a generator's state"),
        ("own generator", {**RANDOM, "generator": 3}, "generator 3, expected a generator's state"),
        *((name, state, "got ") for name in MAKERS for state in (None, [1], "cursor")),
    ],
)
def test_a_state_of_something_else_is_refused(name: str, state: Any, told: str) -> None:
    sampler = MAKERS[name]()
    before = sampler.state_dict()
    with pytest.raises(StateDictError, match=told):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


def test_a_sampler_without_a_position_has_no_state() -> None:
    with pytest.raises(StateDictError, match=r"a range, has no state_dict\(\)"):
        BatchSampler(range(10), 3, False).state_dict()
    with pytest.raises(StateDictError, match=r"a range, has no load_state_dict\(\)"):
        BatchSampler(range(10), 3, False).load_state_dict({"sampler": {}})


def test_a_sampler_of_ones_own_may_have_a_position_too() -> None:
    class Evens(Sampler[int]):
        start = 0

        def __iter__(self) -> Any:
            return iter(range(self.start, 12, 2))

        def state_dict(self) -> Any:
            return {"start": self.start}

        def state_after(self, state: Any, n: int) -> Any:
            return {"start": state["start"] + 2 * n}

        def load_state_dict(self, state: Any) -> None:
            self.start = state["start"]

    batches = BatchSampler(Evens(), 2, False)
    assert list(batches) == [[0, 2], [4, 6], [8, 10]]
    batches.load_state_dict(batches.state_after(batches.state_dict(), 1))
    assert list(batches) == [[4, 6], [8, 10]]
