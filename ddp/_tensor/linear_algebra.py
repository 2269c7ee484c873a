"""Matrix products and einsum: shapes and dtypes are checked here, so that ops get factors that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from string import ascii_letters
from typing import Any

from ddp._engine import modes
from ddp._tensor.base import Tensor, TensorBase, apply
from ddp._tensor.complex_numbers import ComplexTensor, product
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.inplace import in_place, with_out
from ddp._tensor.operands import Other, array_as_tensor, broadcast, check_operand
from ddp._tensor.reductions import resolve_axis
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import products

__all__ = ["cdist", "einsum", "kron", "tensordot"]


def matmul(x: TensorBase, y: TensorBase, name: str = "matmul") -> Any:
    """Checks dtypes and shapes, and computes x @ y."""
    a = x.array
    b = y.array
    check_same_dtype(name, x, y)
    if not a.ndim or not b.ndim:
        raise ShapeError(f"{name}: {a.shape} @ {b.shape}: both sides need at least one dimension")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ShapeError(f"{name}: {a.shape} @ {b.shape}: inner dimensions {a.shape[-1]} and {inner} differ")
    if a.ndim > 2 and b.ndim > 2:
        broadcast(a.shape[:-2], b.shape[:-2], f"{name}: {a.shape} @ {b.shape}")
    return apply(products.matmul, (x, y))


def check_same_dtype(name: str, x: TensorBase, y: TensorBase) -> None:
    """Checks that the dtypes are equal. Raises: DtypeError if not, unless autocast is on, which casts the tensors."""
    a = x.array.dtype
    b = y.array.dtype
    if a != b and modes.state.autocast is None:
        raise DtypeError(f"{name}: both sides need one dtype, got {a} and {b}")


def check_ndim(name: str, *expected: tuple[TensorBase, int]) -> None:
    """Checks the tensors' numbers of dimensions. Raises: ShapeError if one is not the expected number."""
    if any(x.array.ndim != ndim for x, ndim in expected):
        got = ", ".join(str(x.array.shape) for x, _ in expected)
        raise ShapeError(f"{name}: expected {', '.join(f'{ndim}-d' for _, ndim in expected)}, got shapes {got}")


def _add_scaled(name: str, base: Any, product: Any, beta: float, alpha: float) -> Tensor:
    """Computes beta * base + alpha * product; beta=0 ignores `base`, even if it has nan."""
    if broadcast_shape(name, base.array.shape, product.array.shape) != product.array.shape:
        raise ShapeError(f"{name}: shape {base.array.shape} does not broadcast to {product.array.shape}")
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (base if beta == 1 else base * beta)


