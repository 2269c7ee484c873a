"""DataParallel together with what autograd offers: checkpointed regions, hooks, autocast, written gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import GraphError
from ddp.nn import functional as F

X = np.random.default_rng(0).standard_normal((8, 6))


class Net(nn.Module):
    """A layer that is used twice inside a region, and once outside of it."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        ddp.manual_seed(1)
        self.shared, self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.checkpointed = checkpointed
        self.double()

    def region(self, x: ddp.Tensor) -> ddp.Tensor:
        return F.dropout(self.shared(self.inner(self.shared(x)).tanh()).relu(), 0.3)

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        x = self.shared(x)
        x = ddp.autograd.checkpoint(self.region, x) if self.checkpointed else self.region(x)
        return self.out(x)


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpointed_region_with_a_shared_layer(size: int) -> None:
    def rank(comm: Communicator, checkpointed: bool) -> Any:
        model = ddp.DataParallel(Net(checkpointed), comm, bucket_cap_mb=1e-4)
        ddp.manual_seed(5 + comm.rank)
        mine = ddp.from_numpy(X[comm.rank * 8 // size : (comm.rank + 1) * 8 // size])
        for _ in range(2):
            model.zero_grad()
            (model(mine) ** 2).mean().backward()
        return {name: p.grad.tolist() for name, p in model.module.named_parameters()}

    plain = collectives.run_threads(lambda comm: rank(comm, False), size)
    again = collectives.run_threads(lambda comm: rank(comm, True), size)
    assert plain[0] == plain[-1]
    assert plain == again


def test_a_leaf_hook_runs_before_the_ranks_are_averaged() -> None:
    def rank(comm: Communicator) -> float:
        layer = nn.Linear(1, 1, bias=False)
        model = ddp.DataParallel(layer, comm)
        layer.weight.register_hook(lambda g: g * (10 if comm.rank == 0 else 100))
        model(ddp.ones(1, 1)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.item()

    assert collectives.run_threads(rank, 2) == [55.0, 55.0]


def test_autocast_and_scaling() -> None:
    def rank(comm: Communicator) -> Any:
        ddp.manual_seed(0)
        model = ddp.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), comm)
        optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
        scaler = ddp.amp.GradScaler("cpu", init_scale=64.0)
        x = ddp.from_numpy(X[comm.rank :: comm.size].astype(np.float32))
        for step in range(3):
            optimizer.zero_grad()
            with ddp.amp.autocast("cpu"):
                loss = (model(x) ** 2).mean()
            if comm.rank == 1 and step == 1:
                loss = loss * float("inf")  # on one rank alone: all leave the step out
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [p.tolist() for p in model.parameters()]

    first, second = collectives.run_threads(rank, 2)
    assert first == second
    assert first[0] == 32.0


def test_backward_into_chosen_parameters_would_not_be_reduced() -> None:
    layer = nn.Linear(6, 5)
    model = ddp.DataParallel(layer)
    with pytest.raises(GraphError, match=r"\(5, 6\).*DataParallel"):
        model(ddp.ones(1, 6)).sum().backward(inputs=[layer.weight])


def test_gradients_are_computed_inside_the_buckets() -> None:
    layer = nn.Linear(6, 5)
    ddp.DataParallel(layer)
    grad_buffer = layer.weight.leaf.grad_buffer
    bucket = grad_buffer.array.base
    layer(ddp.from_numpy(X.astype(np.float32))).sum().backward()
    assert grad_buffer.array.base is bucket
    np.testing.assert_allclose(grad_buffer.array, np.tile(X.sum(0), (5, 1)), rtol=1e-5)
