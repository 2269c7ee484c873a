"""Device forms by CuPy's own functions: where a GPU wants few launches, no wait of the host, and no call of cuBLAS.

CuPy refuses its own cuBLAS calls while a CUDA graph is captured: what is a product on the CPU is a sum here, or goes
through `matmul_kernels.product`.

Ops on images have results that lie in memory as their operands do, channels last among them. Convolutions are cuDNN's.
Everything else is computed by the array module's functions: elementwise ops on views in the order of memory; other ops
copy their results, so that the next layer finds the format that its input had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp._device import capturing
from ddp.ops.arrays import BFLOAT16, Array
from ddp.ops.memory_formats import as_format, inverse, order_of, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Op, Saved

_AT_ONCE = 8  # arrays, at most, that CuPy copies one by one
Pair = tuple[Callable[..., tuple[Array, Any]], Callable[..., Gradients]]


def sum_of_squares(xp: Any, x: Array) -> Array:
    result: Array = (x * x).sum()
    return result


def dropout_seed(xp: Any, rng: Any) -> Any:
    # It stays on the device, where a kernel reads it: the host need not wait, and a replayed graph draws anew.
    return rng.random(2, dtype=xp.float64).view(xp.int64)


def assign(xp: Any, x: Array, step: Any, v: Any) -> None:
    # One number for all that a mask selects: the host need not know how many these are.
    mask = step[0] if isinstance(step, tuple) and step else step
    if getattr(mask, "dtype", "") != "bool" or getattr(v, "size", 1) != 1:
        x[step] = v
        return
    value = v.reshape(()) if hasattr(v, "reshape") else v
    xp.copyto(x, value, casting="unsafe", where=mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)))


def concatenate(xp: Any, arrays: Sequence[Array], axis: int) -> Array:
    # For more arrays CuPy copies a table of their addresses from the host to the device, which cannot be captured.
    while capturing.now is not None and len(arrays) > _AT_ONCE:
        arrays = [xp.concatenate(arrays[i : i + _AT_ONCE], axis) for i in range(0, len(arrays), _AT_ONCE)]
    return xp.concatenate(arrays, axis)


def accumulate(xp: Any, name: str, x: Array) -> Array:
    # CuPy's maximum has no accumulate: combine with what is 1, 2, 4, ... places before.
    out, step = x.copy(), 1
    while step < len(x):
        out[step:] = getattr(xp, name)(out[step:], out[:-step])
        step *= 2
    return out


def clamp_values(xp: Any, gradients: Sequence[Array], bound: float) -> None:
    # CuPy's clip computes bfloat16 in float32, and leaves it there.
    for g in gradients:
        xp.minimum(g, bound, out=g)
        xp.maximum(g, -bound, out=g)


# Results that lie in memory as the operands do.


def _general(op: Op, inputs: Sequence[Any]) -> Any:
    """The op that computes with the array module's functions."""
    return op.upcast if any(getattr(x, "dtype", None) is BFLOAT16 for x in inputs) else op


def _in_format(xp: Any, out: Any, x: Array) -> Any:
    if not prefers_channels_last(x):
        return out
    return tuple([as_format(xp, each, True) for each in out]) if isinstance(out, tuple) else as_format(xp, out, True)


def keep_image_format(op: Op) -> Pair:
    """The op by the array module's functions, with results and gradients laid out as the images are."""

    def forward(xp: Any, x: Array, *others: Any, **how: Any) -> tuple[Array, Any]:
        general = _general(op, (x, *others))
        run = op if op.supports_bfloat16 else general
        out, residual = run.forward(xp, x, *others, **how)
        return _in_format(xp, out, x), (general, residual, run is op, prefers_channels_last(x))

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        run, inner, plain, last = residual
        if plain and run is not op:  # the forward did not come by `Upcast`
            inner = inner, None
        dx, *others = run.backward(xp, g, needs, saved, inner)
        return as_format(xp, dx, True) if last and dx is not None else dx, *others

    return forward, backward


def keep_order(op: Op) -> Pair:
    """The elementwise op by the array module's functions, with results that lie in memory as the operands do.

    CuPy's own results lie in the order of their axes: so it is given views whose axes are in the order of memory.
    """

    def forward(xp: Any, *inputs: Any, **how: Any) -> tuple[Array, Any]:
        run = _general(op, inputs)
        order = _order([x for x in inputs if getattr(x, "ndim", 0)])
        if order is None:
            out, residual = run.forward(xp, *inputs, **how)
            return out, (run, residual, None)
        back = inverse(order)
        out, residual = run.forward(xp, *[_turned(x, order) for x in inputs], **how)
        return out.transpose(back), (run, residual, (order, back))

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        run, inner, orders = residual
        if orders is None:
            found: Gradients = run.backward(xp, g, needs, saved, inner)
            return found
        order, back = orders
        g, *saved = (_turned(x, order) for x in (g, *saved))
        return [_turned(dx, back) for dx in run.backward(xp, g, needs, saved, inner)]

    return forward, backward


def _order(arrays: Sequence[Array]) -> tuple[int, ...] | None:
    """The axes of the first floating array in the order of memory; None where they are, or where ranks differ."""
    first = next((x for x in arrays if x.dtype.kind in "fV"), None)
    if first is None or first.flags.c_contiguous or any(x.ndim != first.ndim for x in arrays):
        return None
    order = order_of(first)
    return order if first.transpose(order).flags.c_contiguous else None


def _turned(x: Any, axes: Sequence[int]) -> Any:
    return x.transpose(axes) if getattr(x, "ndim", 0) else x
