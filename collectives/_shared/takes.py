"""How a prepared call makes its result out of what lies in the slots: one function a collective.

Each `take(parity, x, out, scale)` reads the slots of one parity. The order in which values are combined is that of the
general way, so that it makes no difference to the last bit which way a rank takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives._shared.board import Board
from collectives.reduction import COMBINE, Array, ReduceOp, finish, wire_dtype, wire_op

Take = Callable[[int, Any, Any, "float | None"], Any]
Shape = tuple[int, ...]


def slot_arrays(board: Board, rank: int, dtype: np.dtype[Any], shape: Shape, start: int = 0) -> list[Array]:
    """A rank's two slots, seen from byte `start` on as arrays of this dtype and shape."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return [board.slots[parity][rank][start : start + nbytes].view(dtype).reshape(shape) for parity in (0, 1)]


def total(board: Board, *, op: ReduceOp, dtype: np.dtype[Any], shape: Shape, rows: slice | None = None) -> Take:
    """The reduction of all slots; rows: the part of it along axis 0 that this rank wants."""
    wire, size, ufunc = wire_dtype(dtype, op), board.size, COMBINE[wire_op(op)]
    each = [slot_arrays(board, rank, wire, shape) for rank in range(size)]
    wanted_rows = ... if rows is None else rows
    parts = [[each[rank][parity][wanted_rows] for rank in range(size)] for parity in (0, 1)]
    wanted, mean, same = parts[0][0].shape, op is ReduceOp.MEAN, wire == dtype

    def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
        sources = parts[parity]
        y = out if out is not None and same else np.empty(wanted, wire)
        ufunc(sources[0], sources[1], out=y)
        for source in sources[2:]:
            ufunc(y, source, out=y)
        if mean or scale is not None:
            finish(y, op, size, scale)
        if same:
            return y
        if out is None:
            return y.astype(dtype)
        np.copyto(out, y, casting="unsafe")
        return out

    return take


def nothing(parity: int, x: Any, out: Any, scale: float | None) -> None:
    """No result on this rank."""


def filled(board: Board, root: int, dtype: np.dtype[Any], shape: Shape) -> Take:
    """x, filled with the root's; on the root itself it stays as it is."""
    if board.me == root:
        return lambda parity, x, out, scale: x
    sources = slot_arrays(board, root, dtype, shape)

    def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
        np.copyto(x, sources[parity])
        return x

    return take


def joined(board: Board, dtype: np.dtype[Any], shapes: Sequence[Shape]) -> Take:
    """The slots' arrays, of these shapes, joined along axis 0."""
    each = [slot_arrays(board, rank, dtype, shape) for rank, shape in enumerate(shapes)]
    parts = [[each[rank][parity] for rank in range(board.size)] for parity in (0, 1)]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
        y = np.empty(whole, dtype) if out is None else out
        np.concatenate(parts[parity], out=y)
        return y

    return take


def picked(board: Board, dtype: np.dtype[Any], pieces: Sequence[tuple[int, Shape, slice, int]]) -> Take:
    """Rows out of slots, joined along axis 0. pieces: (rank, shape of its array, rows, byte where the array starts)"""
    each = [slot_arrays(board, rank, dtype, shape, start) for rank, shape, _, start in pieces]
    parts = [[arrays[parity][rows] for arrays, (_, _, rows, _) in zip(each, pieces, strict=True)] for parity in (0, 1)]
    whole = (sum(len(part) for part in parts[0]), *parts[0][0].shape[1:])

    def take(parity: int, x: Any, out: Any, scale: float | None) -> Any:
        y = np.empty(whole, dtype) if out is None else out
        np.concatenate(parts[parity], out=y)
        return y

    return take
