"""Indexing: what was read gets its gradient back where it was read, added up where it was read twice."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved


# z = x[index];  dx = g at index, 0 elsewhere
def _getitem(xp: Any, x: Array, index: Any) -> tuple[Array, Any]:
    return x[index], (x.shape, index)


def _getitem_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index = residual
    dx = xp.zeros(shape, g.dtype)
    if _repeats(index):
        xp.add.at(dx, index, g)
    else:
        dx[index] = g
    return (dx,)


def _repeats(index: Any) -> bool:
    """Whether an index may name an element twice: only arrays of integers can."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(hasattr(part, "dtype") and part.dtype != bool and part.ndim > 0 for part in parts)


getitem = Op("getitem", _getitem, _getitem_backward, inputs=("x",), view=True)


# z[..i..] = x[..index[..i..]..] along axis `dim`;  dx = g added up at index
def _gather(xp: Any, x: Array, index: Array, dim: int) -> tuple[Array, Any]:
    return xp.take_along_axis(x, index, axis=dim), (x.shape, index, dim)


def _gather_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index, dim = residual
    dx = xp.zeros(shape, g.dtype)
    where = [xp.arange(n).reshape([-1 if i == axis else 1 for i in range(g.ndim)]) for axis, n in enumerate(g.shape)]
    where[dim] = index
    xp.add.at(dx, tuple(where), g)
    return (dx,)


gather = Op("gather", _gather, _gather_backward, inputs=("x",))
