"""Automatic mixed precision: products in 16 bits where that is safe, and gradients scaled so that none underflows."""

from ddp.amp.autocast_mode import autocast, is_autocast_enabled
from ddp.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "is_autocast_enabled"]
