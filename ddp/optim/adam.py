"""Adam and its relatives: AdamW, NAdam, RAdam and SparseAdam.

Source: Kingma & Ba 2015, arXiv:1412.6980; amsgrad: Reddi et al. 2018, arXiv:1904.09237; AdamW: Loshchilov & Hutter
2019, arXiv:1711.05101; NAdam: Dozat 2016, ICLR workshop; RAdam: Liu et al. 2020, arXiv:1908.03265.
"""

from __future__ import annotations

from typing import Any

from ddp.errors import ArgumentError, warn_once
from ddp.optim.formula_optimizer import FormulaOptimizer, descent
from ddp.optim.optimizer import Group, Params, settings_of

_MOMENTS = (
    "exp_avg = exp_avg + (d - exp_avg) * (1 - beta1)",
    "exp_avg_sq = exp_avg_sq * beta2 + d * d * (1 - beta2)",
)


class Adam(FormulaOptimizer):
    """m = beta1*m + (1 - beta1)*d;  v = beta2*v + (1 - beta2)*d²;  p -= lr * m/c1 / (sqrt(v/c2) + eps).

    d = grad + weight_decay*p;  c1 = 1 - beta1^step, c2 = 1 - beta2^step.  amsgrad: the largest v so far replaces v.
    decoupled_weight_decay: p *= 1 - lr*weight_decay instead, as AdamW does. maximize: -grad replaces grad.
    foreach, fused and capturable change nothing: one call always updates many parameters, and on a GPU updates are
    always fused and capturable.

    Raises: ArgumentError for negative settings, betas not in [0, 1), or differentiable=True.
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
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def formula(self, group: Group) -> list[str]:
        v = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        # lr * m/c1 / (sqrt(v/c2) + eps) = lr*sqrt(c2)/c1 * m / (sqrt(v) + eps*sqrt(c2)): saves one pass over the arrays
        root = "sqrt(1 - pow(beta2, step))"
        return [
            *descent(group, decoupled=group["decoupled_weight_decay"]),
            *_MOMENTS,
            *(["max_exp_avg_sq = maximum(exp_avg_sq, max_exp_avg_sq)"] if group["amsgrad"] else []),
            f"p = p - exp_avg / (sqrt({v}) + (eps * {root})) * (lr * {root} / (1 - pow(beta1, step)))",
        ]


class _TwoMoments(FormulaOptimizer):
    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


class SparseAdam(_TwoMoments):
    """Adam's update of the elements whose gradient is not 0; the others keep value and moments.

    m = beta1*m + (1 - beta1)*d;  v = beta2*v + (1 - beta2)*d²;  p -= lr * sqrt(c2)/c1 * m / (sqrt(v) + eps).
    d = grad, or -grad to maximize;  c1, c2: as in `Adam`. Gradients are dense here, even from Embedding(sparse=True): a
    warning says so once.

    Raises: ArgumentError for an eps of 0, negative settings, or betas not in [0, 1).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        warn_once(
            "SparseAdam: gradients are dense here, and an element whose gradient is 0 is left as it is; "
            "PyTorch leaves whole rows that were not used"
        )
        super().__init__(params, settings_of("SparseAdam", locals()))
        if not eps:
            raise ArgumentError("SparseAdam: eps is above 0, got 0")

    def formula(self, group: Group) -> list[str]:
        return [
            "d = -grad" if group["maximize"] else "d = grad",
            "used = sign(d) * sign(d)",
            "exp_avg = exp_avg + (d - exp_avg) * (1 - beta1) * used",
            "exp_avg_sq = exp_avg_sq + (d * d - exp_avg_sq) * (1 - beta2) * used",
            "scale = used * (lr * sqrt(1 - pow(beta2, step)) / (1 - pow(beta1, step)))",
            "p = p - exp_avg / (sqrt(exp_avg_sq) + eps) * scale",
        ]


class AdamW(Adam):
    """p *= 1 - lr*weight_decay, then Adam's update with d = grad (-grad to maximize); see `Adam`.

    Raises: ArgumentError for negative settings, betas not in [0, 1), or differentiable=True.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # a state dict of Adam may contain False


class NAdam(_TwoMoments):
    """Adam's m and v;  p -= lr * (mu_next*m/(1 - P*mu_next) + (1 - mu)*d/(1 - P)) / (sqrt(v/c2) + eps).

    d = grad + weight_decay*p;  c2 = 1 - beta2^step;  mu = beta1*(1 - 0.5*0.96^(step*momentum_decay)), mu_next: mu of
    the next step;  P = the product of all mu so far, in float32 as PyTorch keeps it. decoupled_weight_decay, maximize,
    foreach and capturable: see `Adam`.

    Raises: ArgumentError for negative settings, betas not in [0, 1), or differentiable=True.
    """

    factor = "beta1 * (1 - 0.5 * pow(0.96, step * momentum_decay))"

    def __init__(
        self,
        params: Params,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def formula(self, group: Group) -> list[str]:
        root = "sqrt(1 - pow(beta2, step))"  # as in Adam.formula
        following = "beta1 * (1 - 0.5 * pow(0.96, (step + 1) * momentum_decay))"
        momentum = f"(lr * {root} * {following} / (1 - mu_product * {following}))"
        gradient = f"(lr * {root} * (1 - {self.factor}) / (1 - mu_product))"
        return [
            *descent(group, decoupled=group["decoupled_weight_decay"]),
            *_MOMENTS,
            f"p = p - (exp_avg * {momentum} + d * {gradient}) / (sqrt(exp_avg_sq) + (eps * {root}))",
        ]


class RAdam(_TwoMoments):
    """Adam's m and v;  p -= lr * m/c1 * r*sqrt(c2) / (sqrt(v) + eps), and p -= lr * m/c1 while r is 0.

    d = grad + weight_decay*p;  c1, c2: as in `Adam`;  r = `formula.rectification` of the step and beta2.
    decoupled_weight_decay, maximize, foreach and capturable: see `Adam`.

    Raises: ArgumentError for negative settings, betas not in [0, 1), or differentiable=True.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(params, settings_of(type(self).__name__, locals()))

    def formula(self, group: Group) -> list[str]:
        ratio = "rectification(step, beta2)"
        adaptive = f"exp_avg / (sqrt(exp_avg_sq) + eps) * ({ratio} * sqrt(1 - pow(beta2, step)))"
        return [
            *descent(group, decoupled=group["decoupled_weight_decay"]),
            *_MOMENTS,
            f"p = p - ({adaptive} + exp_avg * ({ratio} == 0)) * (lr / (1 - pow(beta1, step)))",
        ]
