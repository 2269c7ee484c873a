"""Adadelta. Source: Zeiler 2012, arXiv:1212.5701."""

from __future__ import annotations

from ddp.errors import ArgumentError
from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of


class Adadelta(FormulaOptimizer):
    """v = rho*v + (1 - rho)*d²;  u = d * sqrt(a + eps)/sqrt(v + eps);  a = rho*a + (1 - rho)*u²;  p -= lr*u.

    d = grad + weight_decay*p.  maximize: -grad replaces grad.  foreach and capturable change nothing.

    Raises: ArgumentError for negative settings, rho above 1, or differentiable=True.
    """

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
        settings = settings_of("Adadelta", locals())
        if rho > 1:
            raise ArgumentError(f"Adadelta: rho is in [0, 1], got {rho}")
        super().__init__(params, settings)

    def states(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def formula(self, group: Group) -> list[str]:
        return [
            *descent(group),
            "square_avg = square_avg * rho + d * d * (1 - rho)",
            "update = d / sqrt(square_avg + eps) * sqrt(acc_delta + eps)",
            "acc_delta = acc_delta * rho + update * update * (1 - rho)",
            "p = p - update * lr",
        ]
