"""Parameters that drift by one bit or came after wrapping, and backwards that a rank skips, are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.parallel import DataParallel
from ddp.parallel.checks import ConsistencyCheck, bit_sum, describe_drift, mix
from tests.ddp.parallel.ranks import on_each_of, on_ranks


def make_net() -> nn.Module:
    ddp.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1))


def backward(model: DataParallel, rank: int) -> None:
    model.zero_grad()
    x = ddp.from_numpy(np.random.default_rng(rank).normal(size=(2, 3)).astype(np.float32))
    model(x).sum().backward()
    with ddp.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


def flip_a_bit(p: ddp.Tensor) -> None:
    bits = p.array.reshape(-1).view(np.uint32)
    bits[-1] ^= 1 << 12  # some updates later it still is there


def train(comm: Communicator, odd: int, at: int, every: int, name: str, steps: int = 8) -> tuple[int, str]:
    """(backwards that ended, what was raised) where rank `odd` changes a bit of a parameter before step `at`"""
    model = DataParallel(make_net(), comm, check_every=every)
    for step in range(steps):
        if comm.rank == odd and step == at:
            flip_a_bit(model.module.get_parameter(name))
        try:
            backward(model, comm.rank)
        except ParallelError as error:
            return step, str(error)
    return steps, ""


WRAPPED = "when the model was wrapped"


@pytest.mark.parametrize(
    ("every", "at", "taken", "agreed"),
    [(1, 0, 0, WRAPPED), (3, 0, 0, WRAPPED), (1, 2, 2, "at step 1"), (2, 3, 4, "at step 2"), (3, 1, 3, "at step 0")],
)
@pytest.mark.parametrize("size", [2, 3])
def test_one_bit_is_found_and_named(size: int, every: int, at: int, taken: int, agreed: str) -> None:
    for stopped, said in on_ranks(lambda comm: train(comm, 1, at, every, "2.weight"), size):
        assert stopped == taken + 1  # the checksum rides in the next backward's message
        who = "is not the same on ranks 0-1" if size == 2 else "on rank 1 is not what the other ranks have"
        assert said.startswith(f"2.weight {who} at step {taken} (all had the same {agreed})")
        assert "check_every=0" in said


@on_each_of(3)
def test_the_step_in_the_message_is_that_of_the_checksum(comm: Communicator) -> None:
    """Replays of a CUDA graph count as steps, and send no checksum. A rank out of data has dropped its own."""
    check = ConsistencyCheck(comm, ["w"], [ddp.full((2,), float(comm.rank))], 3)
    check.checksum(3)
    if comm.rank == 2:
        check.forget()
    checksums = comm.all_gather(np.array([check.checksum(7)]))
    with pytest.raises(ParallelError, match=r"w is not the same on ranks 0-1 at step 3 \(all had the same when"):
        check.compare(checksums)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0, 2)])
def test_every_bit_counts_in_an_arrays_sum(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    before = int(bit_sum(array, np))
    assert int(bit_sum(np.asfortranarray(array), np)) == before
    octets = array.reshape(-1).view(np.uint8)
    for bit in range(8 * octets.size):
        octets[bit // 8] ^= 1 << bit % 8
        assert int(bit_sum(array, np)) != before
        octets[bit // 8] ^= 1 << bit % 8
    assert int(bit_sum(array, np)) == before


def test_the_mix_depends_on_every_sum_and_its_place() -> None:
    sums = [1, 2, 3, 2**64 - 1]
    result = {mix(sums), mix(sums[::-1]), mix([*sums[:3], 0]), mix([*sums, 0]), mix([2, 1, *sums[2:]])}
    assert len(result) == 5
    for place in range(4):
        for bit in range(64):
            assert mix([each ^ (1 << bit) if at == place else each for at, each in enumerate(sums)]) != mix(sums)
    assert all(0 <= each < 2**52 for each in result)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[1, 2], [1, 3]], "b is not the same on ranks 0, 4"),
        ([[1, 2], [3, 4]], "a (and 1 more) is not the same on ranks 0, 4"),
        ([[1, 2], [1, 2], [1, 3]], "b on rank 7 is not what the other ranks have"),
        ([[5, 2], [1, 2], [1, 2]], "a on rank 0 is not what the other ranks have"),
        ([[1, 2], [1, 3], [1, 4], [1, 2]], "b on ranks 4, 7 is not what the other ranks have"),
        ([[1, 2], [1, 3], [1, 3], [1, 2]], "b is not the same on ranks 0, 4, 7, 9"),
    ],
)
def test_who_drifted_in_words(table: list[list[int]], words: str) -> None:
    ranks = [0, 4, 7, 9][: len(table)]
    assert describe_drift(["a", "b"], np.array(table, np.uint64), ranks) == words


# Parameters that come into a module after it was wrapped


@pytest.mark.parametrize("size", [2, 3])
def test_a_skipped_backward_is_found_at_the_next_one_on_every_rank(size: int) -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(nn.Linear(3, 1), comm)
        said = []
        for step in range(5):
            model.zero_grad()
            loss = model(ddp.ones(2, 3)).sum()
            if comm.rank == 1 and step == 1:
                continue  # as for a loss that is NaN
            try:
                loss.backward()
                said.append("")
            except ParallelError as error:
                said.append(str(error))
            if len(said) == 4:  # it made one fewer in the end
                break
        return said

    for said in on_ranks(rank, size):
        assert said[1].startswith("step 1: rank 1 skipped a backward: what a forward returned was dropped")
        assert "model.backward(ddp.zeros(()), weight=0)" in said[1]
        assert [bool(text) for text in said] == [False, True, False, False]  # ranks agree, and may go on


@dataclasses.dataclass
class Output:
    loss: ddp.Tensor
    rest: Any


class Several(nn.Linear):
    """Returns more than a tensor."""

    def forward(self, x: ddp.Tensor) -> Any:
        y = super().forward(x)
        return Output(y.sum(), {"y": [y * 2, "text"]})


def on_rank_0_twice(model: DataParallel, x: ddp.Tensor, twice: bool) -> None:
    (model(x).sum() + (model(x).sum() if twice else 0)).backward()


def after_a_forward_that_failed(model: DataParallel, x: ddp.Tensor, fails: bool) -> None:
    if fails:
        with pytest.raises(ddp.errors.ShapeError):
            model(ddp.ones(2, 4))
    model(x).sum().backward()


def with_zeros_for_a_loss(model: DataParallel, x: ddp.Tensor, bad: bool) -> None:
    loss = model(x).sum()
    if bad:
        loss = sum(0 * p.sum() for p in model.parameters())
    loss.backward()


def with_weight_0(model: DataParallel, x: ddp.Tensor, bad: bool) -> None:
    loss = model(x).sum()
    if bad:
        loss = ddp.zeros(())
    model.backward(loss, weight=0 if bad else 2)


def without_a_forward(model: DataParallel, x: ddp.Tensor, empty: bool) -> None:
    model.backward(ddp.zeros(()) if empty else model(x).sum(), weight=0 if empty else 2)


def with_more_micro_batches(model: DataParallel, x: ddp.Tensor, more: bool) -> None:
    for _ in range(3 if more else 1):
        loss = model(x).sum()
        with model.no_sync():
            loss.backward()
    model(x).sum().backward()


def after_looking(model: DataParallel, x: ddp.Tensor, looks: bool) -> None:
    if looks:
        with ddp.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        model.module(x)
    model(x).sum().backward()


def dropped_alike(model: DataParallel, x: ddp.Tensor, _: bool) -> None:
    model(x)
    model(x).sum().backward()


STEPS_THAT_DIFFER = [
    on_rank_0_twice,
    after_a_forward_that_failed,
    with_zeros_for_a_loss,
    with_weight_0,
    without_a_forward,
    with_more_micro_batches,
    after_looking,
    dropped_alike,
]


@pytest.mark.parametrize("train", STEPS_THAT_DIFFER)
@on_each_of(2)
def test_ranks_may_differ_in_forwards_where_none_skips_a_backward(
    comm: Communicator, train: Callable[..., None]
) -> None:
    model = DataParallel(nn.Linear(3, 1), comm)
    for step in range(4):
        model.zero_grad()
        train(model, ddp.ones(2, 3), comm.rank == 0 and step % 2 == 1)


def test_any_part_of_what_a_forward_returned_keeps_it() -> None:
    def rank(comm: Communicator) -> str:
        model = DataParallel(Several(3, 1), comm)
        first = model(ddp.ones(2, 3)).rest["y"][0]  # the loss is dropped
        second = model(ddp.ones(2, 3)).loss if comm.rank else 0
        (first.sum() + second).backward()
        model(ddp.ones(2, 3)) if comm.rank else None
        with pytest.raises(ParallelError, match="rank 1 skipped a backward"):
            model(ddp.ones(2, 3)).loss.backward()
        return ""

    on_ranks(rank)


@on_each_of(2)
def test_a_rank_without_data_skips_nothing(comm: Communicator) -> None:
    model = DataParallel(nn.Linear(3, 1), comm)
    with model.join():
        for _ in range(2 + comm.rank):
            model(ddp.ones(2, 3))
            model(ddp.ones(2, 3)).sum().backward()
        model(ddp.ones(2, 3)) if comm.rank == 0 else None
        model(ddp.ones(2, 3)) if comm.rank == 0 else None
    model(ddp.ones(2, 3)).sum().backward()


class Parts(nn.Module):
    """A module of several kinds of container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3))
        self.named = nn.ModuleDict({"one": nn.Linear(3, 3)})
        self.scales = nn.ParameterList([nn.Parameter(ddp.ones(3))])

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.body(x)


