"""Matrix products of tensors: shapes and dtypes are checked here, so that ops see factors that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddp._engine import modes
from ddp._tensor.arithmetic import adopted, broadcast, required
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.inplace import in_place
from ddp.errors import DtypeError, ShapeError
from ddp.ops import products

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Other = Any  # a tensor, or an array


def matmul(x: TensorBase, y: TensorBase, name: str = "matmul") -> Any:
    """x @ y, checked."""
    a, b = x.array, y.array
    same_dtype(name, x, y)
    if not a.ndim or not b.ndim:
        raise ShapeError(f"{name}: {a.shape} @ {b.shape}: both sides need at least one dimension")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ShapeError(f"{name}: {a.shape} @ {b.shape}: inner dimensions {a.shape[-1]} and {inner} differ")
    if a.ndim > 2 and b.ndim > 2:
        broadcast(a.shape[:-2], b.shape[:-2], f"{name}: {a.shape} @ {b.shape}")
    return apply(products.matmul, (x, y))


def same_dtype(name: str, x: TensorBase, y: TensorBase) -> None:
    """Raises: DtypeError unless both have one dtype, or autocast is going to give them one."""
    a, b = x.array.dtype, y.array.dtype
    if a != b and modes.state.autocast is None:
        raise DtypeError(f"{name}: both sides need one dtype, got {a} and {b}")


def ranks(name: str, *each: tuple[TensorBase, int]) -> None:
    """Raises: ShapeError unless every tensor has its number of dimensions."""
    if any(x.array.ndim != ndim for x, ndim in each):
        got = ", ".join(str(x.array.shape) for x, _ in each)
        raise ShapeError(f"{name}: expected {', '.join(f'{ndim}-d' for _, ndim in each)}, got shapes {got}")


def _plus(name: str, base: Any, made: Any, beta: float, alpha: float) -> Tensor:
    """beta * base + alpha * made; a beta of 0 lets no nan of `base` through."""
    broadcast(base.array.shape, made.array.shape, name)
    if len(base.array.shape) > made.array.ndim or any(
        m not in (1, n) for m, n in zip(base.array.shape[::-1], made.array.shape[::-1], strict=False)
    ):
        raise ShapeError(f"{name}: shape {base.array.shape} does not broadcast to {made.array.shape}")
    if alpha != 1:
        made = made * alpha
    if beta == 0:
        return made
    return made + (base if beta == 1 else base * beta)


class LinearAlgebra(TensorBase):
    """Products of matrices and vectors. Raises: ShapeError naming the dimensions that differ; DtypeError if the dtypes
    do.
    """

    __slots__ = ()

    def __matmul__(self, y: Other) -> Tensor:
        other = y if isinstance(y, TensorBase) else adopted(self, y)
        return NotImplemented if other is None else matmul(self, other)

    def __rmatmul__(self, y: Other) -> Tensor:
        other = adopted(self, y)  # a tensor on the left would have answered itself
        return NotImplemented if other is None else matmul(other, self)

    def matmul(self, other: TensorBase) -> Tensor:
        """The matrix product: (..., n, k) @ (..., k, m); leading dimensions broadcast; a vector is a row or column."""
        return required(self.__matmul__(other), "matmul", other)

    def mm(self, mat2: TensorBase) -> Tensor:
        """(n, k) @ (k, m)."""
        ranks("mm", (self, 2), (mat2, 2))
        return matmul(self, mat2, "mm")

    def bmm(self, mat2: TensorBase) -> Tensor:
        """(b, n, k) @ (b, k, m), without broadcasting."""
        ranks("bmm", (self, 3), (mat2, 3))
        if self.array.shape[0] != mat2.array.shape[0]:
            raise ShapeError(f"bmm: {self.array.shape} @ {mat2.array.shape}: numbers of matrices differ")
        return matmul(self, mat2, "bmm")

    def mv(self, vec: TensorBase) -> Tensor:
        """(n, k) @ (k,)."""
        ranks("mv", (self, 2), (vec, 1))
        return matmul(self, vec, "mv")

    def dot(self, tensor: TensorBase) -> Tensor:
        """The sum of products of two vectors."""
        ranks("dot", (self, 1), (tensor, 1))
        return matmul(self, tensor, "dot")

    vdot = dot

    def outer(self, vec2: TensorBase) -> Tensor:
        """Every product of two vectors: (n,), (m,) to (n, m)."""
        ranks("outer", (self, 1), (vec2, 1))
        return self.unsqueeze(1) * vec2  # type: ignore[attr-defined]  # every tensor has the mixins

    ger = outer

    def inner(self, other: TensorBase) -> Tensor:
        """The sum of products over the last dimensions: (..., k), (..., k); a 0-d factor multiplies."""
        x: Any = self
        y: Any = other
        a, b = x.array, y.array
        if not a.ndim or not b.ndim:
            return x * y
        if a.shape[-1] != b.shape[-1]:
            raise ShapeError(f"inner: {a.shape} and {b.shape}: last dimensions {a.shape[-1]} and {b.shape[-1]} differ")
        flat = y.reshape(-1, b.shape[-1]) if b.size else y.reshape(_rows(b.shape), b.shape[-1])
        return matmul(x, flat.transpose(0, 1), "inner").reshape((*a.shape[:-1], *b.shape[:-1]))

    def trace(self) -> Tensor:
        """The sum of the diagonal of a matrix: (n, m) to (). Raises: ShapeError for other dimensions."""
        ranks("trace", (self, 2))
        return self.diagonal().sum()  # type: ignore[attr-defined]  # as above

    def addmm(self, mat1: TensorBase, mat2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (mat1 @ mat2), of (n, k) and (k, m)."""
        ranks("addmm", (mat1, 2), (mat2, 2))
        return _plus("addmm", self, matmul(mat1, mat2, "addmm"), beta, alpha)

    def addmv(self, mat: TensorBase, vec: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (mat @ vec), of (n, k) and (k,)."""
        ranks("addmv", (mat, 2), (vec, 1))
        return _plus("addmv", self, matmul(mat, vec, "addmv"), beta, alpha)

    def addr(self, vec1: TensorBase, vec2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * outer(vec1, vec2)."""
        return _plus("addr", self, LinearAlgebra.outer(vec1, vec2), beta, alpha)  # type: ignore[arg-type]  # as above

    def baddbmm(self, batch1: TensorBase, batch2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (batch1 @ batch2), of (b, n, k) and (b, k, m)."""
        return _plus("baddbmm", self, LinearAlgebra.bmm(batch1, batch2), beta, alpha)  # type: ignore[arg-type]  # as above

    addmm_, addmv_, addr_, baddbmm_ = in_place(addmm), in_place(addmv), in_place(addr), in_place(baddbmm)


def _rows(shape: Sequence[int]) -> int:
    count = 1
    for n in shape[:-1]:
        count *= n
    return count
