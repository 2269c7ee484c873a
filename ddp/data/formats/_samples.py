"""Elements of columns as samples, of a kind that collating knows: it stacks them into tensors, which know neither
records nor another byte order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.data.formats._files import Array


def element(column: Array, place: int) -> Any:
    """`column[place]`, a view where it can be one, in native byte order; a dict by field where the dtype has fields."""
    return _plain(column[place])


def _plain(value: Any) -> Any:
    if value.dtype.names is not None:
        return {name: _plain(value[name]) for name in value.dtype.names}
    if isinstance(value, np.ndarray) and not (value.dtype.isnative and value.flags.aligned):
        return value.astype(value.dtype.newbyteorder("="))
    return value  # NumPy's scalars are native already
