"""Named results, which unpack as tuples and print as PyTorch's do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


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
