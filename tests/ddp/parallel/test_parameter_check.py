"""Parameters that come into a module after it was wrapped are noticed, by name, whatever they came through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
import ddp
from collectives import Communicator
from ddp import nn
from ddp.errors import ParallelError
from ddp.parallel import DataParallel, convert_sync_batchnorm


class Parts(nn.Module):
    """A module of every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3))
        self.some = nn.ModuleList([nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"one": nn.Linear(3, 3)})
        self.scales = nn.ParameterList([nn.Parameter(ddp.ones(3))])
        self.shifts = nn.ParameterDict({"one": nn.Parameter(ddp.ones(3))})

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.body(x)


ADDITIONS: dict[str, Callable[[Parts], Any]] = {
    "extra.weight and 1 more": lambda net: setattr(net, "extra", nn.Linear(3, 3)),
    "body.0.weight": lambda net: setattr(net.body[0], "weight", nn.Parameter(ddp.ones(3, 3))),
    "body.1.weight": lambda net: net.body.append(nn.Linear(3, 3)),
    "some.1.weight": lambda net: net.some.append(nn.Linear(3, 3)),
    "some.0.weight": lambda net: net.some.insert(0, nn.Linear(3, 3)),
    "some.2.bias": lambda net: net.some.extend([nn.ReLU(), nn.Linear(3, 3)]),
    "named.two.weight": lambda net: net.named.update({"two": nn.Linear(3, 3)}),
    "scales.1": lambda net: net.scales.append(nn.Parameter(ddp.ones(3))),
    "shifts.two": lambda net: net.shifts.update({"two": nn.Parameter(ddp.ones(3))}),
    "body.0.more": lambda net: net.body[0].register_parameter("more", nn.Parameter(ddp.ones(3))),
    "late": lambda net: net.register_parameter("late", nn.Parameter(ddp.ones(3))),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_parameters_that_come_after_wrapping_are_named(name: str) -> None:
    model = DataParallel(Parts())
    model(ddp.ones(1, 3))
    ADDITIONS[name](model.module)
    with pytest.raises(ParallelError, match="came into the module after it was wrapped") as caught:
        model(ddp.ones(1, 3))
    assert name.split(".bias")[0] in str(caught.value)
    assert "close()" in str(caught.value)
    model.close()
    DataParallel(model.module)(ddp.ones(1, 3)).sum().backward()


def test_a_part_that_is_taken_out_or_put_elsewhere_is_no_addition() -> None:
    model = DataParallel(Parts())
    del model.module.some
    model.module.again = model.module.body[0]
    model.module.elsewhere = nn.Sequential(model.module.body, nn.ReLU())
    nn.Linear(3, 3)  # somebody else's
    model(ddp.ones(1, 3)).sum().backward()
    assert model.module.body[0].weight.grad is not None


def test_batch_norm_may_become_sync_batch_norm_after_wrapping() -> None:
    def rank(comm: Communicator) -> Any:
        ddp.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model = DataParallel(net, comm)
        model(ddp.ones(2, 3)).sum().backward()
        convert_sync_batchnorm(net, comm)
        for _ in range(2):
            model.zero_grad()
            x = ddp.from_numpy(np.random.default_rng(comm.rank).normal(size=(2, 3)).astype(np.float32))
            model(x).square().sum().backward()
        return {name: p.grad.numpy().copy() for name, p in net.named_parameters()}, net[1].running_var.numpy().copy()

    (first, mine), (second, theirs) = collectives.run_threads(rank, 2, timeout=20)
    for name in first:
        assert_array_equal(first[name], second[name])
    assert_array_equal(mine, theirs)
