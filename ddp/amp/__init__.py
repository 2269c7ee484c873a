"""Automatic mixed precision: matrix products in 16 bits, and losses scaled so that small gradients do not underflow."""

from ddp.amp.autocast_mode import autocast, is_autocast_enabled
from ddp.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "is_autocast_enabled"]
