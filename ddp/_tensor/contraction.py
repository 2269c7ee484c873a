"""einsum, tensordot, kron and cdist. An equation is read into labels, numbers for letters, and run factor by factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.arithmetic import broadcast
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.function_form import with_out
from ddp._tensor.linear_algebra import same_dtype
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, ShapeError
from ddp.ops import products

Labels = list[int]
DOTS = -1  # stands for "..." until the operands' numbers of dimensions are known


def parsed(equation: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Labels], Labels]:
    """The operands, the labels of each, and those of the result. Raises: ArgumentError."""
    if not isinstance(equation, str):  # einsum(x, [0, 1], y, [1, 2], [0, 2])
        parts = [equation, *operands]
        out = None if len(parts) % 2 == 0 else parts.pop()
        terms = [[DOTS if label is ... else int(label) for label in labels] for labels in parts[1::2]]
        result = None if out is None else [DOTS if label is ... else int(label) for label in out]
        return _expanded(parts[::2], terms, result)
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
    # Upper case comes first, as in the alphabet of ASCII.
    return [*map(ord, before), *([DOTS] if dots else []), *map(ord, after)]


def _expanded(operands: list[Any], terms: list[Labels], out: Labels | None) -> tuple[list[Any], list[Labels], Labels]:
    """Every label a number of its own: those of "..." are counted from the right, and negative."""
    if len(operands) != len(terms) or not operands:
        raise ArgumentError(f"einsum: {len(terms)} terms for {len(operands)} operands")
    full, most = [], 0
    for x, labels in zip(operands, terms, strict=True):
        spare = x.array.ndim - len([k for k in labels if k != DOTS])
        if spare < 0 or (spare and DOTS not in labels):
            raise ArgumentError(f"einsum: {len(labels)} labels for an operand of shape {x.array.shape}")
        full.append(_filled(labels, spare))
        most = max(most, spare if DOTS in labels else 0)
    if out is None:
        every = [k for labels in full for k in labels]
        once = sorted(k for k in set(every) if k >= 0 and every.count(k) == 1)
        return operands, full, [*_filled([DOTS], most), *once]
    out = _filled(out, most)
    known = {k for labels in full for k in labels}
    if len(set(out)) < len(out) or not known.issuperset(out):
        raise ArgumentError("einsum: a label of the result stands twice, or in no operand")
    return operands, full, out


def _filled(labels: Labels, spare: int) -> Labels:
    return [each for k in labels for each in (range(-1 - spare, -1) if k == DOTS else (k,))]


def einsum_of(operands: list[Any], terms: list[Labels], out: Labels) -> Any:
    """The sum of products of operands with these labels over all that `out` lacks. Raises: ShapeError."""
    sizes: dict[int, int] = {}
    for x, labels in zip(operands, terms, strict=True):
        for k, n in zip(labels, x.array.shape, strict=True):
            if sizes.setdefault(k, n) != n and n != 1:
                if sizes[k] != 1:
                    shapes = ", ".join(str(each.array.shape) for each in operands)
                    raise ShapeError(f"einsum: sizes {sizes[k]} and {n} of one label differ, in shapes {shapes}")
                sizes[k] = n
    ready = [_single(x, labels, sizes) for x, labels in zip(operands, terms, strict=True)]
    x, labels = ready[0]
    for i, (y, others) in enumerate(ready[1:], 1):
        later = {k for _, more in ready[i + 1 :] for k in more}.union(out)
        x, labels = _alone(x, labels, later.union(others))
        y, others = _alone(y, others, later.union(labels))
        kept = [k for k in dict.fromkeys([*out, *labels, *others]) if k in later and (k in labels or k in others)]
        same_dtype("einsum", x, y)
        x = apply(products.einsum, (x, y), labels=(tuple(labels), tuple(others), tuple(kept)))
        labels = kept
    x, labels = _alone(x, labels, set(out))
    lacking = [k for k in out if k not in labels]  # a size of 1 in every operand
    if lacking:
        x = x.reshape(*x.array.shape, *[1] * len(lacking))
        labels = [*labels, *lacking]
    order = [labels.index(k) for k in out]
    return x if order == list(range(len(order))) else x.permute(order)


def _single(x: Any, labels: Labels, sizes: dict[int, int]) -> tuple[Any, Labels]:
    """`x` with every label once, without those along which it is broadcast."""
    broadcast = [n == 1 and sizes[k] != 1 for k, n in zip(labels, x.array.shape, strict=True)]
    if any(broadcast):
        x = x.reshape([n for n, alone in zip(x.array.shape, broadcast, strict=True) if not alone])
        labels = [k for k, alone in zip(labels, broadcast, strict=True) if not alone]
    if len(set(labels)) < len(labels):
        x = apply(products.diagonals, (x,), labels=tuple(labels))
        labels = list(dict.fromkeys(labels))
    return x, labels


def _alone(x: Any, labels: Labels, wanted: set[int]) -> tuple[Any, Labels]:
    """`x` summed over the labels that nothing else has."""
    dims = [i for i, k in enumerate(labels) if k not in wanted]
    return (x.sum(dims), [k for k in labels if k in wanted]) if dims else (x, labels)


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


def einsum(equation: Any, *operands: Any) -> Tensor:
    """The sum of products that `equation` describes: "bij,bjk->bik", with "..." for broadcast dimensions.

    A label that stands twice in one operand is its diagonal; without "->" the result has the labels that stand once,
    in alphabetical order. Also einsum(x, [0, 1], y, [1, 2], [0, 2]), and einsum(equation, [x, y]). Several operands are
    multiplied from left to right.

    Raises: ArgumentError for an equation that does not fit the operands; ShapeError for sizes that differ.
    """
    return einsum_of(*parsed(equation, operands))


@with_out
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


@with_out
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker's product: every element of `input` times the whole of `other`, block by block."""
    ndim = max(input.ndim, other.ndim)
    a = input.reshape((1,) * (ndim - input.ndim) + input.shape)
    b = other.reshape((1,) * (ndim - other.ndim) + other.shape)
    sizes = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    spread = a.reshape([size for n in a.shape for size in (n, 1)]) * b.reshape([s for n in b.shape for s in (1, n)])
    return spread.reshape(sizes)
