"""Losses with gradients in them, on several ranks: what comes out is that of one process and the whole batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import GraphError
from tests.ddp.parallel.ranks import Arrays, assert_same, gradients, on_each_of, on_ranks, parameters

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

    def rank(comm: Communicator) -> Any:
        model = ddp.DataParallel(make_critic(), comm)
        adam = ddp.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
        first: Arrays = {}
        for _ in range(3):
            adam.zero_grad()
            penalized(model, part_of(comm.size, comm.rank), comm).backward()
            first = first or gradients(model)
            adam.step()
        return first, parameters(model)

    return on_ranks(rank, size)


@pytest.mark.parametrize("penalized", [of_slopes, of_weights])
def test_a_penalty_is_that_of_the_whole_batch(penalized: Callable[..., Any]) -> None:
    (whole,) = trained(penalized, 1)
    for size in (2, 4):
        for actual in trained(penalized, size):
            assert_same(actual, whole)


class Branches(nn.Module):
    """The head is not used on rank 1, `idle` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Any, rank: int) -> Any:
        h = self.trunk(x).tanh()
        return h if rank == 1 else self.head(h)


def value_of(tensors: list[Any], rank: int, order: int) -> Any:
    """A number that is another function on each rank, of two thirds of some tensors that may be None."""
    return sum(
        (x.sin() * numbers(*x.shape, seed=100 * rank + 10 * order + i)).sum() + (x * x).sum() * (rank + 1)
        for i, x in enumerate(tensors)
        if x is not None and (i + rank) % 3 < 2
    )


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)
        self.last = nn.Linear(3, 2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(3, affine=False)])

    def forward(self, x: Any) -> Any:
        h = self.norms[0](self.first(x)).tanh()
        return self.last(self.norms[1](self.head(h)).sin())


Losses = Callable[[Any, list[int]], list[list[Any]]]  # of a model on ranks; all but the last go backward under no_sync


def one_loss(model: Any, ranks: list[int]) -> list[list[Any]]:
    return [[value_of([model(numbers(3, 5, seed=rank), rank)] * 2, rank, 9)] for rank in ranks]


def two_losses(model: Any, ranks: list[int]) -> list[list[Any]]:
    seconds = [model(numbers(2, 5, seed=50 + rank), rank).exp().mean() for rank in ranks]
    return [[*first, second] for first, second in zip(one_loss(model, ranks), seconds, strict=True)]


def of_whole_batch(model: Any, ranks: list[int]) -> list[list[Any]]:
    """On rank 1 the loss is linear."""
    lengths = [2 + rank for rank in ranks]
    ys = model(ddp.cat([numbers(2 + rank, 5, seed=rank) for rank in ranks])).split(lengths)
    return [[y.sum() if rank == 1 else value_of([y, y], rank, 9)] for rank, y in zip(ranks, ys, strict=True)]


