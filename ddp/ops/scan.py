"""Running sums, products and extremes along an axis."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, working


def _wide(x: Array) -> Any:
    """The dtype to add up and multiply in: int64 for integers, float32 for float16."""
    if x.dtype.kind in "bui":
        return "int64"
    return working(x)


def _narrow(out: Array, x: Array) -> Array:
    return out.astype(x.dtype) if x.dtype.char == "e" else out


def _from_the_end(xp: Any, x: Array, dim: int) -> Array:
    """The sums of all elements from here to the end of `dim`."""
    return xp.flip(xp.cumsum(xp.flip(x, dim), axis=dim, dtype=_wide(x)), dim)


# z_i = sum of x_j, j <= i;  dx_i = sum of g_j, j >= i
def _cumsum(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    return _narrow(xp.cumsum(x, axis=dim, dtype=_wide(x)), x), dim


def _cumsum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return (_narrow(_from_the_end(xp, g, dim), g),)


cumsum = Op("cumsum", _cumsum, _cumsum_backward, inputs=("x",))


# z_i = product of x_j, j <= i;  dx_i = sum of g_j*z_j, j >= i, over x_i;
# beside zeros dx_i = z_(i-1)*s_i, s_i = g_i + x_(i+1)*s_(i+1), which divides by nothing
def _cumprod(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    return _narrow(xp.cumprod(x, axis=dim, dtype=_wide(x)), x), dim


def _cumprod_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    x, out = saved
    if (x != 0).all():
        return ((_from_the_end(xp, g * out, dim) / x).astype(x.dtype, copy=False),)
    x, out, g = (xp.moveaxis(each, dim, 0) for each in (x, out, g))
    dx = xp.empty_like(x)
    dx[-1] = g[-1]
    for i in range(len(x) - 2, -1, -1):
        dx[i] = g[i] + x[i + 1] * dx[i + 1]
    dx[1:] *= out[:-1]
    return (xp.moveaxis(dx, 0, dim),)


cumprod = Op("cumprod", _cumprod, _cumprod_backward, inputs=("x",), saves=("x", "out"))


def _accumulated(xp: Any, name: str, x: Array) -> Array:
    return getattr(xp, name).accumulate(x, axis=0)


def _doubled(xp: Any, name: str, x: Array) -> Array:
    # CuPy's maximum has no accumulate: combine with what is 1, 2, 4, ... places before.
    out, step = x.copy(), 1
    while step < len(x):
        out[step:] = getattr(xp, name)(out[step:], out[:-step])
        step *= 2
    return out


RUNNING = {"numpy": _accumulated, "cupy": _doubled}


def running(xp: Any, name: str, x: Array, dim: int) -> Array:
    """The last place (int64) of the extreme of x_j, j <= i, along `dim`; a nan is larger and smaller than anything.

    name: "maximum" or "minimum".
    """
    x = xp.moveaxis(x, dim, 0)
    values = RUNNING[xp.__name__](xp, name, x)
    hit = x == values
    hit |= x != x  # nan alone is unlike itself
    places = xp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    found = RUNNING[xp.__name__](xp, "maximum", xp.where(hit, places, 0))
    return xp.ascontiguousarray(xp.moveaxis(found, 0, dim))


# z_i = x at index_i along `dim`, where lines may name an element often;  dx = g, added up there
def _choose(xp: Any, x: Array, index: Array, dim: int) -> tuple[Array, Any]:
    return xp.take_along_axis(x, index, axis=dim), (x.shape, index, dim)


def _choose_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index, dim = residual
    dx = xp.zeros(shape, g.dtype)
    where = [xp.arange(n).reshape([-1 if i == axis else 1 for i in range(g.ndim)]) for axis, n in enumerate(g.shape)]
    where[dim] = index
    xp.add.at(dx, tuple(where), g)
    return (dx,)


running_extreme = Op("running_extreme", _choose, _choose_backward, inputs=("x",))
