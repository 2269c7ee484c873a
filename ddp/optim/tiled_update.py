"""`Tiled`: the base of optimizers whose update treats each element alone, so that it may walk flat memory.

On the CPU it walks in tiles, by a formula of array operations; on a GPU one launch walks all parameters of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import CPU, capturing, device, on
from ddp._engine import enable_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.optim.optimizer import Closure, Group, Optimizer, Params
from ddp.optim.update_memory import Memory, Scratch, Tile

if TYPE_CHECKING:
    from ddp.optim.device_update import Launched

Update = Callable[[Tile], None]
_device_of = attrgetter("device")
_ON_CPU = frozenset({CPU})


class Tiled(Optimizer):
    """An optimizer given by the names of its states and the formula of a tile.

    A formula is made of elementwise operations, each rounded by itself: so the numbers are the same, bit for bit,
    however gradients lie and tiles are cut, and a run resumes exactly after a new plan of buckets.

    counted: whether each parameter's state has a "step" that counts its updates; on a GPU it is there, too
    eager: state begins for all parameters at the first step, not with a parameter's first gradient
    rule, states: the kernel of `ddp._cuda.optimizer_kernels`, and the states that it takes, in its order
    found_inf: a float32 on the GPU, set by a GradScaler around a step: where it is not zero, the step is left out on
    the GPU, without the host's knowledge
    """

    counted = True
    eager = False
    rule: str
    states: tuple[str, ...] = ()
    found_inf: Any = None
    _step_supports_amp_scaling = True  # PyTorch's name for it

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        if defaults.get("differentiable"):
            raise ArgumentError(
                f"{type(self).__name__}: differentiable=True needs gradients of an update: there are none"
            )
        super().__init__(params, defaults)

    def _prepare(self) -> None:
        super()._prepare()
        self.scratch = Scratch()
        self._memories: dict[int, tuple[Group, Memory]] = {}
        self._launched: dict[tuple[int, device], tuple[Group, Launched]] = {}

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

    def settings(self, group: Group) -> Sequence[float]:
        """What the rule takes besides arrays, in the order of `ddp._cuda.optimizer_kernels`."""
        raise NotImplementedError

    def step(self, closure: Closure | None = None) -> Any:
        """Updates every parameter that has a gradient, in place; gradients are only read. On a GPU nothing waits.

        closure: computes the loss and its gradients anew, with recording on; step returns what it returns
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        # Also between neighbours in a bucket, where nobody looks, and infinities are the loss scaler's business.
        with np.errstate(all="ignore"):
            for group in self.param_groups:
                params = group["params"]
                if CPU.xp is np and _ON_CPU.issuperset(map(_device_of, params)):
                    self._walk(group, params)
                else:
                    self._launch(group, params)
        return loss

    def _walk(self, group: Group, params: Sequence[Tensor]) -> None:
        """Updates parameters on the CPU."""
        for age, tiles in self._memory(group).runs(params, self.state, self.eager):
            update = self.update(group, age)
            for tile in tiles:
                for target, source in tile.before:
                    target[...] = source
                update(tile)
                for target, source in tile.after:
                    target[...] = source

    def _launch(self, group: Group, params: Sequence[Tensor]) -> None:
        """Updates parameters of which not all are on the CPU."""
        for where in dict.fromkeys(map(_device_of, params)):
            share = [p for p in params if p.device is where]
            if where.xp is np:
                self._walk(group, share)
                continue
            key, names = (id(group), where), self.names(group)
            known = self._launched.get(key)
            if known is None or known[0] is not group or known[1].names != names:
                from ddp.optim.device_update import Launched  # only where there is a GPU

                known = self._launched[key] = group, Launched(self, group, where, names, self.scratch)
            with on(where):
                known[1].step(share, self.found_inf)
        if capturing.now is not None:
            capturing.now.after(self._note)

    def _note(self) -> None:
        self._stepped = True

    def _memory(self, group: Group) -> Memory:
        names = self.names(group)
        known = self._memories.get(id(group))
        if known is None or known[0] is not group or known[1].names != names:
            memory = Memory(names, self.counted, self.initial(group), self.scratch)
            known = self._memories[id(group)] = group, memory
        return known[1]
