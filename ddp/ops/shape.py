"""Shapes: views where the memory allows it, and joining, flipping and rolling of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, compute_dtype, total, unbroadcast, where_or_zero
from ddp.ops.indexing import add_flat
from ddp.ops.op import Gradients, Needs, Op, Saved

# Shapes: results that are views of their input where the memory allows it.


# z = x in another shape;  dx = g in the shape of x
def _reshape(xp: Any, x: Array, shape: Ints) -> ForwardResult:
    return x.reshape(shape), x.shape


def _reshape_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (g.reshape(shape),)


reshape = Op("reshape", _reshape, _reshape_backward, inputs=("x",), view=True)


# z = x with its axes in the order `dims`;  dx = g with the axes back
def _permute(xp: Any, x: Array, dims: Ints) -> ForwardResult:
    return x.transpose(dims), dims


def _permute_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dims: Any) -> Gradients:
    back = [0] * len(dims)
    for to, source in enumerate(dims):
        back[source] = to
    return (g.transpose(back),)


permute = Op("permute", _permute, _permute_backward, inputs=("x",), view=True)


# z = x repeated along axes of size 1, and along new leading axes;  dx = g summed over these axes
def _expand(xp: Any, x: Array, shape: Ints) -> ForwardResult:
    return xp.broadcast_to(x, shape), x.shape


def _expand_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (unbroadcast(g, shape),)


expand = Op("expand", _expand, _expand_backward, inputs=("x",), view=True)


def along(dim: int, *parts: Any) -> tuple[Any, ...]:
    """Makes an index: everything in the dimensions before `dim`, and `parts` from `dim` on."""
    return (slice(None),) * dim + parts


def split_slices(dim: int, lengths: Ints) -> list[tuple[slice, ...]]:
    """Makes the indices of consecutive slices with these lengths along `dim`."""
    start = 0
    indices = []
    for length in lengths:
        indices.append(along(dim, slice(start, start + length)))
        start += length
    return indices


# z0 | z1 | ... = x, cut along axis `dim`;  dx = [g0 | g1 | ...]
def _split(xp: Any, x: Array, dim: int, lengths: Ints) -> ForwardResult:
    return tuple(cut(xp, x, dim, lengths)), (x.shape, dim, lengths)


@array_function
def cut(xp: Any, x: Array, dim: int, lengths: Ints | None = None) -> list[Array]:
    """Cuts x along `dim` into parts with these lengths; without lengths, into the slices x[i], which lack this axis."""
    return [x[place] for place in _places_along(dim, lengths, x.shape[dim])]


@array_function
def join(xp: Any, parts: Sequence[Array | None], shape: Ints, dim: int, lengths: Ints | None = None) -> Array:
    """Undoes `cut`: joins parts to an array of `shape`. A part that is None becomes zeros."""
    places = _places_along(dim, lengths, len(parts))
    if (whole := _joined(parts, shape, places)) is not None:
        return whole
    x = xp.empty(shape, next(part.dtype for part in parts if part is not None))
    for part, place in zip(parts, places, strict=True):
        x[place] = 0 if part is None else part
    return x


def _places_along(dim: int, lengths: Ints | None, count: int) -> Sequence[tuple[Any, ...]]:
    return [along(dim, i, ...) for i in range(count)] if lengths is None else split_slices(dim, lengths)


def _joined(parts: Any, shape: Ints, places: Sequence[Any]) -> Array | None:
    """On a GPU, the array of `shape` that has `parts` as its views at `places`; None if there is no such array."""
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
    return (join(xp, g, *residual),)


split = Op("split", _split, _split_backward, inputs=("x",), view=True)


# z_i = x[i] along axis `dim`;  dx[i] = g_i
def _unbind(xp: Any, x: Array, dim: int) -> ForwardResult:
    return tuple(cut(xp, x, dim)), (x.shape, dim)


def _unbind_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (join(xp, g, *residual),)


unbind = Op("unbind", _unbind, _unbind_backward, inputs=("x",), view=True)


@array_function
def zeros_but(xp: Any, g: Array, shape: Ints, view: Callable[[Any, Array], Array]) -> Array:
    """Zeros of `shape`, except that view(xp, zeros) is g."""
    x = xp.zeros(shape, g.dtype)
    view(xp, x)[...] = g
    return x


@array_function
def diagonal_of(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> Array:
    """A view of `x` whose last axis is the diagonal over the axes dim0 and dim1. It may be written to."""
    rows = x.shape[dim0]
    columns = x.shape[dim1]
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    if length:
        x = x[along(dim0 if offset < 0 else dim1, slice(abs(offset), None))]
    other_dims = [i for i in range(x.ndim) if i not in (dim0, dim1)]
    return xp.lib.stride_tricks.as_strided(
        x,
        (*(x.shape[i] for i in other_dims), length),
        (*(x.strides[i] for i in other_dims), x.strides[dim0] + x.strides[dim1]),
    )


# z_i = x[i, i + offset];  dx = g on the diagonal, 0 elsewhere
def _diagonal(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> ForwardResult:
    return diagonal_of(xp, x, offset, dim0, dim1), (x.shape, offset, dim0, dim1)


def _diagonal_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, *parameters = residual
    return (zeros_but(xp, g, shape, lambda xp, x: diagonal_of(xp, x, *parameters)),)


diagonal = Op("diagonal", _diagonal, _diagonal_backward, inputs=("x",), view=True)


# z[.., w, .., j] = x[.., w*step + j, ..] along axis `dim`: overlapping windows;  dx = g of every window, added up
def _unfold(xp: Any, x: Array, dim: int, size: int, step: int) -> ForwardResult:
    count = (x.shape[dim] - size) // step + 1
    windows = xp.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:dim], count, *x.shape[dim + 1 :], size),
        (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :], x.strides[dim]),
    )
    return windows, (x.shape, dim, size, step)


def _unfold_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, dim, size, step = residual
    dx = xp.zeros(shape, compute_dtype(g.dtype))
    reach = (g.shape[dim] - 1) * step + 1
    for j in range(size):
        dx[along(dim, slice(j, j + reach, step))] += g[..., j]
    return (dx.astype(g.dtype, copy=False),)


unfold = Op("unfold", _unfold, _unfold_backward, inputs=("x",), view=True)


# z = the elements of x at the given offset and strides;  dx = g added up where z reads x
def _as_strided(xp: Any, x: Array, shape: Ints, stride: Ints, offset: int) -> ForwardResult:
    size = x.dtype.itemsize
    start = x.reshape(-1)[offset:]
    view = xp.lib.stride_tricks.as_strided(start, shape, [n * size for n in stride])
    return view, (x.shape, shape, stride, offset)


def _as_strided_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    old, shape, stride, offset = residual
    dx = xp.zeros(math.prod(old), g.dtype)
    flat_index = xp.full(shape, offset)
    for i, (n, step) in enumerate(zip(shape, stride, strict=True)):
        flat_index += (xp.arange(n) * step).reshape([-1 if j == i else 1 for j in range(len(shape))])
    return (add_flat(xp, dx, flat_index, g).reshape(old),)


as_strided = Op("as_strided", _as_strided, _as_strided_backward, inputs=("x",), view=True)


# Copies: arrays side by side, repeated, mirrored, shifted, cut to a triangle.


@array_function
def concatenate(xp: Any, arrays: Sequence[Array], axis: int) -> Array:
    """Concatenates the arrays along one of their axes."""
    return xp.concatenate(arrays, axis)


# z = [x0 | x1 | ...] along axis `dim`, without those of shape (0,);  dxi = the part of g where xi is
def _cat(xp: Any, *xs: Array, dim: int) -> ForwardResult:
    nonempty = [x for x in xs if x.shape != (0,)]
    return concatenate(xp, nonempty or xs, dim), (dim, [x.shape for x in xs])


def _cat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    dim, shapes = residual
    parts = cut(xp, g, dim, tuple([0 if shape == (0,) else shape[dim] for shape in shapes]))
    return [part.reshape(shape) if need else None for need, part, shape in zip(needs, parts, shapes, strict=True)]


cat = Op("cat", _cat, _cat_backward, inputs=("*xs",), supports_bfloat16=True)


# z = x0, x1, ... side by side along a new axis `dim`;  dxi = g[i] along it
def _stack(xp: Any, *xs: Array, dim: int) -> ForwardResult:
    index = along(dim, None)  # expand_dims takes five times as long
    return concatenate(xp, [x[index] for x in xs], dim), dim


def _stack_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return [part if need else None for part, need in zip(cut(xp, g, dim), needs, strict=True)]


stack = Op("stack", _stack, _stack_backward, inputs=("*xs",), supports_bfloat16=True)


# z = x repeated times[i] times along each axis i;  dx = g summed over the copies
def _repeat(xp: Any, x: Array, times: Ints) -> ForwardResult:
    return xp.tile(x, times), (x.shape, times)


def _repeat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, times = residual
    apart = g.reshape([n for pair in zip(times, shape, strict=True) for n in pair])
    return (total(apart, tuple(range(0, 2 * len(shape), 2))),)


repeat = Op("repeat", _repeat, _repeat_backward, inputs=("x",), supports_bfloat16=True)


# z = x with the order along `dims` reversed;  dx = g, reversed
def _flip(xp: Any, x: Array, dims: Ints) -> ForwardResult:
    return (xp.flip(x, dims) if dims else x).copy(), dims


def _flip_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dims: Any) -> Gradients:
    return (xp.flip(g, dims) if dims else g,)


flip = Op("flip", _flip, _flip_backward, inputs=("x",), supports_bfloat16=True)


# z[i + shift] = x[i], with indices modulo the length;  dx[i] = g[i + shift]
def _roll(xp: Any, x: Array, shifts: Ints, dims: Ints) -> ForwardResult:
    return xp.roll(x, shifts, dims), (shifts, dims)


def _roll_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shifts, dims = residual
    return (xp.roll(g, tuple(-n for n in shifts), dims),)


roll = Op("roll", _roll, _roll_backward, inputs=("x",), supports_bfloat16=True)


# z = x where column - row <= diagonal, else 0;  dx = g there
def _tril(xp: Any, x: Array, diagonal: int) -> ForwardResult:
    return where_or_zero(xp, xp.tri(*x.shape[-2:], k=diagonal, dtype=bool), x), diagonal


def _tril_backward(xp: Any, g: Array, needs: Needs, saved: Saved, diagonal: Any) -> Gradients:
    return (_tril(xp, g, diagonal)[0],)


tril = Op("tril", _tril, _tril_backward, inputs=("x",), supports_bfloat16=True)


# z = x where column - row >= diagonal, else 0;  dx = g there
def _triu(xp: Any, x: Array, diagonal: int) -> ForwardResult:
    return where_or_zero(xp, ~xp.tri(*x.shape[-2:], k=diagonal - 1, dtype=bool), x), diagonal


def _triu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, diagonal: Any) -> Gradients:
    return (_triu(xp, g, diagonal)[0],)


triu = Op("triu", _triu, _triu_backward, inputs=("x",), supports_bfloat16=True)


# z[.., i, i + offset] = x[.., i], 0 elsewhere, over axes dim0 and dim1;  dx = the diagonal of g
def _diag_embed(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> ForwardResult:
    side = x.shape[-1] + abs(offset)
    lengths = iter(x.shape[:-1])
    sizes = tuple([side if i in (dim0, dim1) else next(lengths) for i in range(x.ndim + 1)])
    parameters = offset, dim0, dim1
    return zeros_but(xp, x, sizes, lambda xp, out: diagonal_of(xp, out, *parameters)), parameters


def _diag_embed_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (diagonal_of(xp, g, *residual),)


diag_embed = Op("diag_embed", _diag_embed, _diag_embed_backward, inputs=("x",), supports_bfloat16=True)
