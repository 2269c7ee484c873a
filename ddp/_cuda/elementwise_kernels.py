"""Elementwise CUDA kernels: the error function and its kin, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._cuda.raw_kernel import PHILOX, KernelSource, wide
from ddp.ops.arrays import Array
from ddp.ops.attention import dropout_seed
from ddp.ops.memory_formats import as_format, inverse, order_of, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Saved

# The error function, its complement and its inverse by the functions that CUDA has. CuPy 14 computes those of float16
# in float64, and to import them takes a second.

_KERNEL = """
extern "C" __global__ void NAME_of(const T* x, T* out, Index n) {
    FOR_EACH(i, n) out[i] = T(NAME(A(x[i])));
}
"""

ERROR_FUNCTIONS = KernelSource("curves", "".join(_KERNEL.replace("NAME", name) for name in ("erf", "erfc", "erfinv")))


def error_function(name: str) -> Callable[[Any, Array], Array]:
    """erf, erfc or erfinv of floating arrays."""

    def call(xp: Any, x: Array) -> Array:
        out = xp.ndarray(x.shape, x.dtype)
        ERROR_FUNCTIONS.over(xp, f"{name}_of", x.dtype, x.size, xp.ascontiguousarray(x), out, x.size)
        return out

    return call


# Dropout in one launch each way: what is dropped follows from a key and an element's number, and is never stored.
# Four neighbours take one draw of Philox.
DROPOUT = KernelSource(
    "dropping",
    PHILOX
    + """
extern "C" __global__ void drop(const T* x, T* out, const Index* key, Index n, double p, double scale) {
    A least = A(p), kept = A(scale);
    FOR_EACH(group, (n + 3) / 4) {
        Philox drawn(key, group);
        for (Index i = 0, e = 4 * group; i < 4 && e < n; i++, e++) {
            out[e] = T(A(x[e]) * (drawn.uniform(i) >= least ? kept : A(0)));
        }
    }
}
""",
)


def drop(xp: Any, x: Array, key: Array, p: float, shape: tuple[int, ...], order: tuple[int, ...]) -> Array:
    """x where its number is kept, scaled; elsewhere 0. shape: of what is drawn, with ones for x's last axes.

    key: (2,) of int64 in device memory; order: the axes in the order in which elements are numbered
    """
    if shape != x.shape:  # whole channels
        axes = tuple(range(len(shape)))
        kept = drop(xp, xp.ones(shape, wide(x.dtype)), key, p, shape, axes)
        return as_format(xp, (x * kept).astype(x.dtype, copy=False), prefers_channels_last(x))
    turned = x.transpose(order)
    source = xp.ascontiguousarray(turned).reshape(turned.shape)  # of no axes it makes one
    out = xp.ndarray(turned.shape, x.dtype)
    scale = 1 / (1 - p) if p < 1 else 0.0
    DROPOUT.over(xp, "drop", x.dtype, -(-x.size // 4), source, out, key, x.size, float(p), scale)
    return out.transpose(inverse(order))


def dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    key, order = dropout_seed(xp, generator), order_of(x)
    return drop(xp, x, key, p, shape, order), (key, p, shape, order)


def dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (drop(xp, g, *residual),)


def drawn_masks(xp: Any, key: Array, p: float) -> Callable[[tuple[int, ...]], Array]:
    """As `attention.drawn_masks`. key: (2,) of int64 in device memory; each tile draws at an offset of its own."""
    offset = key.copy()

    def draw(shape: tuple[int, ...]) -> Array:
        offset[1:] += 1
        return drop(xp, xp.ones(shape, "float32"), offset, p, shape, tuple(range(len(shape)))) != 0

    return draw
