"""Device forms by CuPy's own functions: where a GPU wants few launches, no wait of the host, and no call of cuBLAS.

CuPy refuses its own cuBLAS calls while a CUDA graph is captured: what is a product on the CPU is a sum here, or goes
through `matmul_kernels.product`.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda import matmul_kernels
from ddp.ops import convolution, cpu_blocking
from ddp.ops.op import Array

WHOLE = 1 << 62  # elements or bytes of a block: the whole array


def where_or_zero(xp: Any, mask: Array, g: Array) -> Array:
    return xp.where(mask, g, g.dtype.type(0))


def sum_of_squares(xp: Any, x: Array) -> Array:
    result: Array = (x * x).sum()
    return result


def blend(xp: Any, mask: Array, a: Array, b: Array, out: Array) -> None:
    out[...] = xp.where(mask, a, b)


def keep(xp: Any, mask: Array, a: Array, out: Array) -> None:
    out[...] = xp.where(mask, a, a.dtype.type(0))


def lines(xp: Any, rows: int, n: int, dtype: Any, w: Array | None = None, b: Array | None = None) -> Any:
    return cpu_blocking.BroadcastLines(xp, rows, n, dtype, w, b)


class CapturedColumns(convolution.Columns):
    """Columns whose products can be captured in a CUDA graph."""

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        return matmul_kernels.product(self.xp, a, b, out)


def row_sums(xp: Any, x: Array, weight: Array | None) -> Array:
    # TF32, where it is allowed, would round the factors of a product.
    result: Array = (x if weight is None else x * weight).sum(axis=1)
    return result


def dots(xp: Any, x: Array, y: Array) -> Array:
    # As CuPy computes it, einsum may call cuBLAS.
    result: Array = (x * y).sum(axis=-1)
    return result


def channel_sums(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    other = x if y is None else y
    if shift is not None:
        other = other - shift[:, None]
    return x.sum(axis=1), ((other if y is None else x) * other).sum(axis=1)


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
