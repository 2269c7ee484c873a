"""State in parts and state as a whole are one format: it moves between numbers of ranks, and to the plain optimizer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp import nn, optim
from ddp.errors import StateDictError
from ddp.optim import lr_scheduler
from ddp.parallel import DataParallel
from ddp.parallel.zero import ZeroOptimizer
from ddp.parallel.zero.shards import join_state
from tests.ddp.optim.wide_state import WideState, kinds
from tests.ddp.parallel.zero.training import (
    OPTIMIZERS,
    Make,
    arrays,
    assert_equal,
    assert_same_state,
    batch,
    compare,
    optimizer_of,
    replan,
    train,
    wrapped,
)

IDS = [f"{kind.__name__}-{len(settings)}" for kind, settings in OPTIMIZERS]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=IDS)
def test_the_state_dict_is_that_of_the_plain_optimizer(kind: Any, settings: dict[str, Any]) -> None:
    def rank(comm: Communicator, make: Make) -> tuple[dict[str, Any], list[str]]:
        model = wrapped(comm)
        optimizer = make(model, kind, **settings)
        lr_scheduler.StepLR(optimizer, 5)
        train(model, optimizer, range(3))
        return optimizer.state_dict(), [name for name, _ in model.module.named_parameters()]

    (expected, names), sharded = compare(rank, 3)
    if kind is optim.Adagrad:  # it begins at once for all; without a bucket that waits for the first gradient
        del expected["state"][names.index("frozen")]
    for got, _ in sharded:
        assert_same_state(got, expected)


def test_state_of_pytorch_loads() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

    gradients = [np.sin(np.arange(60, dtype=np.float32) + step).reshape(12, 5) for step in range(4)]
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, 60).reshape(12, 5))
    adam = torch.optim.Adam([theirs], lr=0.1)

    def their_steps(part: list[Any]) -> None:
        for g in part:
            theirs.grad = torch.tensor(g)
            adam.step()

    their_steps(gradients[:2])
    saved = copy.deepcopy(adam.state_dict())
    halfway = theirs.detach().numpy().copy()
    their_steps(gradients[2:])

    def rank(comm: Communicator) -> None:
        net = nn.Module()
        net.weight = nn.Parameter(ddp.from_numpy(halfway.copy()))
        net.forward = lambda g: (net.weight * g).sum()
        model = DataParallel(net, comm)
        zero = ZeroOptimizer(model, optim.Adam, lr=0.5)
        zero.load_state_dict(saved)
        for g in gradients[2:]:
            zero.zero_grad()
            model(ddp.from_numpy(g)).backward()
            zero.step()
        assert_allclose(net.weight.detach().numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)

    collectives.run_threads(rank, 3)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=IDS)
def test_training_goes_on_at_2_3_1_ranks_and_unsharded(kind: Any, settings: dict[str, Any]) -> None:
    """Every rank trains on the whole batch, so that a step is the same whatever the number of ranks."""

    def stage(sharded: bool, steps: range, carried: Any) -> Any:
        def rank(comm: Communicator) -> Any:
            model = wrapped(comm)
            optimizer = optimizer_of(model, sharded, kind, **settings)
            if carried is not None:
                model.module.load_state_dict(carried[0])
                optimizer.load_state_dict(carried[1])
            for step in steps:
                optimizer.zero_grad()
                x, t = batch(step, 0, 1)
                # One rank has the whole gradient, the others none: sums of it are exact.
                n = len(x) if comm.rank == 0 else 0
                loss = nn.functional.cross_entropy(model(x[:n], sometimes=step % 2 == 0), t[:n], reduction="sum")
                model.backward(loss, weight=n)
                optimizer.step()
            return model.module.state_dict(), optimizer.state_dict()

        return rank

    def go(size: int, sharded: bool, steps: range, carried: Any = None) -> Any:
        results = collectives.run_threads(stage(sharded, steps, carried), size)
        for net, state in results[1:]:
            assert_equal(arrays(net), arrays(results[0][0]))
            assert_same_state(state, results[0][1])
        return results[0]

    expected = go(1, False, range(8))
    got = go(2, True, range(2))
    got = go(3, True, range(2, 4), got)
    got = go(1, True, range(4, 5), got)
    got = go(1, False, range(5, 6), got)
    got = go(4, True, range(6, 8), got)
    assert_equal(arrays(got[0]), arrays(expected[0]))
    if kind is optim.Adagrad:
        expected[1]["state"] = {n: e for n, e in expected[1]["state"].items() if n in got[1]["state"]}
    assert_same_state(got[1], expected[1])


def test_each_rank_holds_its_part_of_the_state() -> None:
    def rank(comm: Communicator) -> tuple[int, int, int]:
        model = wrapped(comm)
        zero = ZeroOptimizer(model, optim.Adam, lr=0.1)
        train(model, zero, range(3))
        replan(model, 2)
        train(model, zero, range(3, 5))
        held = sum(memory.nbytes for memory in state_memory(zero))
        whole = sum(
            value.nbytes
            for entry in zero.state_dict()["state"].values()
            for name, value in entry.items()
            if name != "step"
        )
        return held, whole, len(model.reducer.buckets.members)

    for size in (1, 2, 4):
        results = collectives.run_threads(rank, size)
        _, whole, buckets = results[0]
        line, states = 64, 2
        assert sum(held for held, _, _ in results) >= whole
        for held, _, _ in results:
            # Besides, ranges begin on cache lines, and so do gradients inside a bucket: there are 11 of them.
            assert held <= whole / size + states * line * (buckets + 11)


def state_memory(zero: ZeroOptimizer) -> list[np.ndarray[Any, Any]]:
    """The arrays that own the memory of this rank's state, each once."""
    owners = {}
    for _, _, _, entry in zero.state_pieces():
        for name, value in entry.items():
            if name != "step":
                owner = value.array if value.array.base is None else value.array.base
                owners[id(owner)] = owner
    return list(owners.values())


