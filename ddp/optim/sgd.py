"""Stochastic gradient descent, with momentum. Source: Sutskever et al. 2013, for Nesterov's form."""

from __future__ import annotations

from ddp.errors import ArgumentError
from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of


class SGD(FormulaOptimizer):
    """d = grad + weight_decay*p;  v = momentum*v + (1 - dampening)*d (v = d at first and if momentum=0);  p -= lr*v.

    With nesterov, p -= lr*(d + momentum*v). A parameter whose grad is None is not touched. maximize: -grad replaces
    grad. foreach and fused change nothing: one call always updates many parameters.

    Raises: ArgumentError for negative settings other than dampening, differentiable=True, or nesterov without momentum
    or with dampening.
    """

    counted = False

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
        settings = settings_of("SGD", locals())
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentError("SGD: nesterov needs momentum, and no dampening")
        super().__init__(params, settings)

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def formula(self, group: Group) -> list[str]:
        if not group["momentum"]:
            return [*descent(group), "p = p - d * lr"]
        d = "d * (1 - dampening * (step > 1))" if group["dampening"] else "d"
        return [
            *descent(group),
            f"momentum_buffer = momentum_buffer * momentum + {d}",
            f"p = p - {'(momentum_buffer * momentum + d)' if group['nesterov'] else 'momentum_buffer'} * lr",
        ]
