"""Lion. Source: Chen et al. 2023, arXiv:2302.06675, Algorithm 2."""

from __future__ import annotations

from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of


class Lion(FormulaOptimizer):
    """p *= 1 - lr*weight_decay;  p -= lr * sign(beta1*m + (1 - beta1)*d);  m = beta2*m + (1 - beta2)*d.

    d = grad, or -grad to maximize. Steps are larger than AdamW's: take a third to a tenth of its lr.

    Raises: ArgumentError for negative settings, or betas not in [0, 1).
    """

    counted = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def formula(self, group: Group) -> list[str]:
        return [
            *descent(group, decoupled=True),
            "update = (d - exp_avg) * (1 - beta1) + exp_avg",
            "exp_avg = exp_avg * beta2 + d * (1 - beta2)",
            "p = p - sign(update) * lr",
        ]
