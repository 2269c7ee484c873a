"""Which rank reads what: one order for all ranks, and a position that any number of ranks goes on with."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
import ddp
from collectives.communicator import Communicator
from ddp.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from ddp.data.distributed_sampler import epoch_order
from ddp.errors import ArgumentError, StateDictError

Tail = st.sampled_from(["pad", "drop", "exact"])


def ranks(length: int, size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(length), size, rank, **options) for rank in range(size)]


def in_turns(parts: Sequence[Sequence[int]]) -> list[int]:
    """The samples of all ranks as they are read: one of each rank, then the next one of each."""
    return [index for turn in itertools.zip_longest(*parts) for index in turn if index is not None]


def read(samplers: Sequence[DistributedSampler], state: Any, samples: int | None) -> tuple[list[int], Any]:
    """Every rank goes on at `state`, reads so many samples, and says where it is then: all the same."""
    parts, after = [], []
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
        indices = iter(sampler)
        began = sampler.state_dict()
        parts.append(list(itertools.islice(indices, samples)))
        after.append(sampler.state_dict() if samples is None else sampler.state_after(began, samples))
    assert all(each == after[0] for each in after)
    return in_turns(parts), json.loads(json.dumps(after[0]))


def test_the_order_is_pinned() -> None:
    """A checkpoint may be gone on with under another NumPy: should one draw another order, this must be known."""
    assert epoch_order(8, 0, 0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert epoch_order(8, 0, 1).tolist() == [1, 3, 7, 6, 0, 4, 2, 5]
    assert epoch_order(8, 1, 0).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]


@pytest.mark.parametrize("drop_last", [False, True])
def test_unshuffled_it_gives_pytorchs_indices(drop_last: bool) -> None:
    torch_data = pytest.importorskip("torch.utils.data")

    def facts(make: Any, length: int, size: int, rank: int) -> Any:
        made = make(range(length), size, rank, shuffle=False, drop_last=drop_last)
        return list(made), len(made), made.num_samples, made.total_size

    for length, size in itertools.product(range(1, 12), range(1, 6)):
        for rank in range(size):
            case = length, size, rank
            assert facts(DistributedSampler, *case) == facts(torch_data.DistributedSampler, *case)


Legs = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=6)  # ranks, and samples that each reads


@given(length=st.integers(0, 60), legs=Legs, last=st.integers(1, 6), seed=st.integers(0, 99), tail=Tail)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_sample_is_lost_or_seen_twice_over_any_sequence_of_world_sizes(
    length: int, legs: list[tuple[int, int]], last: int, seed: int, tail: str
) -> None:
    """Only who comes to the end of the epoch pads or drops, and leaves out less than one sample a rank."""
    state = None
    seen = []
    order = epoch_order(length, seed, 0).tolist()
    for size, samples in legs:
        if tail != "exact":
            samples = min(samples, (length - len(seen)) // size)
        some, state = read(ranks(length, size, seed=seed, tail=tail), state, samples)
        assert len(some) == min(size * samples, length - len(seen))
        seen += some
        assert seen == order[: len(seen)]
        assert state["cursor"] == len(seen)
    samplers = ranks(length, last, seed=seed, tail=tail)
    lengths = [len(list(sampler)) for sampler in samplers]
    assert lengths == [len(sampler) for sampler in samplers]
    assert (max(lengths), sum(lengths)) == (samplers[0].num_samples, samplers[0].total_size)
    rest, after = read(ranks(length, last, seed=seed, tail=tail), state, None)
    assert (after["epoch"], after["cursor"]) == (1, 0)
    seen += rest
    assert seen == list(itertools.islice(itertools.cycle(order), len(seen)))
    assert len(seen) - length in {"exact": [0], "drop": range(1 - last, 1), "pad": range(last)}[tail]


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4), Tail, st.booleans(), st.integers(0, 40))
@settings(deadline=None, derandomize=True)
def test_all_ranks_make_as_many_batches_as_len_says(
    length: int, size: int, batch_size: int, tail: str, drop_last: bool, read: int
) -> None:
    whole = [BatchSampler(each, batch_size, drop_last) for each in ranks(length, size, tail=tail)]
    assert len({len(list(each)) for each in whole} | {len(each) for each in whole}) == 1
    state = whole[0].state_after({"sampler": ranks(length, 1)[0].state_dict()}, read)
    for each in whole:
        each.load_state_dict(state)
    assert len({len(list(each)) for each in whole}) == 1


def test_set_epoch_as_pytorchs_loops_call_it() -> None:
    sampler = DistributedSampler(range(9), 1, 0)
    sampler.set_epoch(7)
    assert list(sampler) == epoch_order(9, 0, 7).tolist()
    assert sampler.epoch == 8
    sampler.set_epoch(7)
    indices = iter(sampler)
    sampler.set_epoch(3)  # in the middle of a pass: the next one is that
    list(indices)
    assert sampler.epoch == 3
    for epoch, cursor in ((5, 6), (0, 0)):  # where the loop of a resumed run begins, and another
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 5, "cursor": 6})
        sampler.set_epoch(epoch)
        assert list(sampler) == epoch_order(9, 0, epoch)[cursor:].tolist()


class Own(Sampler[int]):
    """A sampler of the user's own, which draws from all generators that there are."""

    def __init__(self, drawn: int, length: int) -> None:
        self.drawn = drawn
        self.length = length
        self.epoch = -1

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.drawn):
            yield self.epoch * 1000 + random.randrange(9) + 10 * np.random.randint(9) + 100 * ddp.randint(9, ()).item()


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([0, 1, 2, 3], 12),
        lambda: RandomSampler(range(12), generator=ddp.Generator().manual_seed(random.randrange(99))),
        lambda: SubsetRandomSampler([*range(7, 19)]),
        lambda: BatchSampler(RandomSampler(range(24)), 2, drop_last=True),
        lambda: Own(12, 12),
    ],
    ids=["weighted", "own generator", "subset", "batches", "of the user's own"],
)
def test_ranks_share_what_a_sampler_draws(sampler: Any) -> None:
    """Every rank has a sampler of its own, and generators in another state; another number of ranks goes on."""

    def of_ranks(size: int) -> list[DistributedSampler]:
        return [DistributedSampler(sampler(), size, rank, seed=3, tail="exact") for rank in range(size)]

    [whole] = of_ranks(1)
    epochs = [list(whole), list(whole)]
    assert epochs[0] != epochs[1]
    two, five = of_ranks(2), of_ranks(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, _ = read(two, None, None)
    second, state = read(two, None, 2)
    rest, _ = read(five, state, None)
    assert [first, second + rest] == epochs
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_weight_of_zero_is_never_drawn() -> None:
    weights = [0.0] * 9 + [1.0]
    for rank in range(2):
        assert list(DistributedSampler(WeightedRandomSampler(weights, 10), 2, rank)) == [9] * 5


GOOD = {"epoch": 2, "cursor": 3, "seed": 4, "length": 9, "shuffle": True}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"length": 10}, "the state has length 10, this sampler 9"),
        ({"shuffle": False}, "the state has shuffle False, this sampler True"),
        ({"seed": 5}, "the state has seed 5, this sampler 4"),
        ({"cursor": 10}, "cursor 10, expected 0 to 9"),
        ({"cursor": True}, "cursor True"),
        ({"epoch": "2"}, "epoch '2'"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change: Any, told: str) -> None:
    sampler = DistributedSampler(range(9), 1, 0, seed=4)
    before = sampler.state_dict()
    with pytest.raises(StateDictError, match=told):
        sampler.load_state_dict({**GOOD, **change})
    for name in GOOD:
        with pytest.raises(StateDictError, match=name):
            sampler.load_state_dict({key: value for key, value in GOOD.items() if key != name})
    assert sampler.state_dict() == before
    sampler.load_state_dict(GOOD)
    assert sampler.state_dict() == GOOD


