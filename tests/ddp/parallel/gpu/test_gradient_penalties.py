"""Losses with gradients in them on ranks with a stand-in GPU each: they train as ranks on CPUs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import run_threads
from ddp import nn
from tests.collectives.backends.device.fake_nccl import FakeLibrary
from tests.ddp.cases.table import draw
from tests.ddp.parallel.gpu.conftest import Rig


def of_slopes(model: Any, x: Any, optimizer: Any) -> Any:
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = ddp.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.sin().mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def of_weights(model: Any, x: Any, optimizer: Any) -> Any:
    model(x).sin().mean().backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    optimizer.zero_grad()
    return model(x).sin().mean() + 0.1 * penalty


def train(comm: Any, device: str, penalized: Callable[..., Any]) -> list[Any]:
    layers = nn.Linear(5, 7), ddp.parallel.SyncBatchNorm(7, comm=comm), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1)
    net = nn.Sequential(*layers).double()
    for i, p in enumerate(net.parameters()):
        p.data.copy_(ddp.from_numpy(draw(*p.shape, seed=i)))
    model = ddp.DataParallel(net.to(device), comm)
    optimizer = ddp.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = ddp.from_numpy(draw(8, 5, seed=step)).chunk(comm.size)[comm.rank].to(device)
        optimizer.zero_grad()
        penalized(model, x, optimizer).backward()
        optimizer.step()
    return [p.detach().cpu().numpy() for p in model.parameters()]


@pytest.mark.parametrize("penalized", [of_slopes, of_weights])
def test_penalties_train_as_on_the_cpu(rig: Callable[..., Rig], penalized: Callable[..., Any]) -> None:
    expected = run_threads(lambda comm: train(comm, "cpu", penalized), 2)
    actual = rig(2, FakeLibrary()).run(lambda comm, cupy: train(comm, f"cuda:{comm.rank}", penalized))
    for ours, theirs in zip(actual, expected, strict=True):
        for p, q in zip(ours, theirs, strict=True):
            assert_allclose(p, q, rtol=1e-9, atol=1e-11)
