"""An optimizer of one's own whose state has other dtypes than its parameters, and arrays among its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import ddp


class WideState(ddp.optim.Optimizer):
    """Float32 master weights, float64 sums as a tensor and as an array, and single values; each element for itself."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @ddp.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad.double()
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["sum"] = ddp.zeros(p.shape, dtype=ddp.float64)
                    state["array"] = np.zeros(tuple(p.shape))
                    state["scalar"] = ddp.tensor(1.0, dtype=ddp.float64)
                    state["array_scalar"] = np.array(1.0)
                    state["one"] = ddp.ones(1)
                    state["number"] = np.float64(1.0)
                    state["nested"] = {"decay": [ddp.tensor(1.0, dtype=ddp.float64)]}
                state["sum"] += grad
                state["array"] += np.asarray(grad)
                for single in (state["scalar"], state["array_scalar"], state["nested"]["decay"][0]):
                    single *= 1 - 1e-12
                state["number"] *= 1 - 1e-12
                scale = group["lr"] * state["scalar"].item() * float(state["array_scalar"]) * state["number"]
                both = state["sum"] + ddp.from_numpy(state["array"])
                state["master"] -= (scale * state["nested"]["decay"][0].item() * both).float()
                p.copy_(state["master"])


def kinds(state: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Type, dtype, shape and bytes of each entry."""
    flat = {**state, **({"nested": state["nested"]["decay"][0]} if "nested" in state else {})}
    return {
        name: (type(value), str(value.dtype), tuple(value.shape), np.asarray(value).tobytes())
        for name, value in flat.items()
    }
