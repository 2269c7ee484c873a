"""Linear algebra under PyTorch's names: matrix products, and norms of vectors and matrices without decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.functions import matmul
from ddp._tensor.operands import as_sequence, check_tensor
from ddp._tensor.reductions import Dims, resolve_axes, resolve_axis
from ddp.errors import ArgumentError

__all__ = ["matmul", "matrix_norm", "norm", "vector_norm"]


def vector_norm(x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """(sum |x|^ord)^(1/ord) over `dim`; None: over all dimensions. ord: a number, inf or -inf; 0: number of non-zeros.

    Raises: DtypeError unless floating; ArgumentError if ord is inf or negative and there are no elements; RangeError
    for a dimension that does not exist.
    """
    check_tensor("vector_norm", x)
    return x.norm(ord, dim, keepdim, dtype)


def matrix_norm(
    A: Tensor, ord: float | str = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """A norm of matrices. ord: "fro": the root of the sum of squares; 1 and -1: the largest and the smallest sum of a
    column's absolute values; inf and -inf: the largest and the smallest sum of a row's absolute values.

    Raises: ArgumentError for another `ord` (2, -2 and "nuc" need singular values), if `dim` does not name two
    dimensions, or for matrices without columns (1 and -1) or without rows (inf and -inf); RangeError for a dimension
    that does not exist; DtypeError unless floating.
    """
    check_tensor("matrix_norm", A)
    dim = as_sequence(dim)
    if len(dim) != 2:
        raise ArgumentError(f"matrix_norm: expected two dimensions, got {tuple(dim)}")
    resolve_axes(A, dim, "matrix_norm")
    if ord == "fro":
        return A.norm(2, dim, keepdim, dtype)
    if isinstance(ord, str) or ord not in (1, -1, float("inf"), float("-inf")):
        raise ArgumentError(f"matrix_norm: ord is 'fro', 1, -1, inf or -inf, not {ord!r}")
    row, column = (resolve_axis(A, d, "matrix_norm") for d in dim)
    summed, left = (row, column) if abs(ord) == 1 else (column, row)
    sums = A.norm(1, summed, True, dtype)
    out = sums.amax(left, True) if ord > 0 else sums.amin(left, True)
    if keepdim:
        return out
    return out.reshape([n for i, n in enumerate(A.shape) if i not in (row, column)])


def norm(
    A: Tensor, ord: float | str | None = None, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Computes a vector norm over one dimension, or a matrix norm over two. dim: None: all dimensions

    Without `ord`, the result is the root of the sum of all squares, over any number of dimensions.

    Raises: ArgumentError if `ord` is given for another number of dimensions, or is a string for one dimension; what
    `vector_norm` and `matrix_norm` raise.
    """
    check_tensor("norm", A)
    if ord is None:
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    over = range(A.ndim) if dim is None else as_sequence(dim)
    if len(over) == 2:
        return matrix_norm(A, ord, over, keepdim, dtype=dtype)
    if isinstance(ord, str) or len(over) != 1:
        raise ArgumentError(f"norm: ord={ord!r} over {len(over)} dimensions")
    return vector_norm(A, ord, over, keepdim, dtype=dtype)