class LinearAlgebra(TensorBase):
    """Products of matrices and vectors.

    Raises: ShapeError for shapes that do not fit; DtypeError if factors differ in dtype and autocast is off. Products
    without a sum promote factors instead: `outer`, `addr`, and `inner` with a 0-d factor.
    """

    __slots__ = ()

    def __matmul__(self, y: Other) -> Tensor:
        factor = y if isinstance(y, TensorBase) else array_as_tensor(self, y)
        return NotImplemented if factor is None else matmul(self, factor)

    def __rmatmul__(self, y: Other) -> Tensor:
        factor = array_as_tensor(self, y)  # the left operand is not a tensor, or its own method would have been called
        return NotImplemented if factor is None else matmul(factor, self)

    def matmul(self, other: TensorBase) -> Tensor:
        """The matrix product: (..., n, k) @ (..., k, m); leading dimensions broadcast; a vector is a row or column."""
        return check_operand(self.__matmul__(other), "matmul", other)

    def mm(self, mat2: TensorBase) -> Tensor:
        """(n, k) @ (k, m)."""
        check_ndim("mm", (self, 2), (mat2, 2))
        return matmul(self, mat2, "mm")

    def bmm(self, mat2: TensorBase) -> Tensor:
        """(b, n, k) @ (b, k, m), without broadcasting."""
        check_ndim("bmm", (self, 3), (mat2, 3))
        if self.array.shape[0] != mat2.array.shape[0]:
            raise ShapeError(f"bmm: {self.array.shape} @ {mat2.array.shape}: numbers of matrices differ")
        return matmul(self, mat2, "bmm")

    def mv(self, vec: TensorBase) -> Tensor:
        """(n, k) @ (k,)."""
        check_ndim("mv", (self, 2), (vec, 1))
        return matmul(self, vec, "mv")

    def dot(self, tensor: TensorBase) -> Tensor:
        """The sum of products of two vectors."""
        check_ndim("dot", (self, 1), (tensor, 1))
        return matmul(self, tensor, "dot")

    vdot = dot

    def outer(self, vec2: TensorBase) -> Tensor:
        """The products of every element of one vector with every element of another: (n,), (m,) to (n, m)."""
        check_ndim("outer", (self, 1), (vec2, 1))
        return self.unsqueeze(1) * vec2  # type: ignore[attr-defined]  # every tensor has the mixins

    ger = outer

    def inner(self: Any, other: Any) -> Tensor:
        """Sums products over the last dimensions: (n..., k), (m..., k) to (n..., m...).

        If a factor is 0-d, the result is self * other.
        """
        a = self.array
        b = other.array
        if not a.ndim or not b.ndim:
            return self * other
        if a.shape[-1] != b.shape[-1]:
            raise ShapeError(f"inner: {a.shape} and {b.shape}: last dimensions {a.shape[-1]} and {b.shape[-1]} differ")
        flat = other.reshape(math.prod(b.shape[:-1]), b.shape[-1])
        return matmul(self, flat.transpose(0, 1), "inner").reshape((*a.shape[:-1], *b.shape[:-1]))

    def trace(self) -> Tensor:
        """The sum of the diagonal of a matrix: (n, m) to (). Raises: ShapeError for other dimensions."""
        check_ndim("trace", (self, 2))
        return self.diagonal().sum()  # type: ignore[attr-defined]  # as above

    def addmm(self, mat1: TensorBase, mat2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (mat1 @ mat2), of (n, k) and (k, m)."""
        check_ndim("addmm", (mat1, 2), (mat2, 2))
        return _add_scaled("addmm", self, matmul(mat1, mat2, "addmm"), beta, alpha)

    def addmv(self, mat: TensorBase, vec: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (mat @ vec), of (n, k) and (k,)."""
        check_ndim("addmv", (mat, 2), (vec, 1))
        return _add_scaled("addmv", self, matmul(mat, vec, "addmv"), beta, alpha)

    def addr(self, vec1: TensorBase, vec2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * outer(vec1, vec2)."""
        return _add_scaled("addr", self, LinearAlgebra.outer(vec1, vec2), beta, alpha)  # type: ignore[arg-type]  # as above

    def baddbmm(self, batch1: TensorBase, batch2: TensorBase, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """beta * self + alpha * (batch1 @ batch2), of (b, n, k) and (b, k, m)."""
        return _add_scaled("baddbmm", self, LinearAlgebra.bmm(batch1, batch2), beta, alpha)  # type: ignore[arg-type]  # as above

    addmm_ = in_place(addmm)
    addmv_ = in_place(addmv)
    addr_ = in_place(addr)
    baddbmm_ = in_place(baddbmm)


Labels = list[int]
Terms = tuple[list[Any], list[Labels], Labels]  # operands, the labels of each operand, the labels of the result
DOTS = -1  # stands for "..." until the operands' numbers of dimensions are known


def parse_equation(equation: Any, operands: Sequence[Any]) -> Terms:
    """Parses an einsum equation. Returns the operands, the labels of each operand, and the labels of the result.

    Raises: ArgumentError if the equation is not a string, or does not fit the operands.
    """
    if not isinstance(equation, str):
        raise ArgumentError(f"einsum: the equation is a string, not {type(equation).__name__}")
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_labels(term, equation) for term in left.split(",")]
    return _expanded(list(operands), terms, _labels(right, equation) if arrow else None)


def _labels(term: str, equation: str) -> Labels:
    before, dots, after = term.partition("...")
    letters = before + after
    if not all(c.isascii() and c.isalpha() for c in letters):
        raise ArgumentError(f"einsum: {term!r} in {equation!r}: expected letters, with ... at most once")
    # Upper case comes first, as in ASCII.
    return [*map(ord, before), *([DOTS] if dots else []), *map(ord, after)]


def _expanded(operands: list[Any], terms: list[Labels], out: Labels | None) -> Terms:
    """Replaces "..." in the labels by negative numbers, one for each dimension, counted from the right.

    out: the labels of the result; None: the dimensions of "...", then the labels that occur once, in order

    Raises: ArgumentError if the labels do not fit the operands, or `out` has a label twice, or one that no operand has.
    """
    if len(operands) != len(terms) or not operands:
        raise ArgumentError(f"einsum: {len(terms)} terms for {len(operands)} operands")
    full = []
    most = 0
    for x, labels in zip(operands, terms, strict=True):
        spare = x.array.ndim - len([k for k in labels if k != DOTS])
        if spare < 0 or (spare and DOTS not in labels):
            raise ArgumentError(f"einsum: {len(labels)} labels for an operand of shape {x.array.shape}")
        full.append(_expand_dots(labels, spare))
        most = max(most, spare if DOTS in labels else 0)
    if out is None:
        every = [k for labels in full for k in labels]
        once = sorted(k for k in set(every) if k >= 0 and every.count(k) == 1)
        return operands, full, [*_expand_dots([DOTS], most), *once]
    out = _expand_dots(out, most)
    known = {k for labels in full for k in labels}
    if len(set(out)) < len(out) or not known.issuperset(out):
        raise ArgumentError("einsum: a label of the result stands twice, or in no operand")
    return operands, full, out


def _expand_dots(labels: Labels, spare: int) -> Labels:
    return [label for k in labels for label in (range(-1 - spare, -1) if k == DOTS else (k,))]


def einsum_of(operands: list[Any], terms: list[Labels], out: Labels) -> Any:
    """Multiplies operands, and sums over the labels that `out` lacks.

    terms: the labels of each operand

    Raises: ShapeError if two sizes of a label differ and none is 1; DtypeError if dtypes differ in a sum of products.
    """
    sizes: dict[int, int] = {}
    for x, labels in zip(operands, terms, strict=True):
        for k, n in zip(labels, x.array.shape, strict=True):
            if n != 1 and sizes.get(k, 1) not in (1, n):
                raise ShapeError(f"einsum: sizes {sizes[k]} and {n} of one label differ")
            sizes[k] = n if n != 1 else sizes.get(k, 1)
    ready = [_unique_labels(x, labels, sizes) for x, labels in zip(operands, terms, strict=True)]
    x, labels = ready[0]
    for i, (y, others) in enumerate(ready[1:], 1):
        later = {k for _, more in ready[i + 1 :] for k in more}.union(out)
        x, labels = _sum_out(x, labels, later.union(others))
        y, others = _sum_out(y, others, later.union(labels))
        kept = [k for k in dict.fromkeys([*out, *labels, *others]) if k in later and (k in labels or k in others)]
        if len(kept) == len({*labels, *others}):  # nothing is summed: dtypes may differ, and autocast casts nothing
            x = _aligned(x, labels, kept) * _aligned(y, others, kept)
        else:
            check_same_dtype("einsum", x, y)
            x = apply(products.einsum, (x, y), labels=(tuple(labels), tuple(others), tuple(kept)))
        labels = kept
    return _aligned(*_sum_out(x, labels, set(out)), out)


def _unique_labels(x: Any, labels: Labels, sizes: dict[int, int]) -> tuple[Any, Labels]:
    """Takes the diagonal of labels that `x` has several times, and drops dimensions along which it is broadcast."""
    broadcast = [n == 1 and sizes[k] != 1 for k, n in zip(labels, x.array.shape, strict=True)]
    if any(broadcast):
        x = x.reshape([n for n, alone in zip(x.array.shape, broadcast, strict=True) if not alone])
        labels = [k for k, alone in zip(labels, broadcast, strict=True) if not alone]
    if len(set(labels)) < len(labels):
        x = apply(products.diagonals, (x,), labels=tuple(labels))
        labels = list(dict.fromkeys(labels))
    return x, labels


def _aligned(x: Any, labels: Labels, out: Labels) -> Any:
    """Permutes `x` to the order of labels `out`, and adds dimensions of size 1 for labels that `x` lacks."""
    lacking = [k for k in out if k not in labels]
    if lacking:
        x = x.reshape(*x.array.shape, *[1] * len(lacking))
        labels = [*labels, *lacking]
    order = [labels.index(k) for k in out]
    return x if order == list(range(len(order))) else x.permute(order)


def _sum_out(x: Any, labels: Labels, wanted: set[int]) -> tuple[Any, Labels]:
    """Sums `x` over the labels that are not in `wanted`, because the other operands and the result do not have them."""
    dims = [i for i, k in enumerate(labels) if k not in wanted]
    return (x.sum(dims), [k for k in labels if k in wanted]) if dims else (x, labels)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The p-norm of the difference of every pair of rows: (..., n, d), (..., m, d) to (..., n, m).

    Leading dimensions broadcast. All differences are in memory at once.
    compute_mode: accepted, and changes nothing: matrix products, which are less exact, are never used.
    Raises: ShapeError for shapes that do not fit; DtypeError unless floating;
    and as `Tensor.norm`.
    """
    a = x1.shape
    b = x2.shape
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-1]:
        raise ShapeError(f"cdist: shapes {a} and {b}: expected (..., n, d) and (..., m, d)")
    broadcast(a[:-2], b[:-2], "cdist")
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, -1)


