"""n ranks on shards equal one rank on the whole batch; buckets overlap with backward, in one order on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.nn import functional as F
from ddp.parallel import DataParallel, ZeroOptimizer
from ddp.parallel.bucket_plan import Plan
from tests.ddp.parallel.ranks import Arrays, assert_same, gradients, on_each_of, on_ranks
from tests.ddp.parallel.recorder import Recorder

FEATURES, CLASSES = 6, 3


def make_net(seed: int = 0) -> nn.Module:
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


X = ddp.from_numpy(np.random.default_rng(7).normal(size=(4, FEATURES)))
T = ddp.from_numpy(np.random.default_rng(8).integers(0, CLASSES, 4))
ALL = slice(0, 4)


def part_of(rank: int) -> slice:
    """The rows of one of two ranks."""
    return slice(2 * rank, 2 * rank + 2)


def loss_sum(model: Any, rows: slice) -> ddp.Tensor:
    return F.cross_entropy(model(X[rows]), T[rows], reduction="sum")


def backward(model: DataParallel, rows: slice) -> None:
    model.backward(loss_sum(model, rows), weight=rows.stop - rows.start)


def on_whole_batch() -> Arrays:
    net = make_net()
    (loss_sum(net, ALL) / 4).backward()
    return gradients(net)


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_of_16_bit_gradients_is_rounded_once(size: int) -> None:
    def rank(comm: Communicator) -> None:
        layer = nn.Linear(1, 4, bias=False, dtype=ddp.float16)
        model = DataParallel(layer, comm)
        weight = 30_000_000 / size  # float16 has 1 / 30,000,000 as 6.0e-8, which is 1 / 16,777,216
        model.backward((model(ddp.full((1, 1), 1000 / size, dtype=ddp.float16))).sum(), weight=weight)
        assert (layer.weight.grad.numpy() == np.float16(1000 / 30_000_000)).all()

    on_ranks(rank, size)


class Branches(nn.Module):
    """Two heads; which one runs is asked of it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 4).double()
        self.left = nn.Linear(4, CLASSES).double()
        self.right = nn.Linear(4, CLASSES).double()
        self.never = nn.Linear(4, CLASSES).double()

    def forward(self, x: ddp.Tensor, order: str) -> ddp.Tensor:
        h = F.tanh(self.trunk(x))
        out = None
        for each in order.split():
            y = getattr(self, each)(h)
            out = y if out is None else out + y
        return out


def test_buckets_go_in_plan_order_while_backward_runs_though_ranks_become_ready_in_different_orders() -> None:
    def rank(comm: Communicator) -> Any:
        events: list[Any] = []
        ddp.manual_seed(0)
        seen: Any = Recorder(comm, events, lambda name, x: x.size)
        model = DataParallel(Branches(), seen, bucket_cap_mb=1e-5)
        order = "left right never" if comm.rank == 0 else "never right left"
        for name, p in model.module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        for _ in range(2):
            events.clear()
            model(X, order).sum().backward()
        launches = [position for position, event in enumerate(events) if isinstance(event, int)]
        ready = [event for event in events if isinstance(event, str)]
        assert launches[0] == 0  # the control message, before any gradient
        assert launches[1] < events.index(ready[-1])
        assert [events[at] for at in launches[1:]] == [each.size for each in model.reducer.buckets.memory.buffers]
        return ready

    first, second = on_ranks(rank)
    assert first != second
    assert sorted(first) == sorted(second)


