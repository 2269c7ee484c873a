"""Automatic mixed precision: products in 16 bits where that is safe, and gradients scaled so that none vanishes."""

from ddp.amp._autocast import autocast, is_autocast_enabled
from ddp.amp._scaler import GradScaler

__all__ = ["GradScaler", "autocast", "is_autocast_enabled"]