@pytest.mark.parametrize(
    ("args", "options", "told"),
    [
        ((2, 2), {}, "rank from 0 to below it, are 2 and 2"),
        ((2, True), {}, "rank from 0 to below it, are 2 and True"),
        ((0, 0), {}, "num_replicas should be at least 1 .*, are 0 and 0"),
        ((2.0, 0), {}, "num_replicas should be at least 1 .*, are 2.0 and 0"),
        ((2, 0), {"seed": -1}, "seed"),
        ((2, 0), {"tail": "cut"}, "tail should be one of pad, drop, exact, is 'cut'"),
        ((3, 0), {"micro_batches": 2}, "micro_batches=2 on 3 ranks"),
        ((1, 0), {"micro_batches": 0}, "micro_batches should be a number above 0"),
    ],
)
def test_misuse(args: Any, options: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        DistributedSampler(range(3), *args, **options)


def test_misuse_of_samples_and_epochs() -> None:
    with pytest.raises(ArgumentError, match="has no length"):
        DistributedSampler(iter(range(3)), 2, 0)
    with pytest.raises(ArgumentError, match=r"the Own drew 4 indices, its len\(\) is 5"):
        list(DistributedSampler(Own(4, 5), 2, 0))
    with pytest.raises(ArgumentError, match="epoch should be a number of at least 0, is -1"):
        DistributedSampler(range(3), 2, 0).set_epoch(-1)


def test_ranks_are_those_of_the_communicator() -> None:
    def indices(comm: Communicator) -> list[int]:
        whole = list(DistributedSampler(range(10), tail="exact"))
        assert whole == list(DistributedSampler(range(10), tail="exact", comm=comm))
        return whole

    parts = collectives.run_threads(indices, size=3)
    assert Counter(itertools.chain(*parts)) == Counter(range(10))


def micro_batch_steps(size: int, tail: str, drop_last: bool) -> list[list[list[int]]]:
    """By step: the lists of all ranks' 4 micro-batches, of 2 of 23 samples each."""
    steps = []
    for rank in range(size):
        sampler = DistributedSampler(range(23), size, rank, shuffle=False, micro_batches=4, tail=tail)
        batches = BatchSampler(sampler, 2, drop_last)
        lists = list(batches)
        assert len(lists) == len(batches)
        if not drop_last:
            assert sum(map(len, lists)) == len(sampler)
        share = len(sampler.micro_batches_of_rank)
        steps = steps or [[] for _ in lists[::share]]
        for number, each in enumerate(lists):
            steps[number // share].append(each)
    return steps


@pytest.mark.parametrize(
    ("tail", "drop_last", "last"),
    [
        ("pad", False, [[16, 20], [17, 21], [18, 22], [19, 0]]),
        ("exact", False, [[16, 20], [17, 21], [18, 22], [19]]),
        ("exact", True, [[16, 20], [17, 21], [18, 22], []]),
        ("drop", False, [[16], [17], [18], [19]]),
        ("drop", True, [[8, 12], [9, 13], [10, 14], [11, 15]]),
    ],
)
def test_micro_batches_are_the_same_on_any_number_of_ranks(tail: str, drop_last: bool, last: list[list[int]]) -> None:
    steps = micro_batch_steps(1, tail, drop_last)
    assert (steps[0], steps[-1]) == ([[0, 4], [1, 5], [2, 6], [3, 7]], last)
    for size in (2, 3, 4):
        assert micro_batch_steps(size, tail, drop_last) == steps


def test_a_position_in_micro_batches_is_that_of_whole_steps_and_of_any_number_of_ranks() -> None:
    def loader(size: int, rank: int = 0, count: int = 4) -> DataLoader:
        return DataLoader(range(50), 2, sampler=DistributedSampler(range(50), size, rank, micro_batches=count))

    def batches(size: int, state: Any) -> list[Any]:
        """What all ranks that go on there get, in the order of one rank."""
        share = 4 // size
        by_step = [[] for _ in range(7)]
        for rank in range(size):
            other = loader(size, rank)
            other.load_state_dict(state)
            for number, batch in enumerate(other):
                by_step[number // share].append(batch.tolist())
        return [batch for step in by_step for batch in step]

    whole = batches(1, loader(1).state_dict())
    half = loader(3)  # of whose micro-batches rank 0 has two
    position = iter(half)
    for number in range(5):
        state = half.state_dict()
        assert (state["batches"], state["sampler"]["sampler"]["cursor"]) == (number // 2 * 4, number // 2 * 8)
        next(position)
    for size in (1, 2, 4):
        assert batches(size, half.state_dict()) == whole[8:]
    for size in (1, 2):  # without micro-batches, too, it is the position after exactly these samples
        left, _ = read(ranks(50, size), half.state_dict()["sampler"]["sampler"], None)
        assert left == epoch_order(50, 0, 0)[16:].tolist()
    with pytest.raises(StateDictError, match="micro_batches 4, this sampler 8"):
        loader(1, count=8).load_state_dict(half.state_dict())
