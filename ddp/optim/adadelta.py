"""Adadelta. Source: Zeiler 2012, arXiv:1212.5701."""

from __future__ import annotations

from collections.abc import Sequence

from ddp.errors import ArgumentError
from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Tile


class Adadelta(Tiled):
    """v = rho*v + (1 - rho)*d²;  u = d * sqrt(a + eps)/sqrt(v + eps);  a = rho*a + (1 - rho)*u²;  p -= lr*u.

    d = grad + weight_decay*p.  maximize: d = -grad + ...  foreach and capturable change nothing.

    Raises: ArgumentError for negative settings, or rho above 1.
    """

    rule = "adadelta"
    states = ("square_avg", "acc_delta")

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        numbers = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
        check("Adadelta", **numbers)
        if rho > 1:
            raise ArgumentError(f"Adadelta: rho is in [0, 1], got {rho}")
        flags = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, {**numbers, **flags})

    def names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def settings(self, group: Group) -> Sequence[float]:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        return lr, group["rho"], group["eps"], decay, group["maximize"]

    def update(self, group: Group, age: float) -> Update:
        lr, rho, eps = number(group["lr"]), group["rho"], group["eps"]
        decay, maximize = number(group["weight_decay"]), group["maximize"]

        def update(tile: Tile) -> None:
            xp, delta, spare = tile.xp, tile.delta, tile.spare
            v, a = tile.state["square_avg"], tile.state["acc_delta"]
            d = tile.descent(decay, maximize)
            xp.multiply(d, d, out=spare)
            xp.multiply(spare, 1 - rho, out=spare)
            xp.multiply(v, rho, out=v)
            xp.add(v, spare, out=v)
            xp.add(v, eps, out=spare)
            xp.sqrt(spare, out=spare)
            xp.divide(d, spare, out=delta)
            xp.add(a, eps, out=spare)
            xp.sqrt(spare, out=spare)
            xp.multiply(delta, spare, out=delta)
            xp.multiply(delta, delta, out=spare)
            xp.multiply(spare, 1 - rho, out=spare)
            xp.multiply(a, rho, out=a)
            xp.add(a, spare, out=a)
            xp.multiply(delta, lr, out=delta)
            tile.subtract()

        return update
