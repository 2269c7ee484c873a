"""Indexing: what was read gets its gradient back where it was read, added up where it was read twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, shape_of

Places = tuple[Any, ...]  # one entry per axis, a mask standing for several: an array, or slice(None)


# z = x[index], a view: integers, slices, None and Ellipsis;  dx = g at index, 0 elsewhere
def _getitem(xp: Any, x: Array, index: Any) -> tuple[Array, Any]:
    return x[index], (x.shape, index)


def _getitem_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index = residual
    dx = xp.zeros(shape, g.dtype)
    dx[index] = g
    return (dx,)


getitem = Op("getitem", _getitem, _getitem_backward, inputs=("x",), view=True)


# z = x, but v at x[step][step]..;  dx = g, but 0 there;  dv = g there, summed to the shape of v
def _setitem(xp: Any, x: Array, v: Any, steps: tuple[Any, ...], within: bool = False) -> tuple[Array, Any]:
    # within: x itself is written to and returned, which spares an in-place caller two passes over it.
    out = x if within else x.copy()
    WRITES[xp.__name__](xp, _stepped(out, steps), steps[-1], v)
    return out, (steps, shape_of(v))


def _setitem_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    steps, shape = residual
    dx = dv = None
    if needs[0]:
        dx = xp.array(g)  # a 0-d gradient may be a NumPy scalar, which cannot be written to
        WRITES[xp.__name__](xp, _stepped(dx, steps), steps[-1], 0)
    if needs[1]:
        dv = fold(_stepped(g, steps)[steps[-1]], shape)
    return dx, dv


def _assigned(xp: Any, x: Array, step: Any, v: Any) -> None:
    x[step] = v


def _masked(xp: Any, x: Array, step: Any, v: Any) -> None:
    # One number for all that a mask selects: the host need not know how many these are.
    mask = step[0] if isinstance(step, tuple) and step else step
    if getattr(mask, "dtype", "") != "bool" or getattr(v, "size", 1) != 1:
        x[step] = v
        return
    value = v.reshape(()) if hasattr(v, "reshape") else v
    xp.copyto(x, value, casting="unsafe", where=mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)))


WRITES = {"numpy": _assigned, "cupy": _masked}


def _stepped(x: Array, steps: tuple[Any, ...]) -> Array:
    """What the last step applies to: `x`, or a view of it."""
    for step in steps[:-1]:
        x = x[step]
    return x


setitem = Op("setitem", _setitem, _setitem_backward, inputs=("x", "v"), native=True)


# z = x[places];  dx = g added up at places
def _index(xp: Any, x: Array, places: Places) -> tuple[Array, Any]:
    axes = [i for i, place in enumerate(places) if not isinstance(place, slice)]
    if len(axes) == 1 and places[axes[0]].dtype.kind != "b" and x.size:
        # As x[places], and faster; of nothing, take() would not look at the index.
        return x.take(places[axes[0]], axis=axes[0]), (x.shape, places)
    return x[places], (x.shape, places)


def _index_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (collected(xp, g, *residual),)


index = Op("index", _index, _index_backward, inputs=("x",), native=True)


# z[..i..] = x[..index[..i..]..] along axis `dim`;  dx = g added up at index
def _gather(xp: Any, x: Array, index: Array, dim: int, distinct: bool = False) -> tuple[Array, Any]:
    # distinct: no element is named twice, as when index sorts x.
    where = positions(xp, index, dim, x.shape)
    return x.reshape(-1).take(where), (x.shape, where, distinct or index.shape[dim] == 1)


def _gather_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, where, distinct = residual
    dx = xp.zeros(math.prod(shape), g.dtype)
    if distinct:
        dx[where] = g
    else:
        dx = add_flat(xp, dx, where, g)
    return (dx.reshape(shape),)


gather = Op("gather", _gather, _gather_backward, inputs=("x",), native=True)


def positions(xp: Any, index: Array, dim: int, shape: tuple[int, ...]) -> Array:
    """Where in a flattened array of `shape` lies what `index` names along `dim`, at its own place in the other axes.

    A new array of int64 in the shape of `index`, which is not negative and no larger than shape, except along `dim`.
    """
    found = xp.multiply(index, math.prod(shape[dim + 1 :]), dtype="int64")
    base: Any = None
    for i, n in enumerate(index.shape):
        if i != dim:
            axis = (xp.arange(n) * math.prod(shape[i + 1 :])).reshape([-1 if i == j else 1 for j in range(index.ndim)])
            base = axis if base is None else base + axis
    if base is not None:
        found += base
    return found


def add_flat(xp: Any, x: Array, where: Array, g: Array) -> Array:
    """`x`, a vector, with each of `g` added at where (of its shape), 0 <= where < len(x). In place if it can be."""
    return FLAT_ADDS[xp.__name__](xp, x, where, g)


def _at(xp: Any, x: Array, where: Array, g: Array) -> Array:
    if wide(x) is x:
        xp.add.at(x, where.reshape(-1), g.reshape(-1))
        return x
    sums = wide(x)
    xp.add.at(sums, where.reshape(-1), wide(g).reshape(-1))
    return sums.astype(x.dtype)


def flat(places: Places, shape: tuple[int, ...]) -> Array:
    """The positions in a flattened array of `shape` that one array for each of its axes name; negative ones count."""
    found: Any = 0
    for i, (place, n) in enumerate(zip(places, shape, strict=True)):
        step = place.astype("int64", copy=False)
        found = found + (step + (step < 0) * n) * math.prod(shape[i + 1 :])
    return found


def collected(xp: Any, g: Array, shape: tuple[int, ...], places: Places) -> Array:
    """Zeros of `shape` with each of `g` (the shape of x[places]) added where x[places] reads it."""
    axes = [i for i, place in enumerate(places) if not isinstance(place, slice)]
    if len(axes) == 1 and places[axes[0]].dtype.kind == "b":  # a mask names nothing twice
        dx = xp.zeros(shape, g.dtype)
        dx[places] = g
        return dx
    arrays = xp.broadcast_arrays(*[places[i] for i in axes])
    many = arrays[0].ndim
    # The dimensions of the arrays stand where the arrays stand, or first if a slice lies between them.
    first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
    rest = [i for i in range(len(shape)) if i not in axes]
    order = [*range(first, first + many), *range(first), *range(first + many, g.ndim)]
    sizes, others = tuple(shape[i] for i in axes), tuple(shape[i] for i in rest)
    rows = g.transpose(order).reshape(arrays[0].size, math.prod(others))
    sums = add_rows(xp, math.prod(sizes), flat(arrays, sizes).reshape(-1), rows).reshape(sizes + others)
    back = [0] * len(shape)
    for at, axis in enumerate((*axes, *rest)):
        back[axis] = at
    return sums.transpose(back)


def wide(g: Array) -> Array:
    """`g`, or for numbers of 16 bits its float32 form, in which many may be added up."""
    return g.astype("float32") if g.dtype.itemsize == 2 and g.dtype.kind not in "iu" else g


def add_rows(xp: Any, length: int, where: Array, g: Array, out: Array | None = None) -> Array:
    """(length, D) zeros with each row of `g` (N, D) added at row where[i] (N,). 0 <= where < length.

    out: memory for the result, if there is some (length, D) of g's dtype in one piece; it may not be used
    """
    rows = wide(g)
    if out is None or out.dtype != rows.dtype or not out.flags.c_contiguous:
        out = xp.empty((length, g.shape[1]), rows.dtype)
    out[...] = 0
    if g.size:
        ADDS[xp.__name__](xp, where, rows, out)
    return out.astype(g.dtype, copy=False)


def _by_element(xp: Any, where: Array, g: Array, out: Array) -> None:
    width = g.shape[1]
    if width > 1:
        where = (where[:, None] * width + xp.arange(width)).reshape(-1)
    xp.add.at(out.reshape(-1), where, g.reshape(-1))


def _by_pairs(xp: Any, where: Array, g: Array, out: Array) -> None:
    # add.at goes by elements: 0.47 ms for 2048 rows of 128 into 1000, against 0.30 ms for sorting the rows and adding
    # each with an odd rank among its equals to the one before it, again and again. Narrow rows are not worth a sort.
    n, width = g.shape
    if width < 64 or n < 64:
        _by_element(xp, where, g, out)
        return
    if len(out) <= 1 << 16:
        where = where.astype(xp.uint16)  # sorted by radix
    order = where.argsort(kind="stable")
    where = where[order]
    first = xp.empty(n, bool)
    first[0] = True
    xp.not_equal(where[1:], where[:-1], out=first[1:])
    starts = xp.flatnonzero(first)
    rank = xp.arange(n) - xp.repeat(starts, xp.diff(xp.append(starts, n)))
    rows, sums = xp.arange(n), g[order]
    while True:
        odd = xp.flatnonzero(rank & 1)
        if not odd.size:
            break
        sums[rows[odd - 1]] += sums[rows[odd]]
        even = xp.flatnonzero((rank & 1) == 0)
        rows, rank = rows[even], rank[even] >> 1
    out[where[starts]] = sums[starts]


# CuPy's: `ddp.ops.cuda.entries`
ADDS: dict[str, Callable[..., None]] = {"numpy": _by_pairs}
FLAT_ADDS: dict[str, Callable[..., Array]] = {"numpy": _at}
