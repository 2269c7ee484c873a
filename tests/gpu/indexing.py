"""Reading and writing by index as CuPy does it: a mask waits. What is out of range is an error here, and not there."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.arrays import Array
from tests.gpu.working import Working


class Indexing(Working):
    """The part of the stand-in behind x[index]."""

    def _index(self, index: Any) -> tuple[tuple[Any, ...], bool, bool]:
        """An index on the host's side, whether it is more than slices, and whether its result's size is in a mask."""
        parts = []
        advanced = False
        masks = False
        for each in index if isinstance(index, tuple) else (index,):
            assert not isinstance(each, list | np.ndarray), "CuPy copies it to the device"
            if isinstance(each, Array):
                advanced = True
                masks = masks or each.dtype.kind == "b"
                if each.dtype.kind not in "biu":
                    raise IndexError("arrays used as indices must be of integer or boolean type.")
            elif isinstance(each, bool | np.bool):
                advanced = masks = True
            parts.append(each)
        return tuple(parts), advanced, masks

    def _getitem(self, x: Any, index: Any) -> Any:
        parts, advanced, masks = self._index(index)
        if not advanced:
            whole = parts if any(part is Ellipsis for part in parts) else (*parts, ...)
            return x._view(x._host[whole])
        return self._compute("getitem", lambda x, *index: x[index], (x, *parts), waits=masks)

    def _setitem(self, x: Any, index: Any, value: Any) -> None:
        parts, advanced, masks = self._index(index)
        held = [x]
        if isinstance(value, np.ndarray):
            if value.shape != ():
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        source = self._host_of(value, held)
        if masks:
            self.wait("setitem with a mask")
        hosts = self._host_of(parts, held)
        target = x._host
        if self.deferred:  # what NumPy refuses, it refuses now
            np.broadcast_to(
                np.empty(np.shape(source)), self._dummy(target)[self._dummy(hosts)].shape
            ) if not masks else None
        self._launch("setitem" if advanced else "copy", lambda: target.__setitem__(hosts, source), held)
