"""`Size`, the type of shapes, and named results, which unpack as tuples and print as PyTorch's do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Size(tuple[int, ...]):
    """The sizes of a tensor's dimensions: a tuple with `numel`. Slices, concatenations and repeats are Sizes, too."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        part = tuple.__getitem__(self, index)
        return Size(part) if type(index) is slice else part

    def __add__(self, other: Any) -> Any:
        joined = tuple.__add__(self, other)
        return joined if joined is NotImplemented else Size(joined)

    def __radd__(self, other: Any) -> Any:
        return Size((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        repeated = tuple.__mul__(self, times)
        return repeated if repeated is NotImplemented else Size(repeated)

    __rmul__ = __mul__

    def numel(self) -> int:
        """The number of elements of a tensor of this shape."""
        return math.prod(self)

    def __repr__(self) -> str:
        return f"ddp.Size({list(self)})"

    def __format__(self, spec: str) -> str:
        return format(str(tuple(self)), spec)  # in messages a shape is (2, 3)


def _text(result: Any) -> str:
    fields = ",\n".join(f"{name}={value!r}" for name, value in zip(result._fields, result, strict=True))
    return f"ddp.return_types.{type(result).__name__}(\n{fields})"


class ValuesAndIndices(NamedTuple):
    """Elements of a tensor, and where each was found along a dimension (int64)."""

    values: Tensor
    indices: Tensor

    def __repr__(self) -> str:
        return _text(self)


class aminmax(NamedTuple):
    """The smallest and the largest elements."""

    min: Tensor
    max: Tensor

    def __repr__(self) -> str:
        return _text(self)


class max(ValuesAndIndices):
    """The largest elements along a dimension, and where each was found (int64)."""


class min(ValuesAndIndices):
    """The smallest elements along a dimension, and where each was found (int64)."""


class median(ValuesAndIndices):
    """The medians along a dimension, and where each was found (int64)."""


class cummax(ValuesAndIndices):
    """The largest elements so far along a dimension, and where each last occurred (int64)."""


class cummin(ValuesAndIndices):
    """The smallest elements so far along a dimension, and where each last occurred (int64)."""


class sort(ValuesAndIndices):
    """The elements in order along a dimension, and where each was (int64)."""


class topk(ValuesAndIndices):
    """The k largest or smallest elements along a dimension, and where each was found (int64)."""


class kthvalue(ValuesAndIndices):
    """The k-th smallest elements along a dimension, and where each was found (int64)."""
