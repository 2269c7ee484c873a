"""Steps: functions that are flat almost everywhere, so that nothing flows back, and the fraction between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved


def signs(xp: Any, x: Array) -> Array:
    """-1, 0 or 1, and 0 for nan (as PyTorch has it)."""
    return xp.greater(x, 0).astype(x.dtype) - xp.less(x, 0).astype(x.dtype)


def _flat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (xp.zeros_like(g),)


def _step(name: str, value: Callable[[Any, Array], Array]) -> Op:
    """An op of one input, z = value(xp, x);  dx = 0."""

    def forward(xp: Any, x: Array) -> tuple[Array, Any]:
        return value(xp, x), None

    return Op(name, forward, _flat_backward, inputs=("x",))


floor = _step("floor", lambda xp, x: xp.floor(x))
ceil = _step("ceil", lambda xp, x: xp.ceil(x))
trunc = _step("trunc", lambda xp, x: xp.trunc(x))
sign = _step("sign", lambda xp, x: signs(xp, x))


# z = x to `decimals` digits, halves to the even neighbour;  dx = 0
def _round(xp: Any, x: Array, decimals: int) -> tuple[Array, Any]:
    return xp.round(x, decimals), None


round = Op("round", _round, _flat_backward, inputs=("x",))


# z = x - trunc x;  dx = g
def _frac(xp: Any, x: Array) -> tuple[Array, Any]:
    return x - xp.trunc(x), None


def _frac_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (g,)


frac = Op("frac", _frac, _frac_backward, inputs=("x",))
