"""`ddp.backends.native`: fused kernels for the CPU, built when the package is installed."""

from __future__ import annotations

from ddp import _native

__all__ = ["is_available", "why_not"]


def is_available() -> bool:
    """Whether ops on the CPU use fused kernels; without them they run by NumPy's functions, and are slower."""
    return _native.library is not None


def why_not() -> str:
    """Why there are none, and what to do; "" where there are."""
    return _native.missing
