"""Ranks with different numbers of steps inside `join`: the numbers are those that one process computes by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ddp
from collectives import CollectiveTimeout, Communicator
from ddp import nn
from ddp.errors import DtypeError, EarlyStop, ParallelError
from ddp.parallel import DataParallel
from tests.ddp.parallel.ranks import Tensors, assert_same, make_net, on_each_of, on_ranks

STEPS = [[3], [3, 1], [0, 2], [5, 0], [2, 4, 1], [0, 1, 6, 6], [1, 1]]


def rows(rank: int, step: int) -> ddp.Tensor:
    n = 2 + (rank + step) % 3
    return ddp.from_numpy(np.random.default_rng([rank, step]).normal(size=(n, 3)))


def loss_of(model: nn.Module, x: ddp.Tensor) -> ddp.Tensor:
    return model(x).square().sum()


def make_optimizer(net: nn.Module) -> ddp.optim.SGD:
    return ddp.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def by_hand(
    steps: Sequence[int], total: Callable[[list[int], int], float], epochs: int = 1, passes: int = 1
) -> Tensors:
    """total: of the ranks that still have data and the step: what their summed gradients are divided by"""
    net = make_net()
    optimizer = make_optimizer(net)
    for _ in range(epochs):
        for step in range(max(steps)):
            optimizer.zero_grad()
            active = [rank for rank, count in enumerate(steps) if step < count]
            for rank in active:
                for part in range(passes):
                    loss_of(net, rows(rank, step + 10 * part)).backward()
            for p in net.parameters():
                p.grad /= total(active, step)
            optimizer.step()
    return net.state_dict()


def assert_all(everyones: list[Tensors], expected: Tensors) -> None:
    for got in everyones:
        assert_same(got, expected)
        assert_same(got, everyones[0], 0)  # bit for bit on all ranks


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("initial", "passes"),
    [(True, 0), (False, 0), (True, 1), (False, 2)],
    ids=["of all", "of those with data", "weighted", "accumulated"],
)
def test_means_are_over_the_ranks_asked_for_and_without_data_weigh_nothing(
    steps: list[int], initial: bool, passes: int
) -> None:
    """passes: of a step, whose weights are the numbers of samples; 0: one without a weight"""

    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(), comm, bucket_cap_mb=1e-4 if passes else "auto", check_every=1)
        optimizer = make_optimizer(model.module)
        for _ in range(2):
            with model.join(divide_by_initial_world_size=initial, optimizers=[optimizer]):
                for step in range(steps[comm.rank]):
                    optimizer.zero_grad()
                    *first, last = [rows(comm.rank, step + 10 * part) for part in range(max(1, passes))]
                    with model.no_sync():
                        for x in first:
                            model.backward(loss_of(model, x), weight=len(x))
                    if passes:
                        model.backward(loss_of(model, last), weight=len(last))
                    else:
                        loss_of(model, last).backward()
                    optimizer.step()
        return model.module.state_dict()

    def total(active: list[int], step: int) -> float:
        if passes:
            return float(sum(len(rows(rank, step + 10 * part)) for rank in active for part in range(passes)))
        return len(steps) if initial else len(active)

    assert_all(on_ranks(rank, len(steps)), by_hand(steps, total, epochs=2, passes=max(1, passes)))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", [True, False])
def test_buffers_go_along_and_are_the_same_at_the_end(steps: list[int], mode: bool) -> None:
    def rank(comm: Communicator) -> Any:
        model = DataParallel(make_net(nn.BatchNorm1d(4)), comm, broadcast_buffers=mode)
        optimizer = make_optimizer(model.module)
        with model.join(optimizers=[optimizer]):
            for step in range(steps[comm.rank]):
                optimizer.zero_grad()
                loss_of(model, rows(comm.rank, step)).backward()
                optimizer.step()
        return model.module.state_dict()

    everyones = on_ranks(rank, len(steps))
    assert_all(everyones, everyones[0])
    # That of the rank that came last: it has counted every step.
    assert everyones[0]["1.num_batches_tracked"] == max(steps)


def test_all_ranks_are_told_when_the_first_is_through_if_that_was_asked_for() -> None:
    steps = [3, 1, 2]
    done: dict[int, int] = {}

    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm)

        def train() -> None:
            with model.join(throw_on_early_termination=True):
                for step in range(steps[comm.rank]):
                    model.zero_grad()
                    loss_of(model, rows(comm.rank, step)).backward()
                    done[comm.rank] = step + 1

        with pytest.raises(EarlyStop, match="rank 1 ran out of data, rank 0 has more: join"):
            train()
        model.zero_grad()
        loss_of(model, rows(comm.rank, 0)).backward()  # it was nobody's failure

    on_ranks(rank, 3)
    assert done == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("wrong", [3, [3], nn.Linear(1, 1)])
def test_optimizers_are_a_list_of_them(wrong: Any) -> None:
    model = DataParallel(make_net())
    with pytest.raises(DtypeError, match="join: optimizers is a list of"), model.join(optimizers=wrong):
        pass


@on_each_of(2)
def test_what_waits_at_the_end_of_join_names_the_line_of_the_with_statement(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    comm.barrier()
    model.comm.timeout = 1.0
    if comm.rank == 0:
        site = r"all_reduce #\d+ \(test_join\.py:\d+\)"
        with pytest.raises(CollectiveTimeout, match=site), model.join():
            pass
    comm.barrier()


@pytest.mark.parametrize("same", [True, False])
@on_each_of(2)
def test_join_inside_join_is_refused_on_every_rank_and_is_possible_afterwards(comm: Communicator, same: bool) -> None:
    models = [DataParallel(make_net(), comm) for _ in range(2)]
    with pytest.raises(ParallelError, match="join inside join"), models[0].join(), models[0 if same else 1].join():
        pass
    for model in models:
        with model.join():
            for step in range(1 + comm.rank):
                loss_of(model, rows(comm.rank, step)).backward()
