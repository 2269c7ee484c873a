"""A model that goes on with another one's plan: the same buckets, and the same changes of them later."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from ddp import nn
from ddp.errors import ParallelError
from ddp.optim import SGD, AdamW
from ddp.parallel import ZeroOptimizer
from ddp.parallel.planning.planner import Planner

NAMES = ["a", "b", "c", "d"]


def planner(cap: int | None = 8) -> Planner:
    made = collectives.run_threads(lambda comm: Planner(comm, NAMES, [4] * 4, ["f"] * 4, cap=cap, first=4), size=1)[0]
    made.begin([True] * 4)
    return made


def test_planning_goes_on_where_it_was() -> None:
    """A parameter that was idle for nine backwards loses its place after one more, here and there."""
    used = [True, True, False, True]
    first, second = planner(), planner()
    for _ in range(9):
        assert first.after(np.arange(4.0), 1.0, used) is None
    second.restore(json.loads(json.dumps(first.state())))
    assert second.plan == first.plan
    plans = [each.after(np.arange(4.0), 1.0, used) for each in (first, second)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].buckets == plans[1].buckets
    assert all("c" not in bucket for bucket in plans[1].buckets)
    third = planner()
    third.restore(first.state())
    assert third.placed == [True, True, False, True]


def test_a_plan_of_something_else_changes_nothing() -> None:
    mine = planner()
    before = mine.state()
    with pytest.raises(ParallelError, match="no parameter is named z"):
        mine.restore({**before, "plan": {"buckets": [["z"]], "nbytes": [4], "from": ""}})
    assert (mine.state(), mine.placed) == (before, [True] * 4)


def make(comm: collectives.Communicator, sharded: bool) -> tuple[Any, Any]:
    ddp.manual_seed(4)
    net = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))
    model = ddp.DataParallel(net, comm, first_bucket_mb=1e-4, bucket_cap_mb=5e-4)
    return model, ZeroOptimizer(model, AdamW) if sharded else SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    rng = np.random.default_rng([seed, model.comm.rank])
    model(ddp.tensor(rng.standard_normal((3, 9)), dtype=ddp.float32)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_live_model_takes_it_over_and_sums_to_the_same_bits(sharded: bool) -> None:
    """On three ranks the order in which a bucket's parts are added up depends on the plan."""

    def run(comm: collectives.Communicator) -> bool:
        model, optimizer = make(comm, sharded)
        for seed in range(2):
            step(model, optimizer, seed)
        other, second = make(comm, sharded)
        other.load_state_dict(model.state_dict())
        other.load_plan_state(json.loads(json.dumps(model.plan_state())))
        second.load_state_dict(optimizer.state_dict())
        assert other.plan.buckets == model.plan.buckets
        for seed in range(2, 5):
            step(model, optimizer, seed)
            step(other, second, seed)
        theirs = other.state_dict()
        return all(t.numpy().tobytes() == theirs[name].numpy().tobytes() for name, t in model.state_dict().items())

    assert all(collectives.run_threads(run, size=3))


def test_what_is_no_plan_is_told() -> None:
    def run(comm: collectives.Communicator) -> None:
        model, _ = make(comm, False)
        for wrong in ({}, {"plan": 3}, {**model.plan_state(), "idle": 3}):
            with pytest.raises(ParallelError, match="plan"):
                model.load_plan_state(wrong)

    collectives.run_threads(run, size=2)
