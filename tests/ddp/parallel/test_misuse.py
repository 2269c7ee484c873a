"""What is done wrong is answered, in words that say what, on which rank and at which step; what can go on does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import CollectiveTimeout, Communicator, PeerLeft
from ddp import nn
from ddp.errors import DtypeError, GraphError, ParallelError
from ddp.parallel import DataParallel
from tests.ddp.parallel.ranks import Arrays, assert_same, gradients, make_net, on_each_of, on_ranks, parameters


def rows(rank: int, n: int = 2) -> ddp.Tensor:
    return ddp.from_numpy(np.random.default_rng(rank).normal(size=(n, 3)))


def loss_of(model: nn.Module, rank: int, n: int = 2) -> ddp.Tensor:
    return model(rows(rank, n)).square().sum()


def expected_mean(size: int = 2) -> Arrays:
    net = make_net()
    for rank in range(size):
        loss_of(net, rank).backward()
    return {name: g / size for name, g in gradients(net).items()}


def assert_mean(model: DataParallel, size: int = 2) -> None:
    assert_same(gradients(model.module), expected_mean(size), 1e-13)


def assert_trains(model: DataParallel, comm: Communicator) -> None:
    """What went wrong is over: a step gives the mean."""
    model.zero_grad()
    loss_of(model, comm.rank).backward()
    assert_mean(model, comm.size)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def hurry(model: DataParallel, comm: Communicator) -> None:
    """From now on ranks wait for each other for a second, and all begin together."""
    comm.barrier()
    model.comm.timeout = 1.0


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("stays away", r"backward 1: the control message, before bucket 0 of 4 \(2.*"),
        ("raises half-way", r"backward 1: bucket \d of 4 \(0\.(weight|bias)\)"),
    ],
)
@on_each_of(3)
def test_a_rank_that_does_not_finish_backward_is_named_with_step_and_bucket(
    comm: Communicator, how: str, where: str
) -> None:
    model = DataParallel(make_net(), comm, bucket_cap_mb=1e-5)
    loss_of(model, comm.rank).backward()
    hurry(model, comm)
    if comm.rank != 1:
        with pytest.raises(CollectiveTimeout, match=f"{where}.*Rank 1 has not arrived"):
            loss_of(model, comm.rank).backward()
    elif how == "raises half-way":
        model.module[0].weight.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, comm.rank).backward()
    if comm.rank != 1 or how == "raises half-way":
        with pytest.raises(ParallelError, match=r"failed half-way on this rank .*start again from a checkpoint"):
            loss_of(model, comm.rank).backward()
    comm.barrier()


@pytest.mark.parametrize("part", ["_record_step", "_finish_gradients"])
@on_each_of(2)
def test_a_backward_interrupted_after_its_buckets_arrived_has_failed_half_way_too(
    comm: Communicator, part: str
) -> None:
    model = DataParallel(make_net(), comm)
    if comm.rank == 0:
        setattr(model.reducer, part, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, comm.rank).backward()
        with pytest.raises(ParallelError, match=r"failed half-way on this rank \(KeyboardInterrupt"):
            loss_of(model, comm.rank).backward()
    else:
        loss_of(model, comm.rank).backward()


@on_each_of(2)
def test_a_backward_interrupted_before_anything_was_sent_may_be_tried_again(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    start = model.reducer._start

    def interrupted(*_: Any) -> None:
        model.reducer._start = start
        raise KeyboardInterrupt

    with model.no_sync():
        model.backward(loss_of(model, comm.rank), weight=1)
    loss = loss_of(model, comm.rank)
    if comm.rank == 0:
        model.reducer._start = interrupted
        with pytest.raises(KeyboardInterrupt):
            model.backward(loss, weight=1)
    model.backward(loss, weight=1)
    assert_mean(model)


def test_one_rank_goes_on_after_a_backward_that_failed() -> None:
    model = DataParallel(make_net())
    handle = model.module[0].weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.backward(loss_of(model, 0), weight=3)
    handle.remove()
    model.zero_grad()
    model.backward(2 * loss_of(model, 0), weight=2)
    assert_mean(model, 1)


@on_each_of(2)
def test_a_gradient_that_a_user_assigned_is_reduced_with_what_is_added_to_it(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    for _ in range(2):
        model.zero_grad()
        for p in model.parameters():
            p.grad = ddp.full_like(p, 2.0 * comm.rank)
        loss_of(model, comm.rank).backward()
        assert_same(gradients(model.module), {name: g + 1 for name, g in expected_mean().items()}, 1e-13)


def test_a_backward_inside_a_backward_of_the_same_model_is_refused() -> None:
    model = DataParallel(make_net())

    def again(g: ddp.Tensor) -> None:
        loss_of(model, 0).backward()

    handle = model.module[0].weight.register_hook(again)
    with pytest.raises(ParallelError, match="started while another one runs"):
        loss_of(model, 0).backward()
    handle.remove()


@pytest.mark.parametrize("where", ["bucket", "unplaced"])
def test_check_finite_names_rank_and_parameter_and_the_model_goes_on(where: str) -> None:
    said: list[str] = []

    def rank(comm: Communicator) -> None:
        net = make_net()
        if where == "unplaced":
            net[2].weight.requires_grad_(False)
        model = DataParallel(net, comm, check_finite=True)
        net[2].weight.requires_grad_(True)
        handle = net[2].weight.register_hook(lambda g: g * float("nan") if comm.rank == 1 else None)
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(ParallelError, match="infinity or NaN") as caught:
                loss_of(model, comm.rank).backward()
            said.append(str(caught.value))
        handle.remove()
        assert_trains(model, comm)

    on_ranks(rank)
    expected = "step 0: infinity or NaN in the gradient of 2.weight on rank 1, before it was reduced"
    assert said == [expected] * 4


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), pytest.param(10**400, id="10**400"), "3", None])
def test_a_weight_is_a_number_of_samples(weight: Any) -> None:
    model = DataParallel(make_net())
    with pytest.raises(ParallelError, match="weight should be a number of samples"):
        model.backward(loss_of(model, 0), weight=weight)
    with pytest.raises(DtypeError, match="expected a loss, a Tensor, got float"):
        model.backward(3.0, weight=1)  # type: ignore[arg-type]


@on_each_of(2)
def test_backward_of_some_inputs_only_is_refused_and_autograd_grad_stays_on_this_rank(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    with pytest.raises(GraphError, match="under DataParallel"):
        loss_of(model, comm.rank).backward(inputs=[model.module[0].weight])
    (own,) = ddp.autograd.grad(loss_of(model, comm.rank), [model.module[0].weight])
    assert gradients(model.module) == {}
    net = make_net()
    loss_of(net, comm.rank).backward()
    assert_allclose(own.numpy(), gradients(net)["0.weight"], atol=1e-13)
    assert_trains(model, comm)


def fail_after(act: Callable[[], Any]) -> None:
    act()
    raise ZeroDivisionError


@on_each_of(2)
def test_exceptions_inside_no_sync_and_join_restore_what_was(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    for context in (model.no_sync, model.join):
        with pytest.raises(ZeroDivisionError), context():
            fail_after(loss_of(model, comm.rank).backward)
        assert_trains(model, comm)


def test_two_models_of_one_backward_may_be_reached_in_another_order_on_each_rank() -> None:
    def rank(comm: Communicator) -> Any:
        first = DataParallel(make_net(seed=1), comm)
        second = DataParallel(make_net(seed=2), comm)
        for _ in range(6):
            first.zero_grad()
            second.zero_grad()
            one, other = loss_of(first, comm.rank), loss_of(second, comm.rank)
            (one + other if comm.rank == 0 else other + one).backward()
        return gradients(first.module), gradients(second.module)

    assert_same(*on_ranks(rank, timeout=5), 0)


def test_two_backwards_in_another_order_on_each_rank_are_told_by_their_models() -> None:
    def rank(comm: Communicator) -> None:
        models = [DataParallel(make_net(), comm), DataParallel(nn.Linear(3, 3).double(), comm)]
        order = models if comm.rank == 0 else models[::-1]
        here = "Sequential" if comm.rank == 0 else "Linear"
        named = rf"all_reduce #\d+ .* on \S+\.\d \(DataParallel of {here}\)"
        with pytest.raises((CollectiveTimeout, PeerLeft), match=named):  # the latter once the other has given up
            loss_of(order[0], comm.rank).backward()

    on_ranks(rank, timeout=1)


@on_each_of(2)
def test_a_copy_of_a_wrapped_model_is_its_module_bare_and_separate(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    loss_of(model, comm.rank).backward()
    before = parameters(model.module)
    twin = copy.deepcopy(model)
    within = copy.deepcopy({"ema": nn.Sequential(model), "net": model.module})
    assert type(twin) is type(model.module)
    assert within["ema"][0] is within["net"]  # one copy of each
    if comm.rank == 0:
        loss_of(twin, 0).backward()  # no other rank waits
    twin.float()
    with ddp.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    twin.load_state_dict(model.state_dict())  # as an average of weights does
    assert_same(parameters(model.module), before, 0)
    assert_same(parameters(twin), before, 1e-7)  # in float32
    for whole in (copy.copy, pickle.dumps):
        with pytest.raises(ParallelError, match=r"cannot be pickled.*model\.module.*copy\.deepcopy\(model\)"):
            whole(model)
    assert_trains(model, comm)


@on_each_of(2)
def test_a_closed_model_is_done_and_its_module_bare(comm: Communicator) -> None:
    model = DataParallel(make_net(), comm)
    loss_of(model, comm.rank).backward()
    before = gradients(model.module)
    kept = [p.grad for p in model.module.parameters()]
    model.close()
    model.close()
    if comm.rank == 0:
        model.module.zero_grad()
        loss_of(model.module, 0).backward()
    assert_same([g.numpy() for g in kept], [*before.values()], 0)  # the memory of the buckets is nobody's now
    for misuse in (lambda: model.backward(ddp.zeros(()), weight=0), lambda: loss_of(model, 0)):
        with pytest.raises(ParallelError, match="this DataParallel was closed: call its module"):
            misuse()
    model.module.float()
