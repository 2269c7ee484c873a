"""The function forms: those that take several tensors live here, the others call the method of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.arithmetic import aligned, broadcast, convert
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import as_tensor
from ddp._tensor.dtypes import promote
from ddp._tensor.reductions import Dims, axis
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import elementwise, shape


def _one_dtype(tensors: Sequence[Tensor], name: str) -> list[TensorBase]:
    if not tensors:
        raise ArgumentError(f"{name}: expected at least one tensor")
    dtype, dims = tensors[0].dtype, tensors[0].ndim
    for x in tensors[1:]:
        dtype = promote(dtype, dims, x.dtype, x.ndim)
    return [convert(x, dtype) for x in tensors]


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`; all other sizes are equal. Raises: ShapeError, ArgumentError for no tensor."""
    xs = _one_dtype(tensors, "cat")
    at = axis(xs[0], dim, "cat")
    first = tensors[0].shape
    for x in tensors:
        if not x.ndim or (*x.shape[:at], *x.shape[at + 1 :]) != (*first[:at], *first[at + 1 :]) or x.ndim != len(first):
            raise ShapeError(f"cat along dimension {at}: shapes {first} and {x.shape} differ elsewhere, or are 0-d")
    return apply(shape.cat, xs, dim=at)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, side by side along a new `dim`. Raises: ShapeError, ArgumentError, RangeError."""
    xs = _one_dtype(tensors, "stack")
    first = tensors[0].shape
    for x in tensors:
        if x.shape != first:
            raise ShapeError(f"stack: shapes {first} and {x.shape} differ")
    if not -len(first) - 1 <= dim <= len(first):
        raise RangeError(f"stack: dimension {dim}: expected {-len(first) - 1} to {len(first)}")
    return apply(shape.stack, xs, dim=dim % (len(first) + 1))


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    """`input` where `condition` (bool) holds, else `other`; all three broadcast. Raises: DtypeError, ShapeError."""
    if condition.dtype.kind != "b":
        raise DtypeError(f"where: the condition is bool, not {condition.dtype}")
    if not isinstance(input, TensorBase):
        input = as_tensor(input, device=condition.device)
    pair = aligned(input, other, "where")
    if pair is None:
        raise DtypeError(f"where: expected tensors or numbers, got {type(other).__name__}")
    for x in pair:
        broadcast(condition.shape, getattr(x, "shape", ()), "where")
    return apply(elementwise.where, (condition, *pair))


def maximum(input: Tensor, other: Tensor) -> Tensor:
    """The larger of both, elementwise."""
    return input.maximum(other)


def minimum(input: Tensor, other: Tensor) -> Tensor:
    """The smaller of both, elementwise."""
    return input.minimum(other)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """The matrix product: (..., n, k) @ (..., k, m). Raises: ShapeError."""
    return input.matmul(other)


def exp(input: Tensor) -> Tensor:
    """e to the power of each element."""
    return input.exp()


def log(input: Tensor) -> Tensor:
    """The natural logarithm."""
    return input.log()


def sqrt(input: Tensor) -> Tensor:
    """The square root."""
    return input.sqrt()


def abs(input: Tensor) -> Tensor:
    """The absolute value."""
    return input.abs()


def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return input.tanh()


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input))."""
    return input.sigmoid()


def relu(input: Tensor) -> Tensor:
    """max(input, 0)."""
    return input.relu()


def clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Held within [min, max]."""
    return input.clamp(min, max)


def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all."""
    return input.sum(dim, keepdim, dtype)


def mean(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean over `dim`, or over all."""
    return input.mean(dim, keepdim)


def amax(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element over `dim`, or over all."""
    return input.amax(dim, keepdim)


def amin(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest element over `dim`, or over all."""
    return input.amin(dim, keepdim)


def max(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The largest element; with `dim`, (values, indices) along it."""
    return input.max(dim, keepdim)


def min(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest element; with `dim`, (values, indices) along it."""
    return input.min(dim, keepdim)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the first largest element is, int64."""
    return input.argmax(dim, keepdim)


def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) over `dim`."""
    return input.logsumexp(dim, keepdim)


def softmax(input: Tensor, dim: int) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`."""
    return input.softmax(dim)


def log_softmax(input: Tensor, dim: int) -> Tensor:
    """log(softmax(input)) along `dim`."""
    return input.log_softmax(dim)


def reshape(input: Tensor, size: Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return input.reshape(size)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return input.transpose(dim0, dim1)


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions in another order."""
    return input.permute(dims)


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dimensions start_dim to end_dim (inclusive) joined into one."""
    return input.flatten(start_dim, end_dim)


def squeeze(input: Tensor, dim: int | None = None) -> Tensor:
    """Without dimensions of size 1."""
    return input.squeeze(dim)


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """With a new dimension of size 1 at `dim`."""
    return input.unsqueeze(dim)
