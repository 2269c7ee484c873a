"""Stochastic gradient descent, with momentum. Source: Sutskever et al. 2013, for Nesterov's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.optim._optimizer import Group, Optimizer


class SGD(Optimizer):
    """d = grad + weight_decay*p;  v = momentum*v + (1 - dampening)*d, at first v = d;  p -= lr*v.

    With nesterov, p -= lr*(d + momentum*v). A parameter whose grad is None is not touched.

    Raises: ArgumentError for negative settings, or nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ArgumentError(f"SGD: {name} is not negative, got {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentError("SGD: nesterov needs momentum, and no dampening")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )

    def step(self) -> None:
        """Updates every parameter that has a gradient, in place; gradients are only read."""
        for group in self.param_groups:
            for p in group["params"]:
                end = p._end
                if end is not None and end.slot.full:
                    self._update(p, end.slot.buffer, group)
                    p._version.count += 1

    def _update(self, p: Tensor, d: Any, group: Group) -> None:
        xp, array = p._device.xp, p._array
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        scratch = xp.empty_like(array)
        if decay:
            xp.multiply(array, decay, out=scratch)
            scratch += d
            d = scratch
        if momentum:
            state = self.state.setdefault(p, {})
            if "momentum_buffer" not in state:
                v = d.copy()
                state["momentum_buffer"] = wrap(v, p._device)
            else:
                v = state["momentum_buffer"]._array
                v *= momentum
                v += d if group["dampening"] == 0 else d * (1 - group["dampening"])
            d = d + momentum * v if group["nesterov"] else v
        xp.multiply(d, lr, out=scratch)
        array -= scratch
