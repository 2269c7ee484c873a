"""A network with everything that a module can hold: buffers of each kind, a tied parameter, modules in modules."""

from __future__ import annotations

import ddp
from ddp import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.scale = nn.Parameter(ddp.ones(3))
        self.register_buffer("mean", ddp.zeros(3))
        self.register_buffer("cache", ddp.zeros(1), persistent=False)
        self.register_buffer("count", ddp.tensor(0))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.first(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.tied = nn.Parameter(ddp.randn(3, 3))

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        return self.last(self.drop(self.block(x)))
