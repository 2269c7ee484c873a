"""AdamW: Adam whose weight decay goes past the moments. Source: Loshchilov & Hutter 2019, arXiv:1711.05101."""

from __future__ import annotations

from typing import Any

from ddp.optim.adam import Adam
from ddp.optim.optimizer import Params


class AdamW(Adam):
    """p *= 1 - lr*weight_decay, then Adam's update with d = grad (-grad to maximize); see `Adam`.

    Raises: ArgumentError for negative settings, or betas not in [0, 1).
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
        flags: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        flags |= {"differentiable": differentiable, "decoupled_weight_decay": True}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **flags)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # also after a state dict of Adam
