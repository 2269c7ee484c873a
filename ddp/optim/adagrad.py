"""Adagrad. Source: Duchi et al. 2011, JMLR 12."""

from __future__ import annotations

from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of


class Adagrad(FormulaOptimizer):
    """s += d²;  p -= lr/(1 + (step - 1)*lr_decay) * d / (sqrt(s) + eps);  s starts as initial_accumulator_value.

    d = grad + weight_decay*p.  maximize: -grad replaces grad.  foreach and fused change nothing.

    Raises: ArgumentError for negative settings, or differentiable=True.
    """

    eager = True  # as in PyTorch, so that state dicts hold the same entries

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
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def states(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, group: Group) -> float:
        return group["initial_accumulator_value"]

    def formula(self, group: Group) -> list[str]:
        return [
            *descent(group),
            "sum = sum + d * d",
            "p = p - d / (sqrt(sum) + eps) * (lr / (1 + (step - 1) * lr_decay))",
        ]
