"""Joins and copies in another order: tensors side by side, repeated, mirrored, shifted, cut to a triangle."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total
from ddp.ops.shape import along, diagonal_of, stretches


# z = [x0 | x1 | ...] along axis `dim`, those of shape (0,) left out;  dxi = its stretch of g
def _cat(xp: Any, *xs: Array, dim: int) -> tuple[Array, Any]:
    some = [x for x in xs if x.shape != (0,)]
    return xp.concatenate(some or xs, axis=dim), (dim, [x.shape for x in xs])


def _cat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    dim, shapes = residual
    parts = stretches(dim, tuple([0 if shape == (0,) else shape[dim] for shape in shapes]))
    return [g[part].reshape(shape) if need else None for need, part, shape in zip(needs, parts, shapes, strict=True)]


cat = Op("cat", _cat, _cat_backward, inputs=("*xs",), native=True)


# z = x0, x1, ... side by side along a new axis `dim`;  dxi = the i-th of g
def _stack(xp: Any, *xs: Array, dim: int) -> tuple[Array, Any]:
    return xp.stack(xs, axis=dim), dim


def _stack_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return [g[along(dim, i, ...)] if need else None for i, need in enumerate(needs)]


stack = Op("stack", _stack, _stack_backward, inputs=("*xs",), native=True)


# z = x laid out `times` along each axis (as many as x has);  dx = g summed over the copies
def _repeat(xp: Any, x: Array, times: tuple[int, ...]) -> tuple[Array, Any]:
    return xp.tile(x, times), (x.shape, times)


def _repeat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, times = residual
    apart = g.reshape([n for pair in zip(times, shape, strict=True) for n in pair])
    return (total(apart, tuple(range(0, 2 * len(shape), 2))),)


repeat = Op("repeat", _repeat, _repeat_backward, inputs=("x",), native=True)


# z = x with the order along `dims` reversed;  dx = g, reversed
def _flip(xp: Any, x: Array, dims: tuple[int, ...]) -> tuple[Array, Any]:
    return (xp.flip(x, dims) if dims else x).copy(), dims


def _flip_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dims: Any) -> Gradients:
    return (xp.flip(g, dims) if dims else g,)


flip = Op("flip", _flip, _flip_backward, inputs=("x",), native=True)


# z[i + shift] = x[i], around the end;  dx[i] = g[i + shift]
def _roll(xp: Any, x: Array, shifts: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Array, Any]:
    return xp.roll(x, shifts, dims), (shifts, dims)


def _roll_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shifts, dims = residual
    return (xp.roll(g, tuple(-n for n in shifts), dims),)


roll = Op("roll", _roll, _roll_backward, inputs=("x",), native=True)


# z = x where column - row <= diagonal, else 0;  dx = g there
def _tril(xp: Any, x: Array, diagonal: int) -> tuple[Array, Any]:
    return xp.tril(x, diagonal), diagonal


def _tril_backward(xp: Any, g: Array, needs: Needs, saved: Saved, diagonal: Any) -> Gradients:
    return (xp.tril(g, diagonal),)


tril = Op("tril", _tril, _tril_backward, inputs=("x",), native=True)


# z = x where column - row >= diagonal, else 0;  dx = g there
def _triu(xp: Any, x: Array, diagonal: int) -> tuple[Array, Any]:
    return xp.triu(x, diagonal), diagonal


def _triu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, diagonal: Any) -> Gradients:
    return (xp.triu(g, diagonal),)


triu = Op("triu", _triu, _triu_backward, inputs=("x",), native=True)


# z[.., i, i + offset] = x[.., i], 0 elsewhere, over axes dim0 and dim1;  dx = the diagonal of g
def _diag_embed(xp: Any, x: Array, offset: int, dim0: int, dim1: int) -> tuple[Array, Any]:
    side = x.shape[-1] + abs(offset)
    rest = iter(x.shape[:-1])
    out = xp.zeros([side if i in (dim0, dim1) else next(rest) for i in range(x.ndim + 1)], x.dtype)
    diagonal_of(xp, out, offset, dim0, dim1)[...] = x
    return out, (offset, dim0, dim1)


def _diag_embed_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (diagonal_of(xp, g, *residual),)


diag_embed = Op("diag_embed", _diag_embed, _diag_embed_backward, inputs=("x",), native=True)
