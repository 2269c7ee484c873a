"""`Tiled`: the base of optimizers whose update treats each element alone, so that it may walk flat memory in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._engine import enable_grad
from ddp.errors import ArgumentError
from ddp.optim._memory import Memory, Scratch, Tile
from ddp.optim._optimizer import Closure, Group, Optimizer, Params

Update = Callable[[Tile], None]


class Tiled(Optimizer):
    """An optimizer given by the names of its states and the formula of a tile.

    A formula is made of elementwise operations, each rounded by itself: so the numbers are the same, bit for bit,
    however gradients lie and tiles are cut, and a run resumes exactly after a new plan of buckets.

    counted: whether each parameter's state has a "step" that counts its updates
    eager: state begins for all parameters at the first step, not with a parameter's first gradient
    """

    counted = True
    eager = False

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        if defaults.get("differentiable"):
            raise ArgumentError(
                f"{type(self).__name__}: differentiable=True needs gradients of an update: there are none"
            )
        super().__init__(params, defaults)

    def _prepare(self) -> None:
        super()._prepare()
        self._scratch = Scratch()
        self._memories: dict[int, tuple[Group, Memory]] = {}

    def names(self, group: Group) -> tuple[str, ...]:
        """The states that a parameter of this group has, apart from "step"."""
        raise NotImplementedError

    def initial(self, group: Group) -> float:
        """What a state starts as."""
        return 0.0

    def update(self, group: Group, age: float) -> Update:
        """The formula for one tile. age: how many updates its parameters have had, this one included.

        Without `counted`, age is 0 for parameters whose state begins now and else 1.
        """
        raise NotImplementedError

    def step(self, closure: Closure | None = None) -> Any:
        """Updates every parameter that has a gradient, in place; gradients are only read.

        closure: computes the loss and its gradients anew, with recording on; step returns what it returns
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        # Also between neighbours in a bucket, where nobody looks, and infinities are the loss scaler's business.
        with np.errstate(all="ignore"):
            for group in self.param_groups:
                for age, tiles in self._memory(group).runs(group["params"], self.state, self.eager):
                    update = self.update(group, age)
                    for tile in tiles:
                        for target, source in tile.before:
                            target[...] = source
                        update(tile)
                        for target, source in tile.after:
                            target[...] = source
        return loss

    def _memory(self, group: Group) -> Memory:
        names = self.names(group)
        known = self._memories.get(id(group))
        if known is None or known[0] is not group or known[1].names != names:
            memory = Memory(names, self.counted, self.initial(group), self._scratch)
            known = self._memories[id(group)] = group, memory
        return known[1]