@on_each_of(2)
def test_weights_and_no_weights_do_not_mix(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    with pytest.raises(ParallelError, match=rf"rank {comm.rank} called .*1 of 2 ranks with data gave a weight"):
        backward(model, ALL) if comm.rank == 0 else loss_sum(model, ALL).backward()
    model = DataParallel(make_net(), comm)
    with model.no_sync():
        loss_sum(model, ALL).backward()
    with pytest.raises(ParallelError, match="with and without a weight"):
        backward(model, ALL)
    model = DataParallel(make_net(), comm)
    backward(model, ALL)
    with pytest.raises(ParallelError, match=r"would add to 0\.weight\.grad, which is already a mean"):
        backward(model, ALL)


def after_gradients_that_were_thrown_away(model: DataParallel, rank: int) -> None:
    with model.no_sync():
        model.backward(loss_sum(model, ALL), weight=7)
    model.zero_grad()
    backward(model, part_of(rank))


def with_pytorchs_switch(model: DataParallel, rank: int) -> None:
    assert model.require_backward_grad_sync
    with model.no_sync():
        assert not model.require_backward_grad_sync
    for step in range(2):
        model.require_backward_grad_sync = step == 1
        first = 2 * step + rank
        backward(model, slice(first, first + 1))
        assert model.reducer.steps == step


@pytest.mark.parametrize("train", [after_gradients_that_were_thrown_away, with_pytorchs_switch])
def test_weights_give_the_mean_over_all_samples(train: Callable[[DataParallel, int], None]) -> None:
    def rank(comm: Communicator) -> Arrays:
        model = DataParallel(make_net(), comm)
        train(model, comm.rank)
        return gradients(model.module)

    for got in on_ranks(rank):
        assert_same(got, on_whole_batch())


def test_one_backward_through_two_wrapped_models_has_one_weight() -> None:
    def rank(comm: Communicator) -> Arrays:
        net = make_net()
        body, head = DataParallel(net[0], comm), DataParallel(net[2], comm)
        rows = slice(3, 4) if comm.rank else slice(3)
        logits = net[4](net[3](head(net[1](body(X[rows])))))
        head.backward(F.cross_entropy(logits, T[rows], reduction="sum"), weight=3 - 2 * comm.rank)
        return gradients(net[:4])

    expected = {name: g for name, g in on_whole_batch().items() if name[0] != "4"}
    for got in on_ranks(rank):
        assert_same(got, expected)


def test_the_gradient_of_a_frozen_parameter_stays() -> None:
    def rank(comm: Communicator) -> Any:
        net = make_net()
        rows = part_of(comm.rank)
        actual = []
        model = DataParallel(net, comm)
        for _ in range(5):  # the plan changes meanwhile
            backward(model, rows)
            actual.append(gradients(net))
            net[0].requires_grad_(False)
            net[2:].zero_grad()
        net[0].requires_grad_(True)
        with pytest.raises(ParallelError, match=r"would add to 0\.weight\.grad"):
            backward(model, rows)
        model.zero_grad()
        backward(model, rows)
        return [*actual, gradients(net)]

    expected = on_whole_batch()
    for steps in on_ranks(rank):
        for got in steps:
            assert_same(got, expected)


def test_a_mean_to_which_no_sync_has_added_is_reduced_though_it_is_frozen_then() -> None:
    def rank(comm: Communicator) -> Arrays:
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        nn.init.ones_(net[0].weight)
        nn.init.ones_(net[1].weight)
        model = DataParallel(net, comm)
        x = ddp.ones(1, 1) * (comm.rank + 1)
        model(x).sum().backward()  # the means over ranks: 1.5
        with model.no_sync():
            (model(x) if comm.rank == 0 else net[1](x)).sum().backward()  # on rank 1 it does not reach net[0]
        net[0].weight.requires_grad_(False)
        model(x).sum().backward()
        return gradients(net)

    first, second = on_ranks(rank)
    assert_same(first, second)
    assert_allclose(first["0.weight"], [[2.0]])  # of 1.5 + 1 and 1.5


def test_the_gradient_of_a_parameter_frozen_before_stays_while_others_accumulate() -> None:
    def rank(comm: Communicator) -> Any:
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model = DataParallel(net, comm)
        x = ddp.ones(1, 1) * (comm.rank + 1)
        model.backward(model(x).sum(), weight=1)
        before = gradients(net[0])
        net[0].requires_grad_(False)
        net[1].zero_grad()
        with model.no_sync():
            model.backward(model(x).sum(), weight=1)
        model.backward(model(x).sum(), weight=1)
        return before, gradients(net[0])

    for before, after in on_ranks(rank):
        assert_same(before, after)


def test_a_leaf_hook_runs_before_the_ranks_are_averaged() -> None:
    def rank(comm: Communicator) -> float:
        layer = nn.Linear(1, 1, bias=False)
        model = DataParallel(layer, comm)
        layer.weight.register_hook(lambda g: g * (10 if comm.rank == 0 else 100))
        model(ddp.ones(1, 1)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.item()

    assert on_ranks(rank) == [55.0, 55.0]


@pytest.mark.parametrize("sharded", [False, True])
@on_each_of(2)
def test_buckets_of_an_old_plan_are_freed_at_once(comm: Communicator, sharded: bool) -> None:
    model = DataParallel(make_net(), comm, bucket_cap_mb=1e-4)
    if sharded:
        ZeroOptimizer(model, ddp.optim.SGD, lr=0.1)
    for _ in range(2):
        model.zero_grad()
        backward(model, ALL)
    old = [weakref.ref(buffer) for buffer in model.reducer.buckets.memory.buffers]
    if sharded:
        old += [weakref.ref(shard.grad) for shard in model.reducer.exchange.shards]
    whole = Plan(buckets=(sum(model.plan.buckets, ()),), nbytes=(sum(model.plan.nbytes),), origin="one")
    model.load_plan_state({"plan": whole.state(), "backwards": 2})
    assert len(old) > 1
    assert not any(buffer() is not None for buffer in old)


@on_each_of(2)
def test_a_deleted_gradient_empties_its_slot_of_the_bucket(comm: Communicator) -> None:
    model = DataParallel(nn.Linear(3, 2), comm)
    x = ddp.ones(4, 3) * (comm.rank + 1)
    model(x).sum().backward()
    weight = model.module.weight
    before = weight.grad.tolist()
    slot = weight.grad.array
    del weight.grad
    assert weight.grad is None
    model(x).sum().backward()
    assert np.shares_memory(weight.grad.array, slot)
    assert weight.grad.tolist() == before
