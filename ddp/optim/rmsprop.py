"""RMSprop. Source: Tieleman & Hinton 2012 (lecture 6.5); centered: Graves 2013, arXiv:1308.0850."""

from __future__ import annotations

from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of


class RMSprop(FormulaOptimizer):
    """v = alpha*v + (1 - alpha)*d²;  u = d / (sqrt(v) + eps);  p -= lr*u.

    d = grad + weight_decay*p; maximize: -grad replaces grad. With momentum, b = momentum*b + u;  p -= lr*b.
    centered: a = alpha*a + (1 - alpha)*d, and v - a² replaces v under the root. foreach and capturable change nothing.

    Raises: ArgumentError for negative settings, or differentiable=True.
    """

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
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def states(self, group: Group) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def formula(self, group: Group) -> list[str]:
        lines = [*descent(group), "square_avg = square_avg * alpha + d * d * (1 - alpha)"]
        if group["centered"]:
            lines += ["grad_avg = grad_avg + (d - grad_avg) * (1 - alpha)"]
            lines += ["update = d / (sqrt(square_avg - grad_avg * grad_avg) + eps)"]
        else:
            lines += ["update = d / (sqrt(square_avg) + eps)"]
        if group["momentum"] > 0:
            lines += ["momentum_buffer = momentum_buffer * momentum + update"]
        return [*lines, f"p = p - {'momentum_buffer' if group['momentum'] > 0 else 'update'} * lr"]
