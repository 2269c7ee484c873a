"""Elementwise CUDA kernels: erf, erfc, erfinv, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._cuda.raw_kernel import PHILOX, KernelSource
from ddp.ops.arrays import Array, compute_dtype
from ddp.ops.attention import dropout_seed
from ddp.ops.memory_formats import as_format, inverse, order_of, prefers_channels_last
from ddp.ops.op import Gradients, Needs, Saved

# The error function, its complement and its inverse, by CUDA's functions. CuPy's erf and erfc compute float16 in
# float64, and importing `cupyx.scipy.special` takes a second.

_KERNEL = """
extern "C" __global__ void NAME_of(const T* x, T* out, Index n) {
    FOR_EACH(i, n) out[i] = T(NAME(A(x[i])));
}
"""

ERROR_FUNCTIONS = KernelSource("curves", "".join(_KERNEL.replace("NAME", name) for name in ("erf", "erfc", "erfinv")))


def error_function(name: str) -> Callable[[Any, Array], Array]:
    """Returns a function that computes erf, erfc or erfinv of a floating array. name: one of these"""

    def call(xp: Any, x: Array) -> Array:
        out = xp.ndarray(x.shape, x.dtype)
        ERROR_FUNCTIONS.launch(xp, f"{name}_of", x.dtype, x.size, xp.ascontiguousarray(x), out, x.size)
        return out

    return call


# Dropout. Its backward is the same kernel with x = g. Whether an element is dropped is a function of the key and the
# element's number, so no mask is stored. One draw of Philox gives the numbers of four elements.
DROPOUT = KernelSource(
    "dropping",
    PHILOX
    + """
extern "C" __global__ void drop(const T* x, T* out, const Index* key, Index n, double p, double scale) {
    A threshold = A(p), factor = A(scale);
    FOR_EACH(group, (n + 3) / 4) {
        Philox numbers(key, group);
        for (Index i = 0, e = 4 * group; i < 4 && e < n; i++, e++) {
            out[e] = T(A(x[e]) * (numbers.uniform(i) >= threshold ? factor : A(0)));
        }
    }
}
""",
)


def drop(xp: Any, x: Array, key: Array, p: float, shape: tuple[int, ...], order: tuple[int, ...]) -> Array:
    """Sets elements of x to 0 with probability p, and divides the others by 1 - p.

    key: (2,) int64 in device memory
    shape: of the mask: x.shape, or with last axes of size 1 to drop whole channels
    order: the axes in the order in which elements are numbered
    """
    if shape != x.shape:
        factors = drop(xp, xp.ones(shape, compute_dtype(x.dtype)), key, p, shape, order)
        return as_format(xp, (x * factors).astype(x.dtype, copy=False), prefers_channels_last(x))
    transposed = x.transpose(order)
    # Reshaped, because ascontiguousarray gives a 0-d array one axis.
    source = xp.ascontiguousarray(transposed).reshape(transposed.shape)
    out = xp.ndarray(transposed.shape, x.dtype)
    scale = 1 / (1 - p) if p < 1 else 0.0
    DROPOUT.launch(xp, "drop", x.dtype, -(-x.size // 4), source, out, key, x.size, float(p), scale)
    return out.transpose(inverse(order))


def dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    key = dropout_seed(xp, generator)
    order = order_of(x) if shape == x.shape else tuple(range(len(shape)))
    return drop(xp, x, key, p, shape, order), (key, p, shape, order)


def dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (drop(xp, g, *residual),)


def kept_elements(xp: Any, residual: Any) -> tuple[Array, float]:
    """Converts the residual to the reference's residual: which elements are kept (bool), and their factor."""
    key, p, shape, order = residual
    kept = drop(xp, xp.ones(shape, "float32"), key, p, shape, order) != 0
    return kept, 1 / (1 - p) if p < 1 else 0.0


def drawn_masks(xp: Any, key: Array, p: float) -> Callable[[tuple[int, ...]], Array]:
    """See `attention.drawn_masks`. key: (2,) int64 in device memory. Every call of the result uses another offset."""
    offset = key.copy()

    def draw(shape: tuple[int, ...]) -> Array:
        offset[1:] += 1
        return drop(xp, xp.ones(shape, "float32"), offset, p, shape, tuple(range(len(shape)))) != 0

    return draw
