"""Warnings that a process gives once, of what a script asks for and does not get."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str, stacklevel: int = 2, category: type[Warning] = UserWarning) -> None:
    """Warns at the first call with these arguments. stacklevel: as of `warnings.warn` called in the place of this."""
    warnings.warn(message, category, stacklevel=stacklevel + 1)
