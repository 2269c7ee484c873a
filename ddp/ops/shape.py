"""Shapes: results that are views of their input where the memory allows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold
from ddp.ops.index import add_flat, wide


# z = x in another shape;  dx = g in the shape of x
def _reshape(xp: Any, x: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    return x.reshape(shape), x.shape


def _reshape_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (g.reshape(shape),)


reshape = Op("reshape", _reshape, _reshape_backward, inputs=("x",), view=True)


# z = x with its axes in the order `dims`;  dx = g with the axes back
def _permute(xp: Any, x: Array, dims: tuple[int, ...]) -> tuple[Array, Any]:
    return x.transpose(dims), dims


def _permute_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dims: Any) -> Gradients:
    back = [0] * len(dims)
    for to, source in enumerate(dims):
        back[source] = to
    return (g.transpose(back),)


permute = Op("permute", _permute, _permute_backward, inputs=("x",), view=True)


# z = x repeated along axes of size 1 and new leading ones;  dx = g summed over them
def _expand(xp: Any, x: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    return xp.broadcast_to(x, shape), x.shape


def _expand_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (fold(g, shape),)


expand = Op("expand", _expand, _expand_backward, inputs=("x",), view=True)


def along(dim: int, *parts: Any) -> tuple[Any, ...]:
    """The index of `parts` at dimension `dim` and after it, everything before it."""
    return (slice(None),) * dim + parts


def stretches(dim: int, lengths: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The indices of consecutive stretches of these lengths along `dim`."""
    start, found = 0, []
    for length in lengths:
        found.append(along(dim, slice(start, start + length)))
        start += length
    return found


# z0 | z1 | ... = x, cut along axis `dim`;  dx = [g0 | g1 | ...]
def _split(xp: Any, x: Array, dim: int, lengths: tuple[int, ...]) -> tuple[Array, Any]:
    return tuple([x[stretch] for stretch in stretches(dim, lengths)]), (x.shape, dim, lengths)


def _joined(parts: Any, shape: tuple[int, ...], places: Sequence[Any]) -> Array | None:
    """The array of `shape` whose parts at `places` these already are, on a GPU; None if there is none."""
    whole = getattr(parts[0], "base", None)
    if whole is None or type(whole) is np.ndarray or whole.size != math.prod(shape) or not whole.flags.c_contiguous:
        return None
    whole = whole.reshape(shape)
    for part, place in zip(parts, places, strict=True):
        if part is None or part.base is not parts[0].base or part.dtype != whole.dtype:
            return None
        own = whole[place]
        if (part.data.ptr, part.shape, part.strides) != (own.data.ptr, own.shape, own.strides):
            return None
    return whole


def _split_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, dim, lengths = residual
    if (whole := _joined(g, shape, stretches(dim, lengths))) is not None:
        return (whole,)
    dx = xp.empty(shape, next(part.dtype for part in g if part is not None))
    for part, stretch in zip(g, stretches(dim, lengths), strict=True):
        dx[stretch] = 0 if part is None else part
    return (dx,)


split = Op("split", _split, _split_backward, inputs=("x",), view=True)


# z_i = x[i] along axis `dim`;  dx[i] = g_i
def _unbind(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    return tuple([x[along(dim, i, ...)] for i in range(x.shape[dim])]), (x.shape, dim)


def _unbind_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, dim = residual
    if (whole := _joined(g, shape, [along(dim, i, ...) for i in range(len(g))])) is not None:
        return (whole,)
    dx = xp.empty(shape, next(part.dtype for part in g if part is not None))
    for i, part in enumerate(g):
        dx[along(dim, i)] = 0 if part is None else part
    return (dx,)


unbind = Op("unbind", _unbind, _unbind_backward, inputs=("x",), view=True)


def diagonal_of(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> Array:
    """The diagonal of `x` over two of its axes as a last axis: a view that may be written to."""
    rows, columns = x.shape[dim0], x.shape[dim1]
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    if length:
        x = x[along(dim0 if offset < 0 else dim1, slice(abs(offset), None))]
    rest = [i for i in range(x.ndim) if i not in (dim0, dim1)]
    return xp.lib.stride_tricks.as_strided(
        x,
        (*(x.shape[i] for i in rest), length),
        (*(x.strides[i] for i in rest), x.strides[dim0] + x.strides[dim1]),
    )


# z_i = x[i, i + offset];  dx = g on the diagonal, 0 elsewhere
def _diagonal(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> tuple[Array, Any]:
    return diagonal_of(xp, x, offset, dim0, dim1), (x.shape, offset, dim0, dim1)


def _diagonal_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, *where = residual
    dx = xp.zeros(shape, g.dtype)
    diagonal_of(xp, dx, *where)[...] = g
    return (dx,)


diagonal = Op("diagonal", _diagonal, _diagonal_backward, inputs=("x",), view=True)


# z[.., w, .., j] = x[.., w*step + j, ..] along axis `dim`: overlapping windows;  dx = g of every window, added up
def _unfold(xp: Any, x: Array, dim: int, size: int, step: int) -> tuple[Array, Any]:
    count = (x.shape[dim] - size) // step + 1
    windows = xp.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:dim], count, *x.shape[dim + 1 :], size),
        (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :], x.strides[dim]),
    )
    return windows, (x.shape, dim, size, step)


def _unfold_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, dim, size, step = residual
    dx = xp.zeros(shape, wide(g).dtype)
    reach = (g.shape[dim] - 1) * step + 1
    for j in range(size):
        dx[along(dim, slice(j, j + reach, step))] += g[..., j]
    return (dx.astype(g.dtype, copy=False),)


unfold = Op("unfold", _unfold, _unfold_backward, inputs=("x",), view=True)


# z = the elements of x at an offset and strides of its own;  dx = g added up where it was read
def _as_strided(xp: Any, x: Array, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> tuple[Array, Any]:
    size = x.dtype.itemsize
    start = x.reshape(-1)[offset:]
    view = xp.lib.stride_tricks.as_strided(start, shape, [n * size for n in stride])
    return view, (x.shape, shape, stride, offset)


def _as_strided_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    old, shape, stride, offset = residual
    dx = xp.zeros(math.prod(old), g.dtype)
    where = xp.full(shape, offset)
    for i, (n, step) in enumerate(zip(shape, stride, strict=True)):
        where += (xp.arange(n) * step).reshape([-1 if j == i else 1 for j in range(len(shape))])
    return (add_flat(xp, dx, where, g).reshape(old),)


as_strided = Op("as_strided", _as_strided, _as_strided_backward, inputs=("x",), view=True)
