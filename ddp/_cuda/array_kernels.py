"""Device kernels made of CuPy's functions, with few launches, no call of cuBLAS, and hardly any wait of the host.

CuPy refuses its cuBLAS calls while a CUDA graph is captured. So sums of products are computed by multiplication and
`sum`, or by `matmul_kernels.product`.

`keep_order` and `keep_image_format` give results the memory format of the operands, such as channels last. Elementwise
ops compute on views whose axes are in the order of memory. The results of other ops are copied if their format differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp._device import capturing
from ddp.ops.arrays import BFLOAT16, Array
from ddp.ops.memory_formats import as_format, inverse, order_of, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Op, Saved

# CuPy concatenates up to this many arrays by one copy for each array.
_MAX_COPIES = 8

# The forward and the backward of an op.
Pair = tuple[Callable[..., tuple[Array, Any]], Callable[..., Gradients]]


def sum_of_squares(xp: Any, x: Array) -> Array:
    result: Array = (x * x).sum()
    return result


def dropout_seed(xp: Any, rng: Any) -> Any:
    # Kernels read the seed in device memory. So the host does not wait, and each launch of a CUDA graph draws anew.
    return rng.random(2, dtype=xp.float64).view(xp.int64)


def assign(xp: Any, x: Array, step: Any, v: Any) -> None:
    # Computes x[mask] = number by copyto. In CuPy's assignment, the host waits for the number of elements that the mask
    # selects.
    mask = step[0] if isinstance(step, tuple) and step else step
    if getattr(mask, "dtype", "") != "bool" or getattr(v, "size", 1) != 1:
        x[step] = v
        return
    value = v.reshape(()) if hasattr(v, "reshape") else v
    xp.copyto(x, value, casting="unsafe", where=mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)))


def concatenate(xp: Any, arrays: Sequence[Array], axis: int) -> Array:
    # For more arrays CuPy may copy their addresses from the host to the device, which cannot be captured.
    while capturing.now is not None and len(arrays) > _MAX_COPIES:
        arrays = [xp.concatenate(arrays[i : i + _MAX_COPIES], axis) for i in range(0, len(arrays), _MAX_COPIES)]
    return xp.concatenate(arrays, axis)


def accumulate(xp: Any, name: str, x: Array) -> Array:
    # In CuPy only `add` and `multiply` have `accumulate`. So each element is combined with the one that is 1, then 2,
    # 4, ... places before it.
    out = x.copy()
    step = 1
    while step < len(x):
        out[step:] = getattr(xp, name)(out[step:], out[:-step])
        step *= 2
    return out


def clamp_values(xp: Any, gradients: Sequence[Array], bound: float) -> None:
    # CuPy's clip is not used, because its result for bfloat16 is float32.
    for g in gradients:
        xp.minimum(g, bound, out=g)
        xp.maximum(g, -bound, out=g)


def _op_for(op: Op, inputs: Sequence[Any]) -> Any:
    """Returns `op`, or `op.upcast`, which computes in float32, if an input is bfloat16."""
    return op.upcast if any(getattr(x, "dtype", None) is BFLOAT16 for x in inputs) else op


def _in_format(xp: Any, out: Any, x: Array) -> Any:
    """Converts a result, or each result of a tuple, to channels last if `x` has channels last."""
    if not prefers_channels_last(x):
        return out
    if isinstance(out, tuple):
        return tuple([as_format(xp, result, True) for result in out])
    return as_format(xp, out, True)


def keep_image_format(op: Op) -> Pair:
    """Wraps the formulas of `op`: results and the gradient of the images get the memory format of the images."""

    def forward(xp: Any, x: Array, *others: Any, **options: Any) -> tuple[Array, Any]:
        backward_op = _op_for(op, (x, *others))
        forward_op = op if op.supports_bfloat16 else backward_op
        out, residual = forward_op.forward(xp, x, *others, **options)
        return _in_format(xp, out, x), (backward_op, residual, forward_op is op, prefers_channels_last(x))

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        backward_op, inner, by_op, channels_last = residual
        if by_op and backward_op is not op:  # `Upcast` runs the backward, and expects a pair
            inner = (inner, None)
        dx, *others = backward_op.backward(xp, g, needs, saved, inner)
        return as_format(xp, dx, True) if channels_last and dx is not None else dx, *others

    return forward, backward


def keep_order(op: Op) -> Pair:
    """Wraps the formulas of an elementwise op: results get the memory format of the first floating operand.

    CuPy's results are in C order. So the op computes on transposed views. All have the same order of axes: the order in
    which the view of that operand is C-contiguous.
    """

    def forward(xp: Any, *inputs: Any, **options: Any) -> tuple[Array, Any]:
        run = _op_for(op, inputs)
        order = _common_order([x for x in inputs if getattr(x, "ndim", 0)])
        if order is None:
            out, residual = run.forward(xp, *inputs, **options)
            return out, (run, residual, None)
        back = inverse(order)
        out, residual = run.forward(xp, *[_transposed(x, order) for x in inputs], **options)
        return out.transpose(back), (run, residual, (order, back))

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        run, inner, orders = residual
        if orders is None:
            gradients: Gradients = run.backward(xp, g, needs, saved, inner)
            return gradients
        order, back = orders
        g, *saved = (_transposed(x, order) for x in (g, *saved))
        return [_transposed(dx, back) for dx in run.backward(xp, g, needs, saved, inner)]

    return forward, backward


def _common_order(arrays: Sequence[Array]) -> tuple[int, ...] | None:
    """The axes of the first floating array, in their order in memory.

    None if no array is floating, if that array is in C order, has gaps in memory or is broadcast, or if the arrays
    differ in their number of axes.
    """
    first = next((x for x in arrays if x.dtype.kind in "fV"), None)
    if first is None or first.flags.c_contiguous or any(x.ndim != first.ndim for x in arrays):
        return None
    order = order_of(first)
    return order if first.transpose(order).flags.c_contiguous else None


def _transposed(x: Any, axes: Sequence[int]) -> Any:
    return x.transpose(axes) if getattr(x, "ndim", 0) else x
