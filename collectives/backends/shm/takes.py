"""How a prepared call makes its result out of what lies in the slots: one function a collective.

Each `take(parity, x, out, scale)` reads the slots of one parity. The order in which values are combined is that of the
general way, so that it makes no difference to the last bit which way a rank takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.backends.shm.control_block import ControlBlock
from collectives.reduction import COMBINE, Array, ReduceOp, finish, wire_dtype, wire_op

Take = Callable[[int, Any, Any, "float | None"], Any]
Shape = tuple[int, ...]


class Result(NamedTuple):
    """What a call returns on this rank. make: how, out of the slots, for arrays that fit into them.

    shape, dtype: what `out` must be like; None where there is none
    """

    make: Callable[[], Take]
    shape: Shape | None = None
    dtype: np.dtype[Any] | None = None


def inline_arrays(control: ControlBlock, rank: int, dtype: np.dtype[Any], shape: Shape, start: int = 0) -> list[Array]:
    """A rank's two slots, seen from byte `start` on as arrays of this dtype and shape."""
    nbytes = math.prod(shape) * dtype.itemsize
    return [control.inline[parity][rank][start : start + nbytes].view(dtype).reshape(shape) for parity in (0, 1)]


def total(
    control: ControlBlock, *, op: ReduceOp, dtype: np.dtype[Any], shape: Shape, rows: tuple[int, int] | None = None
) -> Result:
    """The reduction of all slots; rows: from where to where along axis 0 this rank wants it."""
    wire, size, ufunc = wire_dtype(dtype, op), control.size, COMBINE[wire_op(op)]
    mean, same = op is ReduceOp.MEAN, wire == dtype
    wanted = shape if rows is None else (rows[1] - rows[0], *shape[1:])

    def make() -> Take:
        each = [inline_arrays(control, rank, wire, shape) for rank in range(size)]
        where = ... if rows is None else slice(*rows)
        parts = [[each[rank][parity][where] for rank in range(size)] for parity in (0, 1)]

        def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
            first, second, *others = parts[parity]
            if out is not None and same:
                y = ufunc(first, second, out=out)
            else:  # a result without dimensions would be a scalar, which nothing can be added to
                y = ufunc(first, second) if wanted else ufunc(first, second, out=np.empty(wanted, wire))
            for source in others:
                ufunc(y, source, out=y)
            if mean or scale is not None:
                finish(y, op, size, scale)
            if same:
                return y
            if out is None:
                return y.astype(dtype)
            np.copyto(out, y, casting="unsafe")
            return out

        # As in `CallQueue.drive`; integers have no error state that could be raised.
        return np.errstate(all="ignore")(take) if wire.kind in "fc" else take

    return Result(make, wanted, dtype)


def nothing() -> Result:
    """No result on this rank."""
    return Result(lambda: lambda parity, x, out, scale: None)


def filled(control: ControlBlock, root: int, dtype: np.dtype[Any], shape: Shape) -> Result:
    """x, filled with the root's; on the root itself it stays as it is."""
    if control.me == root:
        return Result(lambda: lambda parity, x, out, scale: x)

    def make() -> Take:
        sources = inline_arrays(control, root, dtype, shape)

        def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
            x[...] = sources[parity]
            return x

        return take

    return Result(make)


class Piece(NamedTuple):
    """Rows `first` to `last` of an array of this shape, which begins at byte `start` of a rank's slot."""

    rank: int
    shape: Shape
    first: int
    last: int
    start: int = 0


def joined(control: ControlBlock, dtype: np.dtype[Any], pieces: Sequence[Piece]) -> Result:
    """Pieces of slots, joined along axis 0."""
    whole = (sum(piece.last - piece.first for piece in pieces), *pieces[0].shape[1:])

    def make() -> Take:
        each = [inline_arrays(control, piece.rank, dtype, piece.shape, piece.start) for piece in pieces]
        parts = [
            [arrays[parity][piece.first : piece.last] for arrays, piece in zip(each, pieces, strict=True)]
            for parity in (0, 1)
        ]

        native = dtype.isnative  # else joining would turn the bytes round

        def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
            if not native and out is None:
                out = np.empty(whole, dtype)
            return np.concatenate(parts[parity], out=out)

        return take

    return Result(make, whole, dtype)