ADDITIONS: dict[str, Callable[[Parts], Any]] = {
    "extra.weight and 1 more": lambda net: setattr(net, "extra", nn.Linear(3, 3)),
    "body.0.weight": lambda net: setattr(net.body[0], "weight", nn.Parameter(ddp.ones(3, 3))),
    "named.two.weight": lambda net: net.named.update({"two": nn.Linear(3, 3)}),
    "scales.1": lambda net: net.scales.append(nn.Parameter(ddp.ones(3))),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_parameters_that_come_after_wrapping_are_named(name: str) -> None:
    model = DataParallel(Parts())
    model(ddp.ones(1, 3))
    ADDITIONS[name](model.module)
    with pytest.raises(ParallelError, match="came into the module after it was wrapped") as caught:
        model(ddp.ones(1, 3))
    assert name in str(caught.value)
    assert "close()" in str(caught.value)
    model.close()
    DataParallel(model.module)(ddp.ones(1, 3)).sum().backward()


def test_a_part_that_is_taken_out_or_put_elsewhere_is_no_addition() -> None:
    model = DataParallel(Parts())
    del model.module.named
    model.module.again = model.module.body[0]
    model.module.elsewhere = nn.Sequential(model.module.body, nn.ReLU())
    nn.Linear(3, 3)  # somebody else's
    model(ddp.ones(1, 3)).sum().backward()
    assert model.module.body[0].weight.grad is not None
