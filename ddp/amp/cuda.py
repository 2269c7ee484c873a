"""`autocast` and `GradScaler` with the arguments of PyTorch's older `torch.cuda.amp`: the device is CUDA."""

from __future__ import annotations

from typing import Any

from ddp.amp import autocast_mode, grad_scaler

__all__ = ["GradScaler", "autocast"]


class CudaAutocast(autocast_mode.autocast):
    """`ddp.autocast("cuda", dtype, enabled)`."""

    def __init__(self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class CudaGradScaler(grad_scaler.GradScaler):
    """`ddp.amp.GradScaler("cuda", ...)`."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


autocast = CudaAutocast
GradScaler = CudaGradScaler
