"""The meaning of each reduction for each dtype, defined here once so that no two backends differ.

    dtype               sum, prod     mean                       max, min
    bool                -             -                          or, and
    integers            wraps around  in 64 bits, toward zero    yes
    float16, bfloat16   in float32    in float32                 yes
    float32 and wider   yes           yes                        yes
    complex             yes           yes                        -

"-" is an error. "in float32": values are widened to float32, combined, divided and scaled there, and rounded once. The
sum behind a mean of 64-bit integers wraps around like any other sum. A NaN on one rank makes max and min NaN. The
result has x's dtype, including its byte order.

Where this package combines values itself, it does so in one binary tree over ranks (`tree`). Where a library combines
them, MPI or NCCL, the order may depend on the ranks, the nodes and the lengths.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import as_bytes, even_lengths, split_rows
from collectives.errors import ArgumentError, DtypeError
from collectives.native import BFLOAT16, FLOAT16

Array = np.ndarray[Any, Any]

HALVES = frozenset({FLOAT16, BFLOAT16})


class ReduceOp(Enum):
    """How a reduction combines the ranks' values; collectives also accept the lowercase names as strings."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    # Members are singletons, and Enum's own hash takes longer than the dict lookup that uses it.
    __hash__ = object.__hash__

    @staticmethod
    def parse(op: ReduceOp | str) -> ReduceOp:
        """Returns the member that `op` is or names. Raises: ArgumentError, with the valid names, if there is none."""
        if isinstance(op, ReduceOp):
            return op
        try:
            return _BY_NAME[op]
        except (KeyError, TypeError):
            raise ArgumentError(f"op should be one of {', '.join(_BY_NAME)}, is {op!r}") from None


_BY_NAME = {op.value: op for op in ReduceOp}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD)
_ORDER = (ReduceOp.MAX, ReduceOp.MIN)
_ALLOWED = {"b": _ORDER, "i": tuple(ReduceOp), "u": tuple(ReduceOp), "f": tuple(ReduceOp), "c": _ARITHMETIC}

#: The ufunc that combines two values in the wire dtype. MEAN has none: it is a SUM, which `divide_and_scale` divides.
COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


@cache
def tree(count: int, first: int = 0) -> tuple[tuple[int, int], ...]:
    """The order in which a binary tree combines `count` values: pairs (a, b), which add b's value to a's.

    The left branch has the first values, as many as the largest power of two below `count`. The right branch has the
    rest. `tree(5) == ((0, 1), (2, 3), (0, 2), (0, 4))` is `((0 + 1) + (2 + 3)) + 4`. first: number of the first value
    """
    if count == 1:
        return ()
    half = 1 << (count - 1).bit_length() - 1
    return (*tree(half, first), *tree(count - half, first + half), (first, first + half))


def combine_in_tree(sources: Sequence[Any], add: Any, out: Any = None) -> Any:
    """Combines the ranks' values in the order of `tree`. add: function(a, b, out=None); out: may be one of `sources`"""
    totals = list(sources)
    steps = tree(len(totals))
    for left, right in steps[:-1]:
        totals[left] = add(totals[left], totals[right])
    if steps:
        return add(totals[0], totals[steps[-1][1]], out=out)
    if out is not None and out is not totals[0]:
        out[...] = totals[0]
    return totals[0] if out is None else out


def wire_op(op: ReduceOp) -> ReduceOp:
    """The op that the transport computes. For a mean it is SUM, which `divide_and_scale` divides."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


@cache
def wire_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which `op` is computed on arrays of `dtype`.

    Raises: DtypeError if `op` is not defined for `dtype`.
    """
    kind = _kind(dtype)
    allowed = _ALLOWED.get(kind, ())
    if op not in allowed:
        can = f"it has {', '.join(op.value for op in allowed)}" if allowed else "it cannot be reduced"
        raise DtypeError(f"{op.value} of {dtype} is not defined: {can}")
    if kind == "b":
        return np.dtype(np.uint8)
    if op is ReduceOp.MEAN and kind in "iu" and dtype.itemsize < 8:
        return np.dtype(np.int64)  # In a smaller dtype the sum could wrap around before the division.
    if kind == "f" and dtype.itemsize == 2:
        return np.dtype(np.float32)
    return dtype.newbyteorder("=")


def _kind(dtype: np.dtype[Any]) -> str:
    # NumPy reports kind "V" (plain bytes) for bfloat16.
    return "f" if dtype.type is BFLOAT16.type else dtype.kind


def check_scale(dtype: np.dtype[Any], scale: object) -> float | None:
    """The scale as a number; None if it is None, or a function, which is called later.

    Raises: DtypeError if a scale is given for a dtype that cannot be scaled; ArgumentError if it is not a real number.
    """
    if scale is None:
        return None
    if _kind(dtype) not in "fc":
        raise DtypeError(f"scale needs a floating or complex dtype, got {dtype}: scale the result yourself")
    return None if callable(scale) else _factor(scale)


_DOUBLE = struct.Struct("<d")
_INT64 = struct.Struct("<q")
# The bits of 1.0.
_ONE = 0x3FF0000000000000


def scale_bits(scale: float | None) -> int:
    """A number that stands for the scale in the digest that ranks compare; 0 for None and 1.0, which change nothing."""
    if scale is None:
        return 0
    bits: int = _INT64.unpack(_DOUBLE.pack(scale))[0]
    return bits ^ _ONE