def einsum(equation: Any, *operands: Any) -> Tensor:
    """The sum of products that `equation` describes: "bij,bjk->bik", with "..." for broadcast dimensions.

    A label that occurs twice in one operand takes its diagonal; without "->" the result has the dimensions of "...",
    then the labels that occur once: upper case first, in alphabetical order. Also
    einsum(x, [0, 1], y, [1, 2], [0, 2]), with numbers for labels, and einsum(equation, [x, y]). Several operands are
    multiplied from left to right. Factors of different dtypes are promoted if nothing is summed over both, as in
    "i,j->ij".

    Raises: ArgumentError for an equation that does not fit the operands; ShapeError if two sizes of a label differ and
    neither is 1, which is broadcast; DtypeError for dtypes that differ in a sum of products.
    """
    if isinstance(equation, TensorBase):
        parts = [equation, *operands]
        result = [] if len(parts) % 2 == 0 else ["->" + _letters(parts.pop())]
        equation = ",".join(map(_letters, parts[1::2])) + "".join(result)
        operands = tuple(parts[::2])
    if isinstance(operands[0], ComplexTensor):
        return product(partial(einsum, equation), *operands)
    return einsum_of(*parse_equation(equation, operands))


def _letters(labels: Sequence[Any]) -> str:
    """Writes labels as letters: [0, ..., 26] is "A...a". Raises: ArgumentError for labels other than 0 to 51 and ..."""
    if not all(label is ... or label in range(52) for label in labels):
        raise ArgumentError(f"einsum: labels {list(labels)}: expected numbers from 0 to 51, or ...")
    return "".join("..." if label is ... else ascii_letters.swapcase()[label] for label in labels)


