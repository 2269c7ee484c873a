"""Losses with gradients in them, on several ranks: what comes out is that of one process and the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import Communicator
from ddp import nn
from tests.ddp.parallel.ranks import Arrays, gradients, on_ranks

F = nn.functional
SAMPLES = 8


def numbers(*shape: int, seed: int = 0) -> Any:
    return ddp.from_numpy(np.random.default_rng(seed).normal(size=shape))


def filled(net: Any) -> Any:
    """The net in float64, the same on every rank."""
    net = net.double()
    with ddp.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(numbers(*p.shape, seed=10 + i))
    return net


def make_critic() -> Any:
    layers = nn.Linear(5, 7), nn.LeakyReLU(0.2), nn.LayerNorm(7), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 1)
    return filled(nn.Sequential(*layers))


def part_of(size: int, rank: int) -> Any:
    """This rank's samples, (n, 5)."""
    return numbers(SAMPLES, 5).chunk(size)[rank]


def of_slopes(model: Any, x: Any, comm: Communicator) -> Any:
    """Gulrajani et al. 2017, arXiv:1704.00028."""
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = ddp.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.sin().mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def of_weights(model: Any, x: Any, comm: Communicator) -> Any:
    """The penalty is on the gradient of the whole batch's loss."""
    loss = model(x).sin().mean()
    slopes = ddp.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(ddp.parallel.all_reduce(slope, "mean", comm).square().sum() for slope in slopes)


def trained(penalized: Callable[..., Any], size: int) -> list[tuple[Arrays, Arrays]]:
    """On each rank: the gradients of the loss, and the parameters after three steps of Adam."""

    def rank(comm: Communicator) -> tuple[Arrays, Arrays]:
        model = ddp.DataParallel(make_critic(), comm)
        adam = ddp.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
        first: Arrays = {}
        for _ in range(3):
            adam.zero_grad()
            penalized(model, part_of(comm.size, comm.rank), comm).backward()
            first = first or gradients(model)
            adam.step()
        return first, {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    return on_ranks(rank, size)


@pytest.mark.parametrize("penalized", [of_slopes, of_weights])
def test_a_penalty_is_that_of_the_whole_batch(penalized: Callable[..., Any]) -> None:
    (whole,) = trained(penalized, 1)
    for size in (2, 4):
        for found in trained(penalized, size):
            for ours, expected in zip(found, whole, strict=True):
                assert ours.keys() == expected.keys()
                for name, value in expected.items():
                    assert_allclose(ours[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
