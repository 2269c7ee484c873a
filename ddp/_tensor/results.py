"""`Size`, what a shape is called, and named results, which unpack as tuples and print as PyTorch's do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


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


class max(NamedTuple):
    """The largest elements along a dimension, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


class min(NamedTuple):
    """The smallest elements along a dimension, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


class median(NamedTuple):
    """The medians along a dimension, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


class cummax(NamedTuple):
    """The largest elements so far along a dimension, and the last place of each (int64)."""

    values: Tensor
    indices: Tensor


class cummin(NamedTuple):
    """The smallest elements so far along a dimension, and the last place of each (int64)."""

    values: Tensor
    indices: Tensor


class sort(NamedTuple):
    """The elements in order along a dimension, and where each was (int64)."""

    values: Tensor
    indices: Tensor


class topk(NamedTuple):
    """The k largest or smallest elements along a dimension, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


class kthvalue(NamedTuple):
    """The k-th smallest elements along a dimension, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


class aminmax(NamedTuple):
    """The smallest and the largest elements."""

    min: Tensor
    max: Tensor


def _text(result: Any) -> str:
    fields = ",\n".join(f"{name}={value!r}" for name, value in zip(result._fields, result, strict=True))
    return f"ddp.return_types.{type(result).__name__}(\n{fields})"


for _kind in (max, min, median, cummax, cummin, sort, topk, kthvalue, aminmax):
    setattr(_kind, "__repr__", _text)  # noqa: B010  # NamedTuples have no base that could define it
