"""Parameters that come into a module after it was wrapped are noticed, by name, whatever they came through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp import nn
from ddp.errors import ParallelError
from ddp.parallel import DataParallel


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
    "some.2.bias": lambda net: net.some.extend([nn.ReLU(), nn.Linear(3, 3)]),
    "named.two.weight": lambda net: net.named.update({"two": nn.Linear(3, 3)}),
    "scales.1": lambda net: net.scales.append(nn.Parameter(ddp.ones(3))),
    "shifts.two": lambda net: net.shifts.update({"two": nn.Parameter(ddp.ones(3))}),
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
