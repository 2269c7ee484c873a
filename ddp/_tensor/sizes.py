"""`Size`: what a shape is called, so that `x.shape.numel()` and `print(x.shape)` are PyTorch's."""

from __future__ import annotations

import math


class Size(tuple[int, ...]):
    """The sizes of a tensor's dimensions: a tuple that also counts the elements. Slices of it are plain tuples."""

    # No __getitem__ of our own: it would make x.shape[0] three times slower, for the sake of x.shape[1:].numel().
    __slots__ = ()

    def numel(self) -> int:
        """The number of elements of a tensor of this shape."""
        return math.prod(self)

    def __repr__(self) -> str:
        return f"ddp.Size({list(self)})"

    def __format__(self, spec: str) -> str:
        return format(str(tuple(self)), spec)  # in messages a shape is (2, 3)
