"""Curves: value and slope in one kernel, where the array module would take a launch a step.

Each stands for the function of tiles that computes it on the CPU, and bears its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source


class Formula(NamedTuple):
    """body: C++ that makes of `x` the value `z` and the slope `d`, or of `g` and the saved `s` the gradient `dx`."""

    body: str
    parameters: tuple[str, ...] = ()


# z = f(x), d = f'(x)
CURVES = {
    "sigmoid": Formula("A z = 1 / (1 + exp(-x)), d = z * (1 - z);"),
    "silu": Formula("A s = 1 / (1 + exp(-x)), z = x * s, d = s + z * (1 - s);"),
    # e stays finite: t is 1 long before.
    "mish": Formula("""
        A e = exp(x < 20 ? x : A(20)), n = e * (e + 2), t = n / (n + 2), z = x * t;
        A d = t + x * (1 - t * t) * (e / (1 + e));"""),
    # y^+ + log(1 + e^-|y|), which neither overflows nor loses a small e.
    "softplus": Formula(
        """
        A y = x * A(beta), s = (y > 0 ? y : A(0)) + log1p(exp(-fabs(y)));
        bool over = y > A(threshold);
        A z = over ? x : s / A(beta), d = over ? A(1) : 1 / (1 + exp(-y));""",
        ("beta", "threshold"),
    ),
    "gelu": Formula("""
        A c = A(0.5) * erfc(x * A(-0.70710678118654752)), z = x * c;
        A d = c + x * exp(A(-0.5) * x * x) * A(0.39894228040143268);"""),
    "gelu_tanh": Formula("""
        const A k = A(0.79788456080286536);
        A y = x * x, t = tanh(k * x * (1 + A(0.044715) * y)), c = A(0.5) * (1 + t), z = x * c;
        A d = c + A(0.5) * x * (1 - t * t) * k * (1 + A(3 * 0.044715) * y);"""),
    "elu": Formula(
        """
        A e = x > 0 ? A(0) : expm1(A(input_scale) * x), low = A(scale) * A(alpha);
        A z = x > 0 ? A(scale) * x : low * e, d = x > 0 ? A(scale) : low * A(input_scale) * (e + 1);""",
        ("alpha", "scale", "input_scale"),
    ),
    "hardswish": Formula("A h = x + 3, z = x * (h < 0 ? A(0) : h > 6 ? A(6) : h) / 6, d = 0;"),
}
# Functions that CUDA has: z = f(x)
FUNCTIONS = {f"{name}_of": Formula(f"A z = {name}(x), d = 0;") for name in ("erf", "erfc", "erfinv")}
# dx of g and s, what was saved.
SLOPES = {
    "sigmoid_backward": Formula("A dx = g * s * (1 - s);"),
    "tanh_backward": Formula("A dx = g * (1 - s * s);"),
    "leaky_relu_backward": Formula("A dx = s > 0 ? g : g * A(slope);", ("slope",)),
    "hardswish_backward": Formula("A dx = s >= 3 ? g : s > -3 ? g * (s / 3 + A(0.5)) : A(0);"),
}


def _signature(formula: Formula) -> str:
    return "".join(f", double {name}" for name in formula.parameters)


def _curve(name: str, formula: Formula) -> str:
    return f"""
extern "C" __global__ void {name}(const T* xs, T* zs, T* ds, Index n{_signature(formula)}) {{
    FOR_EACH(i, n) {{
        A x = A(xs[i]);
        {formula.body}
        zs[i] = T(z);
        if (ds) ds[i] = T(d);
    }}
}}
"""


def _slope(name: str, formula: Formula) -> str:
    return f"""
extern "C" __global__ void {name}(const T* gs, const T* saved, T* dxs, Index n{_signature(formula)}) {{
    FOR_EACH(i, n) {{
        A g = A(gs[i]), s = A(saved[i]);
        {formula.body}
        dxs[i] = T(dx);
    }}
}}
"""


SOURCE = Source(
    "curves",
    "".join(_curve(name, formula) for name, formula in (*CURVES.items(), *FUNCTIONS.items()))
    + "".join(_slope(name, formula) for name, formula in SLOPES.items()),
)


FORMULAS = {**CURVES, **SLOPES}


def launch(
    xp: Any, kernel: Callable[..., None], arrays: Sequence[Array | None], scratch: int, parameters: dict[str, Any]
) -> None:
    """The kernel that bears the name of a function of tiles, over `arrays` of one shape; what it writes is contiguous.

    arrays: x, f(x) and f'(x) or None; or g, what was saved, and dx.
    """
    name = kernel.__name__.removeprefix("_").removesuffix("_tile")
    numbers = [float(parameters[each]) for each in FORMULAS[name].parameters]
    first = arrays[0]
    assert first is not None
    pieces = [None if each is None else xp.ascontiguousarray(each, first.dtype) for each in arrays]
    SOURCE.over(xp, name, first.dtype, first.size, *pieces, first.size, *numbers)


def function(name: str) -> Callable[[Any, Array], Array]:
    """erf, erfc or erfinv of floating arrays."""

    def call(xp: Any, x: Array) -> Array:
        out = xp.ndarray(x.shape, x.dtype)
        SOURCE.over(xp, f"{name}_of", x.dtype, x.size, xp.ascontiguousarray(x), out, None, x.size)
        return out

    return call
