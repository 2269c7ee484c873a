"""Elementwise arithmetic and mathematics: inputs broadcast, and gradients are summed back to their shapes."""

from __future__ import annotations

from typing import Any

from ddp._device import device, device_of, place
from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, select, shape_of


# z = x + y;  dx = g, dy = g
def _add(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return x + y, (shape_of(x), shape_of(y))


def _add_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    return fold(g, shapes[0]) if needs[0] else None, fold(g, shapes[1]) if needs[1] else None


add = Op("add", _add, _add_backward, inputs=("x", "y"))


# z = x - y;  dx = g, dy = -g
def _sub(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return x - y, (shape_of(x), shape_of(y))


def _sub_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    return fold(g, shapes[0]) if needs[0] else None, -fold(g, shapes[1]) if needs[1] else None


sub = Op("sub", _sub, _sub_backward, inputs=("x", "y"))


# z = x*y;  dx = g*y, dy = g*x
def _mul(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return x * y, (shape_of(x), shape_of(y))


def _mul_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    y, x = saved
    return fold(g * y, shapes[0]) if needs[0] else None, fold(g * x, shapes[1]) if needs[1] else None


mul = Op("mul", _mul, _mul_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)})


# z = x/y;  dx = g/y, dy = -g*z/y
def _div(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return x / y, (shape_of(x), shape_of(y))


def _div_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    y, out = saved
    dx = g / y
    return fold(dx, shapes[0]) if needs[0] else None, fold(-dx * out, shapes[1]) if needs[1] else None


div = Op("div", _div, _div_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("y", "out")})


# z = x^y;  dx = g*y*x^(y-1), dy = g*z*log(x), both 0 where the factor in front is 0 (as PyTorch has it)
def _pow(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return x**y, (shape_of(x), shape_of(y))


def _pow_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, y, out = saved
    dx = dy = None
    if needs[0]:
        if isinstance(y, int | float):
            dx = g * (x ** (y - 1) * y) if y else xp.zeros_like(g)
        else:
            dx = select(xp, xp.not_equal(y, 0), g * y * x ** xp.where(y == 0, xp.ones_like(y), y - 1))
        dx = fold(dx, shapes[0])
    if needs[1]:
        # A zero base: log is -inf there, but 0^y does not change with y > 0.
        safe = xp.where(xp.equal(x, 0), xp.ones_like(out), x)
        dy = fold(g * out * xp.log(safe), shapes[1])
    return dx, dy


pow = Op("pow", _pow, _pow_backward, inputs=("x", "y"), saves={"x": ("x", "y"), "y": ("x", "out")})


# z = -x;  dx = -g
def _neg(xp: Any, x: Array) -> tuple[Array, Any]:
    return -x, None


def _neg_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (-g,)


neg = Op("neg", _neg, _neg_backward, inputs=("x",))


# z = e^x;  dx = g*z
def _exp(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.exp(x), None


def _exp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g * saved[0],)


exp = Op("exp", _exp, _exp_backward, inputs=("x",), saves=("out",))


# z = log x;  dx = g/x
def _log(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.log(x), None


def _log_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g / saved[0],)


log = Op("log", _log, _log_backward, inputs=("x",), saves=("x",))


# z = sqrt x;  dx = g/(2z)
def _sqrt(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.sqrt(x), None


def _sqrt_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g / (2 * saved[0]),)


sqrt = Op("sqrt", _sqrt, _sqrt_backward, inputs=("x",), saves=("out",))


# z = |x|;  dx = g*sign(x)
def _abs(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.abs(x), None


def _abs_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g * xp.sign(saved[0]),)


abs = Op("abs", _abs, _abs_backward, inputs=("x",), saves=("x",))


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


# z = max(x, 0);  dx = g unless z = 0, so that a nan lets it pass (as PyTorch has it)
def _relu(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.maximum(x, 0), None


def _relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (select(xp, saved[0] != 0, g),)


relu = Op("relu", _relu, _relu_backward, inputs=("x",), saves=("out",))


# z = tanh x;  dx = g*(1 - z^2)
def _tanh(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.tanh(x), None


def _tanh_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    out = saved[0]
    return (g * (1 - out * out),)


tanh = Op("tanh", _tanh, _tanh_backward, inputs=("x",), saves=("out",))


# z = 1/(1 + e^-x);  dx = g*z*(1 - z)
def _sigmoid(xp: Any, x: Array) -> tuple[Array, Any]:
    # e^-|x| never overflows, and keeps the small values exact in relative terms.
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small), None


def _sigmoid_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    out = saved[0]
    return (g * out * (1 - out),)


sigmoid = Op("sigmoid", _sigmoid, _sigmoid_backward, inputs=("x",), saves=("out",))


# z = x in another dtype;  dx = g in the dtype of x
def _cast(xp: Any, x: Array, dtype: Any) -> tuple[Array, Any]:
    return x.astype(dtype), x.dtype


def _cast_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dtype: Any) -> Gradients:
    return (g.astype(dtype),)


cast = Op("cast", _cast, _cast_backward, inputs=("x",))


# z = x, in memory of its own;  dx = g
def _clone(xp: Any, x: Array) -> tuple[Array, Any]:
    return x.copy(), None


def _clone_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g,)


clone = Op("clone", _clone, _clone_backward, inputs=("x",))


# z = x on another device;  dx = g on the device of x
def _transfer(xp: Any, x: Array, target: device) -> tuple[Array, Any]:
    return place(x, target), device_of(x)


def _transfer_backward(xp: Any, g: Array, needs: Needs, saved: Saved, source: Any) -> Gradients:
    return (place(g, source),)


transfer = Op("transfer", _transfer, _transfer_backward, inputs=("x",))


# z = x where kept, scaled to the same expectation, else 0;  dx = g treated alike
def _dropout(xp: Any, x: Array, p: float, generator: Any) -> tuple[Array, Any]:
    keep = generator.random(x.shape, dtype=xp.float32) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * keep * scale, (keep, scale)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    keep, scale = residual
    return (g * keep * scale,)


dropout = Op("dropout", _dropout, _dropout_backward, inputs=("x",))
