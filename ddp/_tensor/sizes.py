"""`Size`: what a shape is called, so that `x.shape[1:].numel()` and `print(x.shape)` are PyTorch's."""

from __future__ import annotations

import math
from typing import Any


class Size(tuple[int, ...]):
    """The sizes of a tensor's dimensions: a tuple that also counts the elements. Slices and sums are Sizes too."""

    __slots__ = ()

    def __getitem__(self, at: Any) -> Any:
        found = tuple.__getitem__(self, at)
        return Size(found) if type(at) is slice else found

    def __add__(self, other: Any) -> Any:
        found = tuple.__add__(self, other)
        return found if found is NotImplemented else Size(found)

    def __radd__(self, other: Any) -> Any:
        return Size((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        found = tuple.__mul__(self, times)
        return found if found is NotImplemented else Size(found)

    __rmul__ = __mul__

    def numel(self) -> int:
        """The number of elements of a tensor of this shape."""
        return math.prod(self)

    def __repr__(self) -> str:
        return f"ddp.Size({list(self)})"

    def __format__(self, spec: str) -> str:
        return format(str(tuple(self)), spec)  # in messages a shape is (2, 3)
