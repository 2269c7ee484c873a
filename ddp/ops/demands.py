"""What must be true of every number: said at once of NumPy's, and of a GPU's to whoever waits for it next."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.ops._op import Array
from ddp.ops.cuda import bounds


def demand(xp: Any, fine: Array, error: type[Exception], message: str) -> None:
    """An error if any of `fine` (bool) is not: at once for NumPy's, else for whoever waits next."""
    if isinstance(fine, np.ndarray | np.generic):
        if not fine.all():
            raise error(message)
        return
    bounds.demand(xp, fine, error, message)