def test_state_of_one_s_own_keeps_types_and_dtypes() -> None:
    """Over a new plan of buckets, a state dict, and one in another order of the parameters."""

    def rank(comm: Communicator) -> None:
        net = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3, dtype=ddp.bfloat16))
        net.forward = lambda x: net[1](net[0](x).to(ddp.bfloat16)).float()
        model = DataParallel(net, comm, bucket_cap_mb=0.0001)
        named = list(net.named_parameters())
        zero = ZeroOptimizer(model, WideState, named)
        train(model, zero)
        before = zero.state_dict()
        expected = {number: kinds(entry) for number, entry in before["state"].items()}
        assert {dtype for entry in expected.values() for _, dtype, _, _ in entry.values()} == {"float32", "float64"}
        assert {entry["array"][0] for entry in expected.values()} == {np.ndarray}
        replan(model, 1)
        assert {number: kinds(entry) for number, entry in zero.state_dict()["state"].items()} == expected
        zero.load_state_dict(before)
        assert {number: kinds(entry) for number, entry in zero.state_dict()["state"].items()} == expected
        model.close()
        other = ZeroOptimizer(DataParallel(net, comm), WideState, named[::-1])
        other.load_state_dict(before)
        assert {3 - number: kinds(entry) for number, entry in other.state_dict()["state"].items()} == expected

    def train(model: DataParallel, optimizer: ZeroOptimizer) -> None:
        model(ddp.ones(2, 5)).square().sum().backward()
        optimizer.step()

    collectives.run_threads(rank, 2)


def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank() -> None:
    def rank(comm: Communicator) -> None:
        model = wrapped(comm)
        zero = ZeroOptimizer(model, optim.Adam, lr=0.1)
        train(model, zero, range(2))
        before = zero.state_dict()
        wrong = zero.state_dict()
        wrong["state"][0] = {**wrong["state"][0], "exp_avg": ddp.zeros(22)}
        for state in (wrong, {"state": {}}, {"state": {}, "param_groups": []}):
            with pytest.raises(StateDictError):
                zero.load_state_dict(state)
        with pytest.raises(StateDictError, match=r"state 'exp_avg' of shape \(22,\) for scale of shape \(23,\)"):
            zero.load_state_dict(wrong)
        assert_same_state(zero.state_dict(), before)

    collectives.run_threads(rank, 3)


def test_a_piece_of_one_element_cannot_tell_its_part_from_a_state_of_one_element() -> None:
    p = ddp.zeros(3)
    first = (0, 0, 1, {"one": np.ones(1), "each": np.array([5.0])})
    second = (0, 1, 3, {"one": np.ones(1), "each": np.array([6.0, 7.0])})
    whole = join_state([second, first], [p])
    assert {name: value.tolist() for name, value in whole[0].items()} == {"one": [1.0], "each": [5.0, 6.0, 7.0]}
