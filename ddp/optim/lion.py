"""Lion. Source: Chen et al. 2023, arXiv:2302.06675, Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.optim.adam import check_betas
from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Array, Tile


class Lion(Tiled):
    """p *= 1 - lr*weight_decay;  p -= lr * sign(beta1*m + (1 - beta1)*d);  m = beta2*m + (1 - beta2)*d.

    d = grad, or -grad to maximize. Steps are larger than AdamW's: take a third to a tenth of its lr.

    Raises: ArgumentError for negative settings, or betas not in [0, 1).
    """

    counted = False
    rule = "lion"
    states = ("exp_avg",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check("Lion", lr=lr, weight_decay=weight_decay)
        check_betas("Lion", betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def settings(self, group: Group) -> Sequence[float]:
        return number(group["lr"]), *group["betas"], number(group["weight_decay"]), group["maximize"]

    def update(self, group: Group, age: float) -> Update:
        lr, (beta1, beta2), decay = number(group["lr"]), group["betas"], number(group["weight_decay"])
        maximize = group["maximize"]

        def update(tile: Tile) -> None:
            xp = tile.xp
            if decay:
                tile.shrink(1 - lr * decay)
            d = tile.descent(0.0, maximize)
            _by_passes(xp, d, tile.state["exp_avg"], tile.delta, tile.spare, beta1, beta2, lr)
            tile.subtract()

        return update


def _by_passes(xp: Any, d: Array, m: Array, delta: Array, spare: Array, beta1: float, beta2: float, lr: float) -> None:
    xp.subtract(d, m, out=spare)
    xp.multiply(spare, 1 - beta1, out=spare)
    xp.add(spare, m, out=spare)
    xp.multiply(m, beta2, out=m)
    xp.multiply(d, 1 - beta2, out=delta)
    xp.add(m, delta, out=m)
    xp.sign(spare, out=delta)
    xp.multiply(delta, lr, out=delta)