def by_backward(size: int, net: type[nn.Module], losses: Losses) -> list[list[Arrays]]:
    """On each rank, three times: gradients with a graph by backward, of numbers made of those before."""

    def rank(comm: Communicator) -> Any:
        bare = ddp.parallel.convert_sync_batchnorm(filled(net()), comm)
        bare.head.weight.requires_grad_(False)  # such a gradient has no bucket at first
        model = ddp.DataParallel(bare, comm, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        bare.head.weight.requires_grad_()
        parameters = list(model.parameters())
        results = []
        (values,) = losses(model, [comm.rank])
        for order in range(3):
            for value in values[:-1]:
                with model.no_sync():
                    value.backward(create_graph=True)
            values[-1].backward(create_graph=True)
            assert all(p.grad is None or p.grad.grad_fn is not None for p in parameters)
            results.append(gradients(bare))
            values = [value_of([p.grad for p in parameters], comm.rank, order)]
            model.zero_grad()
        return results

    return on_ranks(rank, size)


def by_one_process(size: int, net: type[nn.Module], losses: Losses) -> list[Arrays]:
    """The same of the mean over ranks."""
    named = dict((model := filled(net())).named_parameters())
    results = []
    mean = sum(map(sum, losses(model, list(range(size))))) / size
    for order in range(3):
        slopes = ddp.autograd.grad(mean, list(named.values()), create_graph=True, allow_unused=True)
        pairs = zip(named, slopes, strict=True)
        results.append({name: slope.detach().numpy() for name, slope in pairs if slope is not None})
        mean = sum(value_of(list(slopes), rank, order) for rank in range(size)) / size
    return results


@pytest.mark.parametrize(
    ("net", "losses"), [(Branches, one_loss), (Branches, two_losses), (Normalized, of_whole_batch)]
)
def test_backward_leaves_means_that_can_be_differentiated(net: type[nn.Module], losses: Losses) -> None:
    for size in (1, 2, 3):
        expected = by_one_process(size, net, losses)
        for actual in by_backward(size, net, losses):
            for ours, theirs in zip(actual, expected, strict=True):
                assert ours.keys() == theirs.keys()
                largest = max(np.abs(value).max() for value in theirs.values())
                for name, value in theirs.items():
                    assert_allclose(ours[name], value, rtol=0, atol=1e-11 * largest, err_msg=name)


@on_each_of(2)
def test_what_is_added_to_a_gradient_with_a_graph(comm: Communicator) -> None:
    """It is a sum in the bucket again, and the gradient that had a graph is as it was."""
    model = ddp.DataParallel(make_critic(), comm)
    weight = model.module[0].weight
    x = part_of(2, comm.rank)
    adam = ddp.optim.Adam(model.parameters(), lr=1e-2)
    model(x).mean().backward()
    once = weight.grad.clone()
    adam.zero_grad()
    with model.no_sync():  # its weight goes with its gradients
        model.backward(model(x).sum(), weight=4)
    adam.zero_grad()
    model(x).mean().backward(create_graph=True)
    graph = weight.grad
    held = weight.grad.detach().clone()
    for with_graph in (True, False):
        model(x).mean().backward(create_graph=with_graph)
        once = once + held
        assert_same(weight.grad, once)
    with model.no_sync():
        model(x).mean().backward(create_graph=True)
    model(x).mean().backward()
    assert_same(weight.grad, once + 2 * held)
    assert graph.equal(held)
    adam.step()  # changes what the graph reads
    with pytest.raises(ddp.errors.VersionError):
        ddp.autograd.grad(graph.sum(), weight)


def test_a_checkpointed_model_two_models_and_no_garbage() -> None:
    def rank(comm: Communicator) -> None:
        first, second = (ddp.DataParallel(make_critic(), comm) for _ in range(2))
        x = part_of(2, comm.rank)
        weights = first.module[0].weight, second.module[0].weight

        def run(model: Any, x: Any) -> Any:  # what one rank computes again counts as no forward
            return ddp.autograd.checkpoint(model, x) if comm.rank == 0 else model(x)

        loss = (first(x) * first(-x) * second(x)).mean()
        loss.backward(create_graph=True)
        expected = [w.grad.clone() for w in weights]
        first.zero_grad(), second.zero_grad()
        (run(first, x) * run(first, -x) * run(second, x)).mean().backward(create_graph=True)
        assert_same([w.grad for w in weights], expected)
        alive = [weakref.ref(w.grad.edge) for w in weights]
        first.zero_grad(), second.zero_grad()
        del loss, expected
        assert [each() for each in alive] == [None, None]

    gc.collect()
    gc.disable()
    try:
        on_ranks(rank)
    finally:
        gc.enable()


@on_each_of(2)
def test_what_has_no_derivative_is_refused_before_anything_is_sent(comm: Communicator) -> None:
    def refused(model: Any, message: str, **options: Any) -> None:
        with pytest.raises(GraphError, match=message):
            model(part_of(2, comm.rank)).mean().backward(create_graph=True, **options)

    model = ddp.DataParallel(make_critic(), comm, comm_hook=ddp.parallel.comm_hooks.bf16)
    refused(model, "communication hook")
    model(part_of(2, comm.rank)).mean().backward()
    model = ddp.DataParallel(make_critic(), comm)
    refused(model, r"backward\(inputs=...\): .* is a parameter under DataParallel", inputs=[model.module[0].weight])
    with model.join():
        refused(model, "join")
    ddp.parallel.ZeroOptimizer(model, ddp.optim.SGD, lr=0.1)
    refused(model, "ZeroOptimizer")