@with_out
def tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """The sum of products over pairs of dimensions.

    dims: a number n: the last n dimensions of `a` with the first n of `b`; or a list for `a` and a list for `b`

    Raises: ArgumentError for a negative number, for more dimensions than `a` or `b` has, for anything but a number or
    two lists, and if a list names a dimension twice; RangeError if a list has a dimension that does not exist;
    ShapeError if sizes of a pair differ, or the lists have different lengths; DtypeError if the dtypes differ;
    DeviceError if the devices differ.
    """
    if isinstance(dims, int) and not 0 <= dims <= min(a.ndim, b.ndim):
        raise ArgumentError(f"tensordot: {dims} dimensions of shapes {a.shape} and {b.shape}")
    try:
        of_left, of_right = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
        left = [resolve_axis(a, d, "tensordot") for d in of_left]
        right = [resolve_axis(b, d, "tensordot") for d in of_right]
    except (TypeError, ValueError):
        raise ArgumentError(f"tensordot: expected a number, or two lists of dimensions, got {dims!r}") from None
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        raise ArgumentError(f"tensordot: dimensions {left} or {right} name one twice")
    if [a.shape[i] for i in left] != [b.shape[j] for j in right]:
        raise ShapeError(f"tensordot: {a.shape} and {b.shape}: sizes of dimensions {left} and {right} differ")
    check_same_dtype("tensordot", a, b)
    of_a = list(range(a.ndim))
    of_b = [left[right.index(j)] if j in right else a.ndim + j for j in range(b.ndim)]
    out = [k for k in of_a if k not in left] + [k for k in of_b if k >= a.ndim]
    return einsum_of([a, b], [of_a, of_b], out)


@with_out
def kron(input: Tensor, other: Tensor) -> Tensor:
    """The Kronecker product: replaces each element x of `input` by the block x * other."""
    ndim = max(input.ndim, other.ndim)
    a = input.reshape((1,) * (ndim - input.ndim) + input.shape)
    b = other.reshape((1,) * (ndim - other.ndim) + other.shape)
    sizes = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    blocks = a.reshape([size for n in a.shape for size in (n, 1)]) * b.reshape([s for n in b.shape for s in (1, n)])
    return blocks.reshape(sizes)
