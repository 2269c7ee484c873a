"""When the collectives of a step begin, how many there are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from collectives import Communicator, PeerLeft
from ddp import nn, optim
from ddp.errors import ArgumentError, DtypeError, ParallelError
from ddp.nn.utils import clip_grad_norm_
from ddp.parallel import DataParallel
from ddp.parallel.zero import ZeroOptimizer
from tests.ddp.parallel.ranks import on_each_of
from tests.ddp.parallel.recorder import Recorder
from tests.ddp.parallel.zero.training import Net, backward, replan, train, values, wrapped


def recorded(comm: Communicator) -> tuple[DataParallel, ZeroOptimizer, list[str]]:
    """A model that has made steps, and the events of those that follow."""
    events: list[str] = []
    model: Any = DataParallel(
        Net(),
        Recorder(comm, events),
        bucket_cap_mb=0.002,
        first_bucket_mb=0.001,
        broadcast_buffers=False,
        check_every=0,
    )
    zero = ZeroOptimizer(model, optim.Adam, lr=0.1)
    train(model, zero, range(3))
    zero.zero_grad()
    events.clear()
    return model, zero, events


@on_each_of(2)
def test_a_step_is_one_control_message_and_two_collectives_a_bucket(comm: Communicator) -> None:
    model, zero, events = recorded(comm)
    buckets = len(model.reducer.buckets.members)
    assert buckets >= 3
    backward(model, 0, sometimes=True)
    assert events == ["all_reduce", *["reduce_scatter"] * buckets]
    events.clear()
    zero.step()
    assert events == ["all_gather"] * buckets
    events.clear()
    zero.clip_grad_norm_(1.0)
    assert events == ["all_gather"]


@on_each_of(2)
def test_buckets_leave_while_backward_computes_and_come_back_while_the_next_is_updated(comm: Communicator) -> None:
    model, zero, events = recorded(comm)
    model.module.first.weight.register_post_accumulate_grad_hook(lambda p: events.append("last gradient"))
    for shard in zero._shards.shards:
        if shard.optimizer is not None:
            shard.optimizer.register_step_pre_hook(lambda *_: events.append("update"))
    backward(model, 0)
    last = events.index("last gradient")
    assert 2 <= events[:last].count("reduce_scatter") < events.count("reduce_scatter")
    events.clear()
    zero.step()
    updates = [position for position, event in enumerate(events) if event == "update"]
    assert "all_gather" in events[updates[0] : updates[-1]]


@on_each_of(2)
def test_a_gradient_in_parts_cannot_be_read(comm: Communicator) -> None:
    model = wrapped(comm)
    zero = ZeroOptimizer(model, optim.SGD, lr=0.1)
    weight = model.module.first.weight
    assert weight.grad is None
    with model.no_sync():
        backward(model, 0)
    assert weight.grad is not None  # this rank's own sum
    backward(model, 1)
    assert model.module.never.grad is None
    with pytest.raises(ParallelError, match=r"zero\.clip_grad_norm_\(max_norm\)"):
        clip_grad_norm_(model.parameters(), 1.0)
    replan(model, 1)
    with pytest.raises(ParallelError, match=r"zero\.clip_grad_norm_\(max_norm\)"):
        _ = weight.grad
    zero.step()
    zero.zero_grad()
    assert weight.grad is None


@on_each_of(2)
def test_gradients_that_were_not_reduced_are_refused(comm: Communicator) -> None:
    model = wrapped(comm)
    backward(model, 0)
    zero = ZeroOptimizer(model, optim.SGD, lr=0.1)
    with pytest.raises(ParallelError, match=r"step: the gradient of scale has not been reduced"):
        zero.step()
    zero.zero_grad()
    before = values(model)
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(ParallelError, match="no_sync"):
        zero.clip_grad_norm_(1.0)
    zero.zero_grad()
    backward(model, 0)
    model.module.scalar.grad = ddp.tensor(1.0)
    with pytest.raises(ParallelError, match="the gradient of scalar has not been reduced"):
        zero.step()
    assert all((values(model)[name] == value).all() for name, value in before.items())


@on_each_of(2)
def test_a_backward_onto_clipped_gradients_is_refused_before_anything_is_sent(comm: Communicator) -> None:
    model, zero, events = recorded(comm)
    backward(model, 0)
    zero.clip_grad_norm_(1e-3)
    events.clear()
    with pytest.raises(ParallelError, match=r"backward would add to the gradient of scale.*zero_grad\(\)"):
        backward(model, 1)
    assert events == []
    zero.zero_grad()
    backward(model, 1)
    zero.step()


@on_each_of(1)
def test_parameters_are_the_model_s_each_once(comm: Communicator) -> None:
    model = wrapped(comm)
    params = list(model.module.parameters())
    trained = [p for p in params if p.requires_grad]
    with pytest.raises(ArgumentError, match=r"sometimes, never, empty, scalar, \.\.\. would not be"):
        ZeroOptimizer(model, optim.SGD, params[:1])
    with pytest.raises(ArgumentError, match=r"a tensor of shape \(2,\) is no parameter of the model"):
        ZeroOptimizer(model, optim.SGD, [*params, ddp.ones(2, requires_grad=True)])
    with pytest.raises(DtypeError, match="expected a DataParallel, got Net"):
        ZeroOptimizer(model.module, optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="expected a class of optimizers"):
        ZeroOptimizer(model, nn.Linear)  # type: ignore[arg-type]
    backward(model, 0)  # nothing has happened to the model
    assert model.module.first.weight.grad is not None
    zero = ZeroOptimizer(model, optim.SGD, trained, lr=0.5)
    assert repr(zero).startswith("ZeroOptimizer of SGD (\nParameter Group 0\n")
    with pytest.raises(ArgumentError, match="groups are given when it is made"):
        zero.add_param_group({"params": [model.module.frozen]})
    with pytest.raises(ParallelError, match="has a ZeroOptimizer"):
        ZeroOptimizer(model, optim.SGD)


@on_each_of(2)
def test_a_rank_that_makes_no_step_is_named_with_the_bucket(comm: Communicator) -> None:
    model = DataParallel(Net(), comm)
    zero = ZeroOptimizer(model, optim.SGD, lr=0.1)
    backward(model, 0)
    if comm.rank == 1:
        with pytest.raises(PeerLeft, match=r"ZeroOptimizer\.step: the parameters of bucket \d .*rank 0 has left"):
            zero.step()


@on_each_of(2)
def test_ranks_make_equal_numbers_of_steps(comm: Communicator) -> None:
    model = wrapped(comm)
    ZeroOptimizer(model, optim.SGD)
    with pytest.raises(ParallelError, match="a ZeroOptimizer's steps are collective"), model.join():
        pass


@on_each_of(2)
def test_a_model_is_wrapped_again_and_its_old_optimizer_says_so(comm: Communicator) -> None:
    first = wrapped(comm)
    zero = ZeroOptimizer(first, optim.Adam, lr=0.1)
    train(first, zero, range(2))
    model = DataParallel(first, comm)
    assert all(p.grad is None for p in model.parameters())  # each rank had a part of it
    backward(model, 2)
    assert model.module.first.weight.grad is not None
    with pytest.raises(ParallelError, match="was replaced"):
        zero.step()
    train(model, ZeroOptimizer(model, optim.Adam, lr=0.1), range(2))
