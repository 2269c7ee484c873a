"""Order: where the sorted, the largest, the different elements are. Indices have no gradient, so nothing here is an op.

nan counts as larger than every number, in sorting as in searching.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, widen
from ddp.ops.shape import along


def argsort(xp: Any, x: Array, dim: int, descending: bool) -> Array:
    """The indices that sort `x` along `dim`; equal elements keep their order."""
    x = widen(x)
    if not descending:
        return xp.argsort(x, axis=dim, kind="stable")
    # The last of equal elements comes first in the reverse of an order, so both are reversed.
    order = xp.flip(xp.argsort(xp.flip(x, dim), axis=dim, kind="stable"), dim)
    return x.shape[dim] - 1 - order


def extremes(xp: Any, x: Array, k: int, dim: int, largest: bool, ordered: bool) -> Array:
    """The indices of the k largest, or smallest, elements along `dim`; the most extreme first if `ordered`."""
    x, n = widen(x), x.shape[dim]
    if not 0 < k < n:
        order = argsort(xp, x, dim, largest)
        return order[along(dim, slice(0, k))]
    part = slice(n - k, n) if largest else slice(0, k)
    found = xp.argpartition(x, n - k if largest else k - 1, axis=dim)[along(dim, part)]
    if ordered:
        order = argsort(xp, xp.take_along_axis(x, found, axis=dim), dim, largest)
        found = xp.take_along_axis(found, order, axis=dim)
    return found


def ranked(xp: Any, x: Array, k: int, dim: int) -> Array:
    """The index of the k-th smallest element (from 1) along `dim`, which stays with size 1."""
    found = xp.argpartition(widen(x), k - 1, axis=dim)
    return found[along(dim, slice(k - 1, k))]


def unique(xp: Any, x: Array, dim: int | None, inverse: bool, counts: bool) -> tuple[Array, Array | None, Array | None]:
    """The different elements, or slices along `dim`, sorted; for each of `x` its number among them; how often each is.

    The last two are None unless asked for. A nan is unlike every other.
    """
    found = xp.unique(widen(x), return_inverse=inverse, return_counts=counts, axis=dim, equal_nan=False)
    values, *rest = found if inverse or counts else (found,)
    number = rest.pop(0).reshape(x.shape if dim is None else -1) if inverse else None
    return values.astype(x.dtype, copy=False), number, rest.pop(0) if counts else None


def runs(xp: Any, x: Array, dim: int | None) -> tuple[Array, Array, Array]:
    """As `unique`, of neighbours alone: the first of every run, the number of the run of each, their lengths."""
    rows = x.reshape(-1, 1) if dim is None else xp.moveaxis(x, dim, 0).reshape(x.shape[dim], -1)
    n = rows.shape[0]
    first = xp.ones(n, bool)
    if n > 1:
        first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    starts = xp.flatnonzero(first)
    inverse = xp.cumsum(first) - 1
    counts = xp.diff(xp.append(starts, n))
    if dim is None:
        return x.reshape(-1)[starts], inverse.reshape(x.shape), counts
    return xp.take(x, starts, axis=dim), inverse, counts


def searchsorted(xp: Any, rows: Array, x: Array, side: str) -> Array:
    """Where each of `x` would be put into `rows`, sorted along their last axis: one row for all, or one for each."""
    rows, x = widen(rows), widen(x)
    if rows.ndim == 1:
        return xp.asarray(xp.searchsorted(rows, x, side=side))
    out = xp.zeros(x.shape, "int64")
    if not rows.size or not x.size:
        return out
    flat, values, places = (each.reshape(-1, each.shape[-1]) for each in (rows, x, out))
    for row, value, place in zip(flat, values, places, strict=True):
        place[...] = xp.searchsorted(row, value, side=side)
    return out


def bincount(xp: Any, x: Array, weights: Array | None, minlength: int) -> Array:
    """How often each integer from 0 on occurs, or the sum of its weights."""
    if not x.size:
        return xp.zeros(minlength, "int64" if weights is None else weights.dtype)
    return xp.bincount(x, weights=weights, minlength=minlength)
