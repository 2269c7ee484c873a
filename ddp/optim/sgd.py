"""Stochastic gradient descent, with momentum. Source: Sutskever et al. 2013, for Nesterov's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.errors import ArgumentError
from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Array, Tile


class SGD(Tiled):
    """d = grad + weight_decay*p;  v = momentum*v + (1 - dampening)*d, at first v = d;  p -= lr*v.

    With nesterov, p -= lr*(d + momentum*v). A parameter whose grad is None is not touched. maximize: d = -grad + ...
    foreach and fused change nothing: updates are always joined and tiled.

    Raises: ArgumentError for negative settings, or nesterov without momentum or with dampening.
    """

    counted = False
    rule = "momentum"
    states = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check("SGD", **numbers)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentError("SGD: nesterov needs momentum, and no dampening")
        flags = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**numbers, "dampening": dampening, "nesterov": nesterov, **flags})

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def settings(self, group: Group) -> Sequence[float]:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        return lr, group["momentum"], group["dampening"], decay, group["nesterov"], group["maximize"]

    def update(self, group: Group, age: float) -> Update:
        lr, momentum, decay = number(group["lr"]), group["momentum"], number(group["weight_decay"])
        dampening, nesterov, maximize = group["dampening"], group["nesterov"], group["maximize"]

        def plain(tile: Tile) -> None:
            tile.xp.multiply(tile.descent(decay, maximize), lr, out=tile.delta)
            tile.subtract()

        def with_momentum(tile: Tile) -> None:
            xp, d = tile.xp, tile.descent(decay, maximize)
            arrays = d, tile.state["momentum_buffer"], tile.delta, tile.spare
            _by_passes(xp, *arrays, age == 0, nesterov, momentum, 1 - dampening, lr)
            tile.subtract()

        return with_momentum if momentum else plain


def _by_passes(
    xp: Any,
    d: Array,
    v: Array,
    delta: Array,
    spare: Array,
    fresh: bool,
    nesterov: bool,
    momentum: float,
    less: float,
    lr: float,
) -> None:
    if fresh:
        v[...] = d
    else:
        xp.multiply(v, momentum, out=v)
        xp.add(v, d if less == 1 else xp.multiply(d, less, out=spare), out=v)
    if nesterov:
        xp.multiply(v, momentum, out=spare)
        xp.add(spare, d, out=delta)
        xp.multiply(delta, lr, out=delta)
    else:
        xp.multiply(v, lr, out=delta)
