"""Writing by index: x with values in some places. What is written over gets no gradient; the values do.

`within`: x itself is written to and returned, which spares an in-place caller two passes over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, select, shape_of
from ddp.ops.index import Places, add_flat, collected, positions


def _writing(write: Callable[..., Any]) -> Callable[..., tuple[Array, Any]]:
    """A forward of `write(xp, out, v, ...) -> residual`, on a copy of x or on x itself."""

    def forward(xp: Any, x: Array, v: Any, within: bool = False, **parameters: Any) -> tuple[Array, Any]:
        out = x if within else x.copy()
        return out, write(xp, out, v, **parameters)

    return forward


# z = x with v added at places;  dx = g;  dv = g at places, summed to the shape of v
def _index_add(xp: Any, out: Array, v: Any, places: Places) -> Any:
    shape = out[places].shape
    out += collected(xp, xp.broadcast_to(xp.asarray(v, out.dtype), shape), out.shape, places)
    return places, shape_of(v)


def _index_add_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    places, shape = residual
    return g if needs[0] else None, fold(g[places], shape) if needs[1] else None


index_add = Op("index_add", _writing(_index_add), _index_add_backward, inputs=("x", "v"))


# z = x, but v[..i..] at [..index[..i..]..] along axis `dim`;  dx = g, but 0 there;  dv = g there
def _scatter(xp: Any, out: Array, v: Any, index: Array, dim: int) -> Any:
    where = positions(xp, index, dim, out.shape)
    flat = out.reshape(-1)
    flat[where] = _corner(v, index)
    _stored(out, flat)
    return where, shape_of(v)


def _scatter_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    where, shape = residual
    dx = dv = None
    if needs[0]:
        dx = xp.array(g, order="C")
        dx.reshape(-1)[where] = 0
    if needs[1]:
        dv = _uncornered(xp, g.reshape(-1).take(where), shape)
    return dx, dv


def _stored(out: Array, flat: Array) -> None:
    """What was written to `flat`, which is `out` as a vector, in `out`; a copy where its memory asked for one."""
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)


def _corner(v: Any, index: Array) -> Any:
    """The part of `v` that `index` covers; a number as it is."""
    return v[tuple(map(slice, index.shape))] if shape_of(v) else v


def _uncornered(xp: Any, g: Array, shape: tuple[int, ...]) -> Array:
    if g.shape == shape:
        return g
    out = xp.zeros(shape, g.dtype)
    out[tuple(map(slice, g.shape))] = g
    return out


scatter = Op("scatter", _writing(_scatter), _scatter_backward, inputs=("x", "v"), native=True)


# z = x with v[..i..] added at [..index[..i..]..] along axis `dim`;  dx = g;  dv = g there
def _scatter_add(xp: Any, out: Array, v: Array, index: Array, dim: int) -> Any:
    where = positions(xp, index, dim, out.shape)
    flat = out.reshape(-1)
    sums = add_flat(xp, flat, where, _corner(v, index))
    if sums is flat:
        _stored(out, flat)
    else:
        out[...] = sums.reshape(out.shape)
    return where, v.shape


def _scatter_add_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    where, shape = residual
    return g if needs[0] else None, _uncornered(xp, g.reshape(-1).take(where), shape) if needs[1] else None


scatter_add = Op("scatter_add", _writing(_scatter_add), _scatter_add_backward, inputs=("x", "v"))


# z = x, but v where `mask` (both broadcast to x);  dx = g, but 0 there;  dv = g there, summed to the shape of v
def _masked_fill(xp: Any, out: Array, v: Any, mask: Array) -> Any:
    xp.copyto(out, v, casting="unsafe", where=mask)
    return mask, shape_of(v)


def _masked_fill_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    mask, shape = residual
    dx = select(xp, ~mask, g) if needs[0] else None
    return dx, fold(select(xp, mask, g), shape) if needs[1] else None


masked_fill = Op("masked_fill", _writing(_masked_fill), _masked_fill_backward, inputs=("x", "v"), native=True)
