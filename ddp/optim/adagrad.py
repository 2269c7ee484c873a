"""Adagrad. Source: Duchi et al. 2011, JMLR 12."""

from __future__ import annotations

from collections.abc import Sequence

from ddp.optim.optimizer import Group, Params, check, number
from ddp.optim.tiled_update import Tiled, Update
from ddp.optim.update_memory import Tile


class Adagrad(Tiled):
    """s += d²;  p -= lr/(1 + (step - 1)*lr_decay) * d / (sqrt(s) + eps);  s starts as initial_accumulator_value.

    d = grad + weight_decay*p.  maximize: d = -grad + ...  foreach and fused change nothing.

    Raises: ArgumentError for negative settings.
    """

    eager = True  # as in PyTorch, so that state dicts hold the same entries
    rule = "adagrad"
    states = ("sum",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        check("Adagrad", **numbers)
        flags = {"maximize": maximize, "foreach": foreach, "fused": fused, "differentiable": differentiable}
        super().__init__(params, {**numbers, **flags})

    def names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, group: Group) -> float:
        return group["initial_accumulator_value"]

    def settings(self, group: Group) -> Sequence[float]:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        return lr, group["lr_decay"], group["eps"], decay, group["maximize"]

    def update(self, group: Group, age: float) -> Update:
        rate = number(group["lr"]) / (1 + (age - 1) * group["lr_decay"])
        eps, decay, maximize = group["eps"], number(group["weight_decay"]), group["maximize"]

        def update(tile: Tile) -> None:
            xp, delta, spare, s = tile.xp, tile.delta, tile.spare, tile.state["sum"]
            d = tile.descent(decay, maximize)
            xp.multiply(d, d, out=spare)
            xp.add(s, spare, out=s)
            xp.sqrt(s, out=spare)
            xp.add(spare, eps, out=spare)
            xp.divide(d, spare, out=delta)
            xp.multiply(delta, rate, out=delta)
            tile.subtract()

        return update
