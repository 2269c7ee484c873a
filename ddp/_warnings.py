"""Warnings that a process gives once: of what PyTorch's scripts ask for and what changes nothing here."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str, stacklevel: int = 2) -> None:
    """Warns at the first call with this message. stacklevel: counted as in `warnings.warn`, from the caller of this."""
    warnings.warn(message, stacklevel=stacklevel + 1)
