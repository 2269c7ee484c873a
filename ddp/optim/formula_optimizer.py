"""The base of optimizers that are given by a formula, and the lines that their formulas share."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ddp._device import CPU, capturing, device
from ddp._engine import enable_grad
from ddp.optim.group_update import GroupUpdate
from ddp.optim.optimizer import Closure, Group, Optimizer, number

_device_of = attrgetter("_device")


class FormulaOptimizer(Optimizer):
    """An optimizer defined by an elementwise formula. `states` names the states that the formula reads and writes.

    counted: each parameter's state has a "step" that counts its updates
    factor: an expression of settings and `step`; unless it is "1", each parameter's state has a "mu_product", the
        product of the expression's values over all updates, in float32 as in PyTorch
    eager: the first step creates the state of all parameters; otherwise a step creates the state of a parameter when it
        has its first gradient
    found_inf: a float32 on the GPU, which a GradScaler sets for a step. If it is not zero, the kernels skip the step.
        The host does not read it
    """

    counted = True
    factor = "1"
    eager = False
    found_inf: Any = None
    _step_supports_amp_scaling = True  # PyTorch's name: tells a GradScaler that the step reads found_inf

    def _prepare(self) -> None:
        super()._prepare()
        self._updates: dict[tuple[int, device], GroupUpdate] = {}

    def states(self, group: Group) -> tuple[str, ...]:
        """The names of the states of a parameter in this group, without "step" and "mu_product"."""
        raise NotImplementedError

    def initial(self, group: Group) -> float:
        """The initial value of all elements of a state."""
        return 0.0

    def formula(self, group: Group) -> list[str]:
        """The lines of the update, as `ddp.optim.formula` describes them."""
        raise NotImplementedError

    def step(self, closure: Closure | None = None) -> Any:
        """Updates every parameter that has a gradient, in place. Changes no gradient, and does not wait for a GPU.

        closure: computes the loss and its gradients again, with grad mode on; step returns its result

        Raises: StateDictError if a loaded state does not have the shape of its parameter; CaptureError if state would
        be created during the capture of a CUDA graph.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        for group in self.param_groups:
            devices = dict.fromkeys(map(_device_of, group["params"]))
            for target in devices:
                params = group["params"] if len(devices) == 1 else [p for p in group["params"] if p.device is target]
                self._group_update(group, target).step(params)
        if capturing.now is not None:
            capturing.now.after(self._record_step)
        return loss

    def _group_update(self, group: Group, device: device) -> GroupUpdate:
        names = self.states(group)
        update = self._updates.get((id(group), device))
        if update is None or update.group is not group or update.names != names:
            if device is CPU:
                update = GroupUpdate(self, group, device, names)
            else:
                from ddp.optim.device_update import DeviceUpdate  # imported only if there is a GPU

                update = DeviceUpdate(self, group, device, names)
            self._updates[id(group), device] = update
        return update


def descent(group: Group, decoupled: bool = False) -> list[str]:
    """The first lines of an optimizer's formula: they compute d = weight_decay*p + grad. maximize: -grad replaces grad.

    decoupled: d is grad alone, and p is multiplied by 1 - lr*weight_decay
    """
    sign = "-" if group["maximize"] else ""
    decay = number(group["weight_decay"])
    if decay and not decoupled:
        return [f"d = p * weight_decay {sign or '+'} grad"]
    lines = [f"d = {sign}grad"]
    if decay:
        lines.insert(0, "p = p * (1 - lr * weight_decay)")
    return lines
