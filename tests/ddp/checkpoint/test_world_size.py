"""A training that goes on at another number of ranks: every sample once, and losses within rounding."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives.communicator import Communicator
from ddp import nn
from ddp.checkpoint import Checkpointer, load_model
from ddp.optim import SGD, AdamW
from ddp.parallel import ZeroOptimizer, comm_hooks
from tests.ddp.checkpoint.training import all_samples, data, interrupted, net, training_on_samples
from tests.ddp.optim.wide_state import WideState, kinds


def whole(model: Any) -> Any:
    return AdamW(model.parameters(), lr=0.02)


def sharded(model: Any) -> Any:
    return ZeroOptimizer(model, AdamW, lr=0.02)


@pytest.mark.parametrize("make", [None, sharded], ids=["whole", "sharded"])
def test_two_then_one_then_four(make: Any, folder: Path) -> None:
    [uninterrupted] = interrupted(training_on_samples(folder / "whole", make), [None], 2)
    parts = interrupted(training_on_samples(folder / "parts", make), [4, 7, None], [2, 1, 4])
    losses = {}
    for part in parts:
        assert losses.keys().isdisjoint(part[0][0])
        losses.update(part[0][0])
    expected = uninterrupted[0][0]
    assert list(losses) == list(expected) == list(range(9))
    assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-12)
    assert all_samples(parts)


def test_sharded_state_loads_into_the_whole_optimizer_and_back(folder: Path) -> None:
    [expected] = interrupted(training_on_samples(folder / "whole", whole), [None], 2)
    got = {}
    for make, end in ((sharded, 3), (whole, 6), (sharded, None)):
        [part] = interrupted(training_on_samples(folder / "parts", make), [end], 2)
        got.update(part[0][0])
    assert got == expected[0][0]


@pytest.mark.parametrize("saved_sharded", [True, False])
def test_state_of_one_s_own_keeps_its_shapes(saved_sharded: bool, folder: Path) -> None:
    """Also that of parameters of one element, of which a rank has one element, and of none."""

    def train(comm: Communicator, make: Any, folder: Path = folder / "parts") -> dict[int, Any]:
        params = nn.ParameterList([nn.Parameter(ddp.ones(shape)) for shape in ((), (1, 1), (17,), (0, 3))])
        params.forward = lambda: sum(p.sum() for p in params)
        model = ddp.DataParallel(params, comm)
        optimizer = make(model)
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            if not ckpt.load():
                model().backward()
                optimizer.step()
                ckpt.save()
            state = {number: kinds(entry) for number, entry in optimizer.state_dict()["state"].items()}
            model().backward()
            optimizer.step()
        return state

    def own(model: Any) -> Any:
        return WideState(model.parameters())

    def own_sharded(model: Any) -> Any:
        return ZeroOptimizer(model, WideState)

    expected = train(collectives.init("single"), own, folder / "whole")
    for make, size in ((own_sharded if saved_sharded else own, 3), (own_sharded, 2), (own, 2)):
        for state in collectives.run_threads(lambda comm, make=make: train(comm, make), size=size):
            assert state == expected


def test_what_hooks_have_left_out_is_kept(folder: Path) -> None:
    """The sum over ranks of what they will still send is the same before and after."""
    results = []

    def train(comm: Communicator, steps: int) -> None:
        hook = comm_hooks.TopK(0.1)
        model = ddp.DataParallel(net(dtype=ddp.float64), comm, comm_hook=hook)
        optimizer = SGD(model.parameters(), lr=0.1)
        xs, ys = data(ddp.float64)
        with Checkpointer(folder, model=model, optimizer=optimizer, comm=comm) as ckpt:
            ckpt.load()
            for _ in range(steps):
                nn.functional.cross_entropy(model(xs[comm.rank :: comm.size]), ys[comm.rank :: comm.size]).backward()
                optimizer.step()
            left = hook.state_dict()["errors"]
            total = Counter()
            for each in comm.all_gather_object({name: value.sum().item() for name, value in left.items()}):
                total.update(each)
            if comm.rank == 0:
                results.append(total)
            ckpt.save()

    for size, steps in ((3, 4), (2, 0), (4, 0), (1, 0)):
        collectives.run_threads(lambda comm, steps=steps: train(comm, steps), size=size)
    first, *others = results
    assert any(first.values())
    for each in others:
        assert each == pytest.approx(first, rel=1e-12)


def test_one_line_says_what_is_not_as_it_was(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = net(dtype=ddp.float64)
    before = {name: value.numpy().copy() for name, value in bare.state_dict().items()}
    with caplog.at_level(logging.WARNING, "ddp.checkpoint"):
        interrupted(training_on_samples(folder), [2, 4, None], [2, 4, 2])
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "step-0000000002: saved by 2 ranks and loaded by 4: random numbers of ranks 2-3 begin anew" in texts[0]
    assert "step-0000000004: saved by 4 ranks and loaded by 2: what ranks 2-3 had alone is left out" in texts[1]
    assert not load_model(folder, bare).missing_keys  # one process reads it, whichever wrote it
    assert all((before[name] != value.numpy()).any() for name, value in bare.state_dict().items())
