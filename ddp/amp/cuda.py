"""`autocast` and `GradScaler` with the arguments of PyTorch's older `torch.cuda.amp`: the device is CUDA."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from ddp.amp import autocast_mode, grad_scaler

__all__ = ["GradScaler", "autocast"]


class CudaAutocast(autocast_mode.autocast):
    """The same as `ddp.autocast("cuda", dtype, enabled, cache_enabled)`, with `enabled` as the first argument."""

    def __init__(self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class CudaGradScaler(grad_scaler.GradScaler):
    """The same as `ddp.amp.GradScaler("cuda", ...)`, without the device among the arguments."""

    __init__ = partialmethod(grad_scaler.GradScaler.__init__, "cuda")


autocast = CudaAutocast
GradScaler = CudaGradScaler