def _factor(scale: object) -> float:
    is_real = isinstance(scale, numbers.Real)
    if isinstance(scale, (np.ndarray, np.generic)):  # 0-d arrays and bfloat16 are not numbers.Real.
        is_real = scale.ndim == 0 and _kind(scale.dtype) in "iuf"
    if not is_real:
        raise ArgumentError(f"scale should be a real number, or a function that returns one, is {scale!r:.60}")
    return float(scale)  # type: ignore[arg-type]  # checked above


def divide_and_scale(total: Array, op: ReduceOp, size: int, scale: float | None) -> None:
    """Turns a reduction's total into its result, in place: divides for a mean, then multiplies by the scale.

    Raises: ArgumentError if the scale is not a real number.
    """
    if op is ReduceOp.MEAN and size > 1:
        if total.dtype.kind in "iu":
            negative = (total < 0) & (total % size != 0)
            np.floor_divide(total, size, out=total)
            total += negative.astype(total.dtype)
        elif size & (size - 1) == 0:
            np.multiply(total, 1.0 / size, out=total)
        else:
            np.divide(total, size, out=total)
    if scale is not None and (factor := _factor(scale)) != 1.0:
        # `factor` is a Python float, so NumPy multiplies in the array's dtype. A float64 scalar would make it float64.
        np.multiply(total, factor, out=total)


class Reduction(NamedTuple):
    """A reduction whose arguments have been checked.

    name: of the collective; wire: the dtype in which the array is sent
    shape: of this rank's result, None if this rank gets no result
    parts: rows of each rank, for reduce_scatter only
    text: what ranks must agree on in addition to name, dtype, shape and scale
    in_tree: values are combined in the tree's order, whatever the transport's own order
    """

    name: str
    op: ReduceOp
    wire: np.dtype[Any]
    shape: tuple[int, ...] | None
    root: int
    parts: list[int]
    text: str
    in_tree: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the total may overwrite the input. True for an all_reduce, where both have the same length."""
        return self.name == "all_reduce"

    def start(self, transport: Any, op: ReduceOp, sent: Any, total: Any, *rest: Any) -> Any:
        """Starts the reduction on a transport of host or device arrays.

        op: what the transport computes, which may differ from `self.op`
        sent, total: one-dimensional, of the wire dtype; total: None if this rank gets no result
        rest: for a host transport, the `Epilogue` that it applies to the total
        """
        if self.name == "all_reduce":
            return transport.all_reduce(sent, total, op, *rest)
        if self.name == "reduce":
            return transport.reduce(sent, total, op, self.root, *rest)
        return transport.reduce_scatter(sent, total, self._counts(), op, *rest)

    def start_in_parts(
        self, arrays: Any, comm: Any, transport: Any, sent: Any, total: Any, combine: Callable[[Any], None]
    ) -> Iterator[Any]:
        """The steps of a reduction in which each rank combines one part. It moves no more bytes than a ring algorithm.

        arrays: a HostArrays or DeviceArrays, which makes and copies arrays; sent, total: as in `start`
        combine: takes (size, n), one row per rank, and writes the result of all rows into the first row
        """
        counts = self._counts() if self.parts else even_lengths(len(sent), comm.size)
        nbytes = [count * sent.itemsize for count in counts]
        parts = arrays.scratch((comm.size, counts[comm.rank]), sent.dtype)
        yield from arrays.complete(transport.all_to_all(as_bytes(sent), as_bytes(parts), [nbytes] * comm.size))
        combine(parts)
        part = as_bytes(parts[0])
        whole = None if total is None else as_bytes(total)
        if self.parts:
            arrays.copy(total, parts[0])
        elif self.name == "reduce":
            yield from arrays.complete(transport.gather(part, whole, nbytes, self.root))
        else:
            yield from arrays.complete(transport.all_gather(part, whole, nbytes))

    def _counts(self) -> list[int]:
        """The number of items in each rank's part."""
        assert self.shape is not None
        return [rows * math.prod(self.shape[1:]) for rows in self.parts]


def describe(
    name: str,
    op: ReduceOp,
    root: int,
    lengths: Sequence[int] | None,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    rank: int,
    size: int,
    order: str | None = None,
) -> Reduction:
    """Describes a call of all_reduce, reduce or reduce_scatter for an array of this dtype and shape.

    Raises: ArgumentError, DtypeError as those methods do.
    """
    if order not in (None, "tree"):
        raise ArgumentError(f"order should be 'tree' or None, is {order!r}")
    wire = wire_dtype(dtype, op)
    result: tuple[int, ...] | None = shape
    parts: list[int] = []
    text = op.value
    if name == "reduce":
        result = shape if rank == root else None
        text = f"{op.value} root {root}"
    elif name == "reduce_scatter":
        if not shape:
            raise ArgumentError("reduce_scatter splits axis 0, and x is 0-d")
        parts = split_rows(shape[0], lengths, size)
        result = (parts[rank], *shape[1:])
        text = op.value if lengths is None else f"{op.value} lengths {parts}"
    if order is not None:
        text = f"{text} in tree order"
    return Reduction(name, op, wire, result, root, parts, text, in_tree=order is not None)
