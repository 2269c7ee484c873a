"""Whatever is drawn (ranks, buckets, plans, use, accumulation, weights, checkpoints): the unsharded numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import collectives
from collectives import Communicator
from ddp.nn import functional as F
from ddp.parallel import DataParallel
from tests.ddp.parallel.zero.training import (
    OPTIMIZERS,
    Arrays,
    Net,
    assert_equal,
    assert_same_state,
    batch,
    optimizer_of,
    replan,
    values,
)


def run(comm: Communicator, seed: int, sharded: bool) -> tuple[Arrays, dict[str, Any]]:
    """Eight steps of kinds that the seed draws."""
    dice = random.Random(seed)
    kind, settings = dice.choice(OPTIMIZERS)
    cap = dice.choice([0.0001, 0.001, 0.004, 1.0])
    model = DataParallel(Net(comm.rank), comm, bucket_cap_mb=cap, first_bucket_mb=cap)
    # A parameter without a place has no state yet where the plain Adagrad has begun one.
    model.module.frozen.requires_grad_(dice.random() < 0.5)
    optimizer = optimizer_of(model, sharded, kind, **settings)
    weighted = dice.random() < 0.5
    for step in range(8):
        optimizer.zero_grad(set_to_none=dice.random() < 0.8)
        passes = dice.choice([1, 1, 2, 3])
        user = dice.randrange(comm.size + 1)  # the rank that uses `sometimes`; none
        for each in range(passes):
            x, t = batch(10 * step + each, comm.rank, comm.size)
            n = 0 if dice.random() < 0.2 and comm.rank == 0 else len(x)

            def one(x: Any = x[:n], t: Any = t[:n], n: int = n, user: int = user) -> None:
                loss = F.cross_entropy(model(x, sometimes=user == comm.rank), t, reduction="sum")
                model.backward(loss, weight=n) if weighted else loss.backward()

            if each < passes - 1:
                with model.no_sync():
                    one()
            else:
                one()
        if dice.random() < 0.4:
            replan(model, dice.randrange(7))
        optimizer.param_groups[0]["lr"] *= dice.choice([1.0, 0.9])
        optimizer.step()
        if dice.random() < 0.2:
            optimizer.load_state_dict(optimizer.state_dict())
    return values(model), optimizer.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_drawn_trainings(size: int, count: Callable[[int, int], int]) -> None:
    for seed in range(count(3, 50)):
        expected, whole = collectives.run_threads(lambda comm, seed=seed: run(comm, seed, False), size)[0]
        for got, state in collectives.run_threads(lambda comm, seed=seed: run(comm, seed, True), size):
            assert_equal(got, expected)
            whole["state"] = {number: entry for number, entry in whole["state"].items() if number in state["state"]}
            assert_same_state(state, whole)
