"""n ranks on shards equal one rank on the whole batch; buckets overlap with backward, in one order on every rank."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.nn import functional as F
from ddp.parallel import DataParallel, ZeroOptimizer
from ddp.parallel.bucket_plan import Plan
from tests.ddp.parallel.ranks import assert_same, gradients, on_ranks
from tests.ddp.parallel.recorder import Recorder

FEATURES, CLASSES = 6, 3


def make_net(seed: int = 0) -> nn.Module:
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


def data(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(n, FEATURES)), rng.integers(0, CLASSES, n)


def loss_sum(model: Any, x: np.ndarray, t: np.ndarray) -> ddp.Tensor:
    return F.cross_entropy(model(ddp.from_numpy(x)), ddp.from_numpy(t), reduction="sum")


def on_whole_batch(n: int) -> dict[str, np.ndarray]:
    net = make_net()
    x, t = data(n)
    F.cross_entropy(net(ddp.from_numpy(x)), ddp.from_numpy(t)).backward()
    return gradients(net)


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_of_16_bit_gradients_is_rounded_once(size: int) -> None:
    def rank(comm: Communicator) -> None:
        layer = nn.Linear(1, 4, bias=False, dtype=ddp.float16)
        model = DataParallel(layer, comm)
        weight = 30_000_000 / size  # float16 has 1 / 30,000,000 as 6.0e-8, which is 1 / 16,777,216
        model.backward((model(ddp.full((1, 1), 1000 / size, dtype=ddp.float16))).sum(), weight=weight)
        assert_array_equal(layer.weight.grad.numpy(), np.full((4, 1), 1000 / 30_000_000, np.float16))

    collectives.run_threads(rank, size)


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
    x, _ = data(4)

    def rank(comm: Communicator) -> tuple[list[Any], list[int]]:
        events: list[Any] = []
        ddp.manual_seed(0)
        seen: Any = Recorder(comm, events, lambda name, x: x.size)
        model = DataParallel(Branches(), seen, bucket_cap_mb=1e-5)
        order = "left right never" if comm.rank == 0 else "never right left"
        for name, p in model.module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        for _ in range(2):
            events.clear()
            model(ddp.from_numpy(x), order).sum().backward()
        return events, [buffer.size for buffer in model.reducer.buckets.memory.buffers]

    ranks = on_ranks(rank)
    for events, planned in ranks:
        launches = [position for position, event in enumerate(events) if isinstance(event, int)]
        assert launches[0] == 0  # the control message, before any gradient
        assert launches[1] < max(position for position, event in enumerate(events) if isinstance(event, str))
        assert [events[position] for position in launches[1:]] == planned
    ready = [[event for event in events if isinstance(event, str)] for events, _ in ranks]
    assert ready[0] != ready[1]
    assert sorted(ready[0]) == sorted(ready[1])


def test_weights_and_no_weights_do_not_mix() -> None:
    x, t = data(4)

    def across_ranks(model: DataParallel, comm: Communicator) -> None:
        loss = loss_sum(model, x, t)
        with pytest.raises(ParallelError, match=rf"rank {comm.rank} called .*1 of 2 ranks with data gave a weight"):
            model.backward(loss, weight=4) if comm.rank == 0 else loss.backward()

    def across_passes(model: DataParallel, comm: Communicator) -> None:
        with model.no_sync():
            loss_sum(model, x, t).backward()
        with pytest.raises(ParallelError, match="with and without a weight"):
            model.backward(loss_sum(model, x, t), weight=4)

    def onto_a_mean(model: DataParallel, comm: Communicator) -> None:
        model.backward(loss_sum(model, x, t), weight=4)
        with pytest.raises(ParallelError, match=r"would add to 0\.weight\.grad, which is already a mean"):
            model.backward(loss_sum(model, x, t), weight=4)

    for check in (across_ranks, across_passes, onto_a_mean):
        on_ranks(lambda comm, check=check: check(DataParallel(make_net(), comm), comm))


def test_weights_of_gradients_that_were_thrown_away_do_not_count() -> None:
    x, t = data(4)

    def rank(comm: Communicator) -> dict[str, np.ndarray]:
        model = DataParallel(make_net(), comm)
        mine = slice(comm.rank * 2, comm.rank * 2 + 2)
        with model.no_sync():
            model.backward(loss_sum(model, x, t), weight=7)
        model.zero_grad()
        model.backward(loss_sum(model, x[mine], t[mine]), weight=2)
        return gradients(model.module)

    for got in collectives.run_threads(rank, 2):
        assert_same(got, on_whole_batch(4))


def test_one_backward_through_two_wrapped_models_has_one_weight() -> None:
    x, t = data(4)

    def rank(comm: Communicator) -> dict[str, np.ndarray]:
        net = make_net()
        body, head = DataParallel(net[0], comm), DataParallel(net[2], comm)
        mine = slice(comm.rank * 3, comm.rank * 3 + (3 if comm.rank == 0 else 1))
        hidden = net[1](body(ddp.from_numpy(x[mine])))
        logits = net[4](net[3](head(hidden)))
        head.backward(F.cross_entropy(logits, ddp.from_numpy(t[mine]), reduction="sum"), weight=len(x[mine]))
        return {name: g for name, g in gradients(net).items() if name[0] in "02"}

    expected = {name: g for name, g in on_whole_batch(4).items() if name[0] in "02"}
    for got in collectives.run_threads(rank, 2):
        assert_same(got, expected)


def test_pytorchs_switch_for_accumulation() -> None:
    x, t = data(4)

    def rank(comm: Communicator) -> dict[str, np.ndarray]:
        model = DataParallel(make_net(), comm)
        assert model.require_backward_grad_sync
        with model.no_sync():
            assert not model.require_backward_grad_sync
        for step in range(2):
            model.require_backward_grad_sync = step == 1
            mine = slice(step * 2 + comm.rank, step * 2 + comm.rank + 1)
            model.backward(loss_sum(model, x[mine], t[mine]), weight=1)
            assert model.reducer.steps == step
        return gradients(model.module)

    for got in collectives.run_threads(rank, 2):
        assert_same(got, on_whole_batch(4))


def test_a_parameter_unfrozen_and_used_on_one_rank_is_reduced_on_all() -> None:
    x, _ = data(4)

    def rank(comm: Communicator) -> Any:
        ddp.manual_seed(0)
        net = Branches()
        net.right.requires_grad_(False)
        model = DataParallel(net, comm)
        net.right.requires_grad_(True)
        model(ddp.from_numpy(x), "left" if comm.rank == 0 else "left right").sum().backward()
        return gradients(net)

    ddp.manual_seed(0)
    alone = Branches()
    alone(ddp.from_numpy(x), "left right").sum().backward()
    first, second = collectives.run_threads(rank, 2)
    assert_same(first, second)
    assert_allclose(first["right.weight"], gradients(alone)["right.weight"] / 2, atol=1e-14)


def test_the_gradient_of_a_frozen_parameter_stays() -> None:
    x, t = data(4)

    def rank(comm: Communicator) -> list[dict[str, np.ndarray]]:
        net = make_net()
        mine = slice(comm.rank * 2, comm.rank * 2 + 2)
        actual = []
        model = DataParallel(net, comm)
        for _ in range(5):  # the plan changes meanwhile
            model.backward(loss_sum(model, x[mine], t[mine]), weight=1)
            actual.append(gradients(net))
            net[0].requires_grad_(False)
            net[2].zero_grad()
            net[4].zero_grad()
        net[0].requires_grad_(True)
        with pytest.raises(ParallelError, match=r"would add to 0\.weight\.grad"):
            model.backward(loss_sum(model, x[mine], t[mine]), weight=1)
        model.zero_grad()
        model.backward(loss_sum(model, x[mine], t[mine]), weight=1)
        return [*actual, gradients(net)]

    expected = on_whole_batch(4)  # the mean over four samples; a step's is their sum over two ranks
    for first, *others in collectives.run_threads(rank, 2):
        assert_allclose(others[-1]["0.weight"], 2 * expected["0.weight"], atol=1e-14)
        for got in others[:-1]:
            assert_array_equal(got["0.weight"], first["0.weight"])
            assert_allclose(got["2.weight"], 2 * expected["2.weight"], atol=1e-14)


def test_a_mean_to_which_no_sync_has_added_is_reduced_though_it_is_frozen_then() -> None:
    def rank(comm: Communicator) -> dict[str, np.ndarray]:
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

    first, second = collectives.run_threads(rank, 2)
    assert_same(first, second)
    assert_allclose(first["0.weight"], [[2.0]])  # of 1.5 + 1 and 1.5


def test_the_gradient_of_a_parameter_frozen_before_stays_while_others_accumulate() -> None:
    def rank(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model = DataParallel(net, comm)
        x = ddp.ones(1, 1) * (comm.rank + 1)
        model.backward(model(x).sum(), weight=1)
        before = {name: array.copy() for name, array in gradients(net[0]).items()}
        net[0].requires_grad_(False)
        net[1].zero_grad()
        with model.no_sync():
            model.backward(model(x).sum(), weight=1)
        model.backward(model(x).sum(), weight=1)
        return before, gradients(net[0])

    for before, after in collectives.run_threads(rank, 2):
        assert_same(before, after)


def test_a_leaf_hook_runs_before_the_ranks_are_averaged() -> None:
    def rank(comm: Communicator) -> float:
        layer = nn.Linear(1, 1, bias=False)
        model = DataParallel(layer, comm)
        layer.weight.register_hook(lambda g: g * (10 if comm.rank == 0 else 100))
        model(ddp.ones(1, 1)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.item()

    assert collectives.run_threads(rank, 2) == [55.0, 55.0]


@pytest.mark.parametrize("sharded", [False, True])
def test_buckets_of_an_old_plan_are_freed_at_once(sharded: bool) -> None:
    def rank(comm: Communicator) -> None:
        model = DataParallel(make_net(), comm, bucket_cap_mb=1e-4)
        if sharded:
            ZeroOptimizer(model, ddp.optim.SGD, lr=0.1)
        x, t = data(4)
        for _ in range(2):
            model.zero_grad()
            loss_sum(model, x, t).backward()
        old = [weakref.ref(buffer) for buffer in model.reducer.buckets.memory.buffers]
        if sharded:
            old += [weakref.ref(shard.grad) for shard in model.reducer.exchange.shards]
        whole = Plan(buckets=(sum(model.plan.buckets, ()),), nbytes=(sum(model.plan.nbytes),), origin="one")
        model.load_plan_state({"plan": whole.state(), "backwards": 2})
        assert len(old) > 1
        assert not any(buffer() is not None for buffer in old)

    collectives.run_threads(rank, 2)


def test_a_deleted_gradient_empties_its_slot_of_the_bucket() -> None:
    def run(comm: Communicator) -> None:
        model = DataParallel(nn.Linear(3, 2), comm)
        x = ddp.ones(4, 3) * (comm.rank + 1)
        model(x).sum().backward()
        weight = model.module.weight
        before = weight.grad.numpy().copy()
        slot = weight.grad.array
        del weight.grad
        assert weight.grad is None
        model(x).sum().backward()
        assert np.shares_memory(weight.grad.array, slot)
        assert_array_equal(weight.grad.numpy(), before)

    on_ranks(run, 2)
