"""RMSprop. Source: Tieleman & Hinton 2012 (lecture 6.5); centered: Graves 2013, arXiv:1308.0850."""

from __future__ import annotations

from collections.abc import Sequence

from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Tile


class RMSprop(Tiled):
    """v = alpha*v + (1 - alpha)*d²;  u = d / (sqrt(v) + eps);  p -= lr*u, or b = momentum*b + u and p -= lr*b.

    d = grad + weight_decay*p.  centered: a = alpha*a + (1 - alpha)*d, and v - a² under the root.
    maximize: d = -grad + ...  foreach and capturable change nothing.

    Raises: ArgumentError for negative settings.
    """

    rule = "rmsprop"
    states = ("square_avg", "momentum_buffer", "grad_avg")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        check("RMSprop", **numbers)
        flags = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, {**numbers, "centered": centered, **flags})

    def names(self, group: Group) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def settings(self, group: Group) -> Sequence[float]:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        return lr, group["alpha"], group["eps"], decay, group["momentum"], group["maximize"]

    def update(self, group: Group, age: float) -> Update:
        lr, alpha, eps, momentum = number(group["lr"]), group["alpha"], group["eps"], group["momentum"]
        decay, centered, maximize = number(group["weight_decay"]), group["centered"], group["maximize"]

        def update(tile: Tile) -> None:
            xp, state, delta, spare = tile.xp, tile.state, tile.delta, tile.spare
            v = state["square_avg"]
            d = tile.descent(decay, maximize)
            xp.multiply(d, d, out=spare)
            xp.multiply(spare, 1 - alpha, out=spare)
            xp.multiply(v, alpha, out=v)
            xp.add(v, spare, out=v)
            if centered:
                a = state["grad_avg"]
                xp.subtract(d, a, out=spare)
                xp.multiply(spare, 1 - alpha, out=spare)
                xp.add(a, spare, out=a)
                xp.multiply(a, a, out=spare)
                xp.subtract(v, spare, out=spare)
                xp.sqrt(spare, out=spare)
            else:
                xp.sqrt(v, out=spare)
            xp.add(spare, eps, out=spare)
            xp.divide(d, spare, out=delta)
            if momentum > 0:
                b = state["momentum_buffer"]
                xp.multiply(b, momentum, out=b)
                xp.add(b, delta, out=b)
                xp.multiply(b, lr, out=delta)
            else:
                xp.multiply(delta, lr, out=delta)
            tile.subtract()

        return update
