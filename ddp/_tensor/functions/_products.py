"""Matrix products as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.arithmetic import broadcast
from ddp._tensor.core import Tensor
from ddp._tensor.einstein import einsum_of, parsed
from ddp._tensor.functions._called import called
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, ShapeError


@called
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """The matrix product: (..., n, k) @ (..., k, m). Raises: ShapeError."""
    return input.matmul(other)


@called
def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """(n, k) @ (k, m). Raises: ShapeError."""
    return input.mm(mat2)


@called
def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """(b, n, k) @ (b, k, m), without broadcasting. Raises: ShapeError."""
    return input.bmm(mat2)


@called
def mv(input: Tensor, vec: Tensor) -> Tensor:
    """(n, k) @ (k,). Raises: ShapeError."""
    return input.mv(vec)


@called
def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """The sum of products of two vectors. Raises: ShapeError."""
    return input.dot(tensor)


@called
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """Every product of two vectors: (n,), (m,) to (n, m). Raises: ShapeError."""
    return input.outer(vec2)


@called
def inner(input: Tensor, other: Tensor) -> Tensor:
    """The sum of products over the last dimensions. Raises: ShapeError."""
    return input.inner(other)


def trace(input: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix: (n, m) to (). Raises: ShapeError for other dimensions."""
    return input.trace()


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The p-norm of every difference of rows: (..., n, d), (..., m, d) to (..., n, m); leading dimensions broadcast.

    compute_mode: accepted, and changes nothing: differences are taken, never the less exact products. Needs memory for
    all of them. Raises: ShapeError, DtypeError.
    """
    a, b = x1.shape, x2.shape
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-1]:
        raise ShapeError(f"cdist: shapes {a} and {b}: expected (..., n, d) and (..., m, d)")
    broadcast(a[:-2], b[:-2], "cdist")
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, -1)


@called
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * input + alpha * (mat1 @ mat2). Raises: ShapeError."""
    return input.addmm(mat1, mat2, beta=beta, alpha=alpha)


@called
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * input + alpha * (mat @ vec). Raises: ShapeError."""
    return input.addmv(mat, vec, beta=beta, alpha=alpha)


@called
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * input + alpha * outer(vec1, vec2). Raises: ShapeError."""
    return input.addr(vec1, vec2, beta=beta, alpha=alpha)


@called
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * input + alpha * (batch1 @ batch2). Raises: ShapeError."""
    return input.baddbmm(batch1, batch2, beta=beta, alpha=alpha)


def einsum(equation: Any, *operands: Any) -> Tensor:
    """The sum of products that `equation` describes: "bij,bjk->bik", with "..." for broadcast dimensions.

    A label that stands twice in one operand is its diagonal; without "->" the result has the labels that stand once,
    in alphabetical order. Also einsum(x, [0, 1], y, [1, 2], [0, 2]), and einsum(equation, [x, y]). Several operands are
    multiplied from left to right.

    Raises: ArgumentError for an equation that does not fit the operands; ShapeError for sizes that differ.
    """
    return einsum_of(*parsed(equation, operands))


@called
def tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """The sum of products over pairs of dimensions: the last `dims` of `a` with the first of `b`, or two lists.

    Raises: ShapeError, ArgumentError, RangeError.
    """
    if isinstance(dims, int):
        if not 0 <= dims <= min(a.ndim, b.ndim):
            raise ArgumentError(f"tensordot: {dims} dimensions of shapes {a.shape} and {b.shape}")
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left = [axis(a, d, "tensordot") for d in dims[0]]
        right = [axis(b, d, "tensordot") for d in dims[1]]
        if len(left) != len(right):
            raise ArgumentError(f"tensordot: {len(left)} dimensions of one, {len(right)} of the other")
    for i, j in zip(left, right, strict=True):
        if a.shape[i] != b.shape[j]:
            raise ShapeError(f"tensordot: {a.shape} and {b.shape}: sizes of dimensions {i} and {j} differ")
    of_a = list(range(a.ndim))
    of_b = [left[right.index(j)] if j in right else a.ndim + j for j in range(b.ndim)]
    out = [k for k in of_a if k not in left] + [k for k in of_b if k >= a.ndim]
    return einsum_of([a, b], [of_a, of_b], out)


@called
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker's product: every element of `input` times the whole of `other`, block by block."""
    ndim = max(input.ndim, other.ndim)
    a = input.reshape((1,) * (ndim - input.ndim) + input.shape)
    b = other.reshape((1,) * (ndim - other.ndim) + other.shape)
    sizes = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    spread = a.reshape([size for n in a.shape for size in (n, 1)]) * b.reshape([s for n in b.shape for s in (1, n)])
    return spread.reshape(sizes)
