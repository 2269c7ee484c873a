"""State in parts and state as a whole are one format: it moves between numbers of ranks, and to the plain optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from collectives import Communicator
from ddp import nn, optim
from ddp.errors import StateDictError
from ddp.parallel import DataParallel
from ddp.parallel.zero import ZeroOptimizer
from ddp.parallel.zero.shards import join_state
from tests.ddp.optim.wide_state import WideState, kinds
from tests.ddp.parallel.ranks import on_each_of, on_ranks
from tests.ddp.parallel.zero.training import (
    OPTIMIZERS,
    assert_equal,
    batch,
    optimizer_of,
    replan,
    train,
    wrapped,
)


def test_state_of_pytorch_loads(torch: Any) -> None:
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, 60).reshape(12, 5))
    adam = torch.optim.Adam([theirs], lr=0.1)
    theirs.grad = theirs.detach().sin()
    adam.step()
    saved = adam.state_dict()

    def rank(comm: Communicator) -> None:
        zero = ZeroOptimizer(DataParallel(nn.Linear(5, 12, bias=False), comm), optim.Adam, lr=0.5)
        zero.load_state_dict(saved)
        actual = zero.state_dict()
        assert actual["param_groups"][0]["lr"] == 0.1
        for name, value in saved["state"][0].items():
            assert_equal(actual["state"][0][name].numpy(), value.numpy())

    on_ranks(rank, 3)


# Of another kind than most; test_equality.py compares the state dicts of all.
UNLIKE = (optim.Adam, optim.Adagrad)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(
            kind, settings, id=f"{kind.__name__}-{len(settings)}", marks=[] if kind in UNLIKE else pytest.mark.long
        )
        for kind, settings in OPTIMIZERS
    ],
)
def test_training_goes_on_at_2_3_1_ranks_and_unsharded(kind: Any, settings: dict[str, Any]) -> None:
    """Every rank trains on the whole batch, so that a step is the same whatever the number of ranks."""

    def go(size: int, sharded: bool, steps: range, carried: Any = None) -> Any:
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

        results = on_ranks(rank, size)
        assert_equal(results, results[:1] * size)
        return results[0]

    expected = go(1, False, range(8))
    got = go(2, True, range(2))
    got = go(3, True, range(2, 4), got)
    got = go(1, True, range(4, 5), got)
    got = go(1, False, range(5, 6), got)
    got = go(4, True, range(6, 8), got)
    if kind is optim.Adagrad:
        expected[1]["state"] = {n: e for n, e in expected[1]["state"].items() if n in got[1]["state"]}
    assert_equal(got, expected)


def test_each_rank_holds_its_part_of_the_state() -> None:
    def rank(comm: Communicator) -> Any:
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
        results = on_ranks(rank, size)
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


@on_each_of(2)
def test_state_of_one_s_own_keeps_types_and_dtypes(comm: Communicator) -> None:
    """Over a new plan of buckets, a state dict, and one in another order of the parameters."""

    def kinds_of(zero: ZeroOptimizer) -> dict[int, Any]:
        for *_, entry in zero.state_pieces():
            assert (entry["scalar"].shape, entry["array_scalar"].shape, entry["one"].shape) == ((), (), (1,))
        return {number: kinds(entry) for number, entry in zero.state_dict()["state"].items()}

    net = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3, dtype=ddp.bfloat16))
    net.scale = nn.Parameter(ddp.tensor(0.5))
    net.factor = nn.Parameter(ddp.ones(1, 1))
    net.forward = lambda x: net[1](net[0](x * net.scale * net.factor).to(ddp.bfloat16)).float()
    model = DataParallel(net, comm, bucket_cap_mb=0.0001)
    named = list(net.named_parameters())
    zero = ZeroOptimizer(model, WideState, named)
    model(ddp.ones(2, 5)).square().sum().backward()
    zero.step()
    before = zero.state_dict()
    expected = kinds_of(zero)
    assert {dtype for entry in expected.values() for _, dtype, _, _ in entry.values()} == {"float32", "float64"}
    assert {entry["array"][0] for entry in expected.values()} == {np.ndarray}
    replan(model, 1)
    assert kinds_of(zero) == expected
    zero.load_state_dict(before)
    assert kinds_of(zero) == expected
    model.close()
    other = ZeroOptimizer(DataParallel(net, comm), WideState, named[::-1])
    other.load_state_dict(before)
    assert {5 - number: entry for number, entry in kinds_of(other).items()} == expected


@on_each_of(3)
def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank(comm: Communicator) -> None:
    model = wrapped(comm)
    zero = ZeroOptimizer(model, optim.Adam, lr=0.1)
    train(model, zero, range(2))
    before = zero.state_dict()
    wrong = zero.state_dict()
    wrong["state"][0] = {**wrong["state"][0], "exp_avg": ddp.zeros(22)}
    wrong["param_groups"][0]["lr"] = 0.5
    for state in (wrong, {"state": {}}, {"state": {}, "param_groups": []}):
        with pytest.raises(StateDictError):
            zero.load_state_dict(state)
    with pytest.raises(StateDictError, match=r"state 'exp_avg' of shape \(22,\) for scale of shape \(23,\)"):
        zero.load_state_dict(wrong)

    def damaged(number: int, start: int, stop: int) -> dict[str, Any]:
        if number:
            raise OSError("damaged")
        return {}

    with pytest.raises(OSError, match="damaged"):
        zero.load_state_pieces(wrong["param_groups"], damaged)
    assert zero.param_groups[0]["lr"] == 0.1
    assert_equal(zero.state_dict(), before)


def test_a_piece_of_one_element_cannot_tell_its_part_from_a_state_of_one_element() -> None:
    p = ddp.zeros(3)
    first = (0, 0, 1, {"one": np.ones(1), "each": np.array([5.0])})
    second = (0, 1, 3, {"one": np.ones(1), "each": np.array([6.0, 7.0])})
    whole = join_state([second, first], [p])
    assert {name: value.tolist() for name, value in whole[0].items()} == {"one": [1.0], "each": [5.0, 6.0, 7.0]}
