"""One of several values, element by element: what is not chosen gets no gradient, not even a nan."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, select, shape_of


# z = max(x, y);  the larger one gets g, equal ones half each, both all of it beside a nan (as PyTorch has it)
def _maximum(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.maximum(x, y), (shape_of(x), shape_of(y))


def _maximum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    return _choose(xp, g, needs, shapes, saved, saved[0] < saved[1], saved[0] > saved[1])


maximum = Op("maximum", _maximum, _maximum_backward, inputs=("x", "y"), saves=("x", "y"))


# z = min(x, y);  the smaller one gets g, equal ones half each, both all of it beside a nan (as PyTorch has it)
def _minimum(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.minimum(x, y), (shape_of(x), shape_of(y))


def _minimum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    return _choose(xp, g, needs, shapes, saved, saved[0] > saved[1], saved[0] < saved[1])


minimum = Op("minimum", _minimum, _minimum_backward, inputs=("x", "y"), saves=("x", "y"))


def _choose(xp: Any, g: Array, needs: Needs, shapes: Any, pair: Saved, not_x: Array, not_y: Array) -> Gradients:
    """`g` for each of `pair`, halved where both are equal, without the elements that were not chosen."""
    g = xp.where(xp.equal(*pair), g * 0.5, g)
    return (
        fold(select(xp, ~not_x, g), shapes[0]) if needs[0] else None,
        fold(select(xp, ~not_y, g), shapes[1]) if needs[1] else None,
    )


# z = x where c, else y;  dx = g where c, dy = g where not c
def _where(xp: Any, c: Array, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.where(c, x, y), (shape_of(x), shape_of(y))


def _where_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    c = saved[0]
    dx = fold(select(xp, c, g), shapes[0]) if needs[1] else None
    return None, dx, fold(select(xp, ~c, g), shapes[1]) if needs[2] else None


where = Op("where", _where, _where_backward, inputs=("c", "x", "y"), saves=("c",))


# z = max(x, y), of a number and nan the number;  x gets g where x >= y or y is nan, y elsewhere (as PyTorch has it)
def _fmax(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.fmax(x, y), (shape_of(x), shape_of(y))


def _fmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, y = saved
    return _either(xp, g, needs, shapes, xp.greater_equal(x, y) | xp.isnan(y))


fmax = Op("fmax", _fmax, _fmax_backward, inputs=("x", "y"), saves=("x", "y"))


# z = min(x, y), of a number and nan the number;  x gets g where x <= y or y is nan, y elsewhere (as PyTorch has it)
def _fmin(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.fmin(x, y), (shape_of(x), shape_of(y))


def _fmin_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, y = saved
    return _either(xp, g, needs, shapes, xp.less_equal(x, y) | xp.isnan(y))


fmin = Op("fmin", _fmin, _fmin_backward, inputs=("x", "y"), saves=("x", "y"))


def _either(xp: Any, g: Array, needs: Needs, shapes: Any, first: Array) -> Gradients:
    return (
        fold(select(xp, first, g), shapes[0]) if needs[0] else None,
        fold(select(xp, ~first, g), shapes[1]) if needs[1] else None,
    )


# z = x held within [low, high];  dx = g where low <= x <= high
def _clamp(xp: Any, x: Array, low: float | None, high: float | None) -> tuple[Array, Any]:
    return xp.clip(x, low, high), (low, high)


def _clamp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, bounds: Any) -> Gradients:
    (x,), (low, high) = saved, bounds
    if low is not None:
        g = select(xp, x >= low, g)
    if high is not None:
        g = select(xp, x <= high, g)
    return (g,)


clamp = Op("clamp", _clamp, _clamp_backward, inputs=("x",), saves=("x",))


# z = x held within [low, high], tensors;  dx = g where low <= x <= high, dlow = g where x < low < high,
# dhigh = g where x > high or low > high
def _clamp_between(xp: Any, x: Array, low: Array | None, high: Array | None) -> tuple[Array, Any]:
    out = x if low is None else xp.maximum(x, low)
    out = out if high is None else xp.minimum(out, high)
    return out, [None if each is None else each.shape for each in (x, low, high)]


def _clamp_between_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, low, high = saved
    above = True if low is None else x >= low
    below = True if high is None else x <= high
    crossed = False if low is None or high is None else low > high
    dx = dlow = dhigh = None
    if needs[0]:
        dx = fold(select(xp, above & below, g), shapes[0])
    if needs[1]:
        dlow = fold(select(xp, (x < low) if high is None else (x < low) & (low < high), g), shapes[1])
    if needs[2]:
        dhigh = fold(select(xp, (x > high) | crossed, g), shapes[2])
    return dx, dlow, dhigh


clamp_between = Op(
    "clamp_between",
    _clamp_between,
    _clamp_between_backward,
    inputs=("x", "low", "high"),
    saves=("x", "low", "high"),
)


# z = x, numbers in place of nan and the infinities;  dx = g where x is finite
def _nan_to_num(xp: Any, x: Array, nan: float, posinf: float, neginf: float) -> tuple[Array, Any]:
    return xp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf), None


def _nan_to_num_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (select(xp, xp.isfinite(saved[0]), g),)


nan_to_num = Op("nan_to_num", _nan_to_num, _nan_to_num_backward, inputs=("x",), saves=("x",))
