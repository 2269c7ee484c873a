"""Adam. Source: Kingma & Ba 2015, arXiv:1412.6980; amsgrad: Reddi et al. 2018, arXiv:1904.09237."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from ddp.errors import ArgumentError
from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Array, Tile


class Adam(Tiled):
    """m = beta1*m + (1 - beta1)*d;  v = beta2*v + (1 - beta2)*d²;  p -= lr * m/c1 / (sqrt(v/c2) + eps).

    d = grad + weight_decay*p;  c = 1 - beta^step.  amsgrad: the largest v so far takes the place of v.
    decoupled_weight_decay: p *= 1 - lr*weight_decay instead, as AdamW does. maximize: d = -grad + ...
    foreach, fused and capturable change nothing: updates are always joined, and on a GPU always fused and capturable.

    Raises: ArgumentError for negative settings, or betas not in [0, 1).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        kind = type(self).__name__
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        check(kind, **numbers)
        check_betas(kind, betas)
        flags = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        variants = {"amsgrad": amsgrad, "decoupled_weight_decay": decoupled_weight_decay, "fused": fused}
        super().__init__(params, {**numbers, "betas": betas, **variants, **flags})

    rule = "adam"
    states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def settings(self, group: Group) -> Sequence[float]:
        decay, decoupled, maximize = group["weight_decay"], group["decoupled_weight_decay"], group["maximize"]
        return number(group["lr"]), *group["betas"], group["eps"], number(decay), decoupled, maximize

    def update(self, group: Group, age: float) -> Update:
        lr, (beta1, beta2), eps = number(group["lr"]), group["betas"], group["eps"]
        decay, decoupled, amsgrad, maximize = (
            number(group["weight_decay"]),
            group["decoupled_weight_decay"],
            group["amsgrad"],
            group["maximize"],
        )
        # lr * m/c1 / (sqrt(v/c2) + eps) = lr*sqrt(c2)/c1 * m / (sqrt(v) + eps*sqrt(c2)): one pass less
        root = sqrt(1 - beta2**age)
        rate, small = lr * root / (1 - beta1**age), eps * root

        def update(tile: Tile) -> None:
            xp, state = tile.xp, tile.state
            if decay and decoupled:
                tile.shrink(1 - lr * decay)
            d = tile.descent(0.0 if decoupled else decay, maximize)
            moments = state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"] if amsgrad else None
            _by_passes(xp, d, *moments, tile.delta, tile.spare, beta1, beta2, rate, small)
            tile.subtract()

        return update


def _by_passes(
    xp: Any,
    d: Array,
    m: Array,
    v: Array,
    top: Array | None,
    delta: Array,
    spare: Array,
    beta1: float,
    beta2: float,
    rate: float,
    small: float,
) -> None:
    xp.subtract(d, m, out=spare)
    xp.multiply(spare, 1 - beta1, out=spare)
    xp.add(m, spare, out=m)
    xp.multiply(d, d, out=spare)
    xp.multiply(spare, 1 - beta2, out=spare)
    xp.multiply(v, beta2, out=v)
    xp.add(v, spare, out=v)
    if top is not None:
        v = xp.maximum(v, top, out=top)
    xp.sqrt(v, out=delta)
    xp.add(delta, small, out=delta)
    xp.divide(m, delta, out=delta)
    xp.multiply(delta, rate, out=delta)


def check_betas(kind: str, betas: tuple[float, float]) -> None:
    """Raises: ArgumentError for a beta that is not in [0, 1)."""
    for beta in betas:
        if not 0 <= beta < 1:
            raise ArgumentError(f"{kind}: betas are in [0, 1), got {betas}")
