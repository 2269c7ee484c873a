"""Device forms by CuPy's own functions: where a GPU wants few launches, no wait of the host, and no call of cuBLAS.

CuPy refuses its own cuBLAS calls while a CUDA graph is captured: what is a product on the CPU is a sum here, or goes
through `matmul_kernels.product`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.ops.op import Array


def where_or_zero(xp: Any, mask: Array, g: Array) -> Array:
    return xp.where(mask, g, g.dtype.type(0))


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
