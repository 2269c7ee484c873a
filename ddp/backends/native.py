"""`ddp.backends.native`: fused kernels for the CPU, built when the package is installed."""

from __future__ import annotations

from ddp import _native

__all__ = ["is_available", "why_not"]


def is_available() -> bool:
    """Whether ops on the CPU use fused kernels. Without them, ops use NumPy's functions, and are slower."""
    return _native.library is not None


def why_not() -> str:
    """Why there are no fused kernels, and what to do about it; "" if there are."""
    return _native.missing
