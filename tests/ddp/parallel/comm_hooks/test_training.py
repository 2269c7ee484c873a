"""Hooks under DataParallel: the plain one is no hook at all, the others train as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from collectives import Communicator
from ddp import nn
from ddp.parallel import DataParallel
from ddp.parallel.comm_hooks import PowerSGD, TopK, allreduce, bf16, fp16
from tests.ddp.parallel.ranks import Arrays, assert_same, on_ranks, parameters

X = ddp.from_numpy(np.random.default_rng(0).standard_normal((12, 6)))
SMALL = 1e-4  # MiB: several buckets

HOOKS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: allreduce,
    "fp16": lambda: fp16,
    "bf16": lambda: bf16,
    "PowerSGD": lambda: PowerSGD(1, 2, min_compression_rate=1),
    "TopK": lambda: TopK(0.2),
}


class Net(nn.Module):
    """Layers of which the second is left out on request."""

    def __init__(self) -> None:
        super().__init__()
        ddp.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: ddp.Tensor, whole: bool = True) -> ddp.Tensor:
        x = self.first(x).tanh()
        return self.last(self.second(x).tanh() if whole else x)


def train(comm: Communicator, hook: Any, steps: int = 6) -> Arrays:
    """Plain backwards and weighted ones, over uneven batches and several passes; rank 0 skips a layer now and then."""
    model = DataParallel(Net(), comm, bucket_cap_mb=SMALL, first_bucket_mb=SMALL, comm_hook=hook)
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
    mine = X[comm.rank :: comm.size]
    for step in range(steps):
        optimizer.zero_grad()
        whole = step % 3 > 0 or comm.rank > 0
        if step % 2:
            model(mine, whole).square().mean().backward()
        else:
            rows = mine[: 1 + comm.rank]
            with model.no_sync():
                model.backward(model(rows, whole).square().sum(), weight=len(rows))
            model.backward(model(mine, whole).square().sum(), weight=len(mine))
        optimizer.step()
    model.close()
    return parameters(model.module)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_ranks_stay_the_same_and_near_the_exact_ones(name: str, size: int) -> None:
    ranks = on_ranks(lambda comm: train(comm, HOOKS[name]()), size)
    exact = on_ranks(lambda comm: train(comm, None), size)
    start = parameters(Net())
    tolerance = {"allreduce": 1e-14, "fp16": 1e-3, "bf16": 1e-2, "PowerSGD": 0.3, "TopK": 0.6}[name]
    assert_same(ranks, ranks[:1] * size, 0)
    for key, value in exact[0].items():
        way = np.abs(value - start[key]).max()
        assert np.abs(ranks[0][key] - value).max() <= tolerance * way, key
