"""Buffers become the same on all ranks at the first forward after a synchronized backward, in one call."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from collectives import Communicator
from ddp import nn
from ddp.autograd import checkpoint
from ddp.parallel import DataParallel
from ddp.parallel.planner import WARM
from tests.ddp.parallel.ranks import Arrays, on_each_of, on_ranks
from tests.ddp.parallel.recorder import Recorder

DTYPES = (ddp.float32, ddp.float64, ddp.bfloat16, ddp.float16, ddp.int64, ddp.uint8, ddp.bool)


class Counting(nn.Module):
    """Buffers of many kinds, each of which forward changes by this rank's own step; one that it puts anew."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(ddp.ones(2))
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"b{number}", ddp.zeros((3, number), dtype=dtype))
        self.register_buffer("scalar", ddp.zeros((), dtype=ddp.int32))
        self.register_buffer("turned", ddp.zeros(2, 3).T)
        self.register_buffer("anew", ddp.zeros(1), persistent=False)

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        with ddp.no_grad():
            for name, buffer in self.named_buffers():
                if name != "anew" and buffer.dtype is not ddp.bool:
                    buffer += self.step
            self.anew = self.anew + self.step
        return x * self.weight


def values(net: nn.Module) -> Arrays:
    return {name: buffer.numpy().copy() for name, buffer in net.named_buffers()}


def step(model: DataParallel) -> None:
    model.zero_grad()
    model(ddp.ones(2)).sum().backward()


@pytest.mark.parametrize("mode", [True, False])
def test_before_the_next_forward_they_are_rank_0s_or_each_ranks_own(mode: bool) -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(Counting(step=[1, 3, 5][comm.rank]), comm, broadcast_buffers=mode)
        step(model)
        after_one = values(model.module)
        step(model)
        return after_one, values(model.module)

    for number, (one, two) in enumerate(on_ranks(rank, 3)):
        mine = [1, 3, 5][number]
        for name in one:
            counts = one[name].dtype != bool
            assert (one[name].astype(float) == mine * counts).all(), name
            assert (two[name].astype(float) == ((1 if mode else mine) + mine) * counts).all(), name


@on_each_of(2)
def test_only_a_training_forward_after_a_synchronized_backward_calls(comm: Communicator) -> None:
    calls: list[str] = []
    model = DataParallel(Counting(step=1), Recorder(comm, calls), check_every=0)
    x = ddp.ones(2)

    def calls_of_forward() -> list[str]:
        calls.clear()
        model(x)
        return list(calls)

    assert calls_of_forward() == []
    model(x).sum().backward()
    model.eval()
    assert calls_of_forward() == []
    model.train()
    with ddp.no_grad():
        assert calls_of_forward() == []
    assert calls_of_forward() == ["broadcast"]
    assert calls_of_forward() == []  # again
    with model.no_sync():
        model(x).sum().backward()
    assert calls_of_forward() == []


def test_a_rank_that_made_no_forward_takes_part_and_has_them_at_its_next() -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(Counting(step=2 * comm.rank + 2), comm)
        for number in range(4):
            model.zero_grad()
            if comm.rank == 1 and number in (1, 2):
                model.backward(ddp.zeros(()), weight=0)
            else:
                model.backward(model(ddp.ones(2)).sum(), weight=1)
        return values(model.module)["b1"]

    first, second = on_ranks(rank)  # rank 0 adds 2 each time, rank 1 adds 4
    assert (first == 8).all()
    assert (second == 10).all()


class Masked(nn.Module):
    """Its graph reads a buffer in backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(ddp.ones(2))
        self.register_buffer("mask", ddp.tensor([2.0, 3.0]))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return x * self.weight * self.mask


def test_a_second_backward_without_a_forward_still_finds_the_buffers_that_its_graph_reads() -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(Masked(comm.rank), comm)
        first, second = model(ddp.ones(2)).sum(), model(ddp.ones(2)).sum()
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        model(ddp.ones(2)).sum().backward()
        return model.module.weight.grad.numpy().copy()

    for got in on_ranks(rank):
        assert got.tolist() == [8, 12]


def test_a_checkpointed_call_of_the_model_runs_again_inside_backward_and_calls_nothing_there() -> None:
    def rank(comm: Communicator) -> Any:
        calls: list[str] = []
        model = DataParallel(Masked(comm.rank), Recorder(comm, calls), check_every=0)
        counts = []
        for _ in range(WARM + 1):
            model.zero_grad()
            loss = checkpoint(model, ddp.ones(2)).sum()
            calls.clear()
            loss.backward()
            counts.append(list(calls))
        return counts[-1], model.module.weight.grad.numpy().copy()

    for calls, got in on_ranks(rank):
        assert calls == ["all_reduce", "all_reduce"]  # the control message and the bucket
        assert got.tolist() == [2, 3]
