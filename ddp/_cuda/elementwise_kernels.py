"""Elementwise CUDA kernels: the error function and its kin, and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp._cuda.raw_kernel import PACKS, PHILOX, KernelSource
from ddp.ops.attention import dropout_seed
from ddp.ops.memory_formats import order_of
from ddp.ops.op import Array, Gradients, Needs, Saved

# The error function, its complement and its inverse by the functions that CUDA has.

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

# inner: how many neighbours share a draw, `period` of them in turn: element e has the number e / inner * period +
# e % period; or 0: each element has its own, and four neighbours take one draw of Philox.
DROPOUT = KernelSource(
    "dropping",
    PACKS
    + PHILOX
    + """
// What four neighbours from element `first` on are multiplied by.
template <class I> __device__ void factors(
    const Index* key, Index first, I inner, I period, A p, A scale, A (&factor)[4]
) {
    if (!inner) {
        Philox drawn(key, first / 4);
        for (int i = 0; i < 4; i++) factor[i] = drawn.uniform(i) >= p ? scale : A(0);
        return;
    }
    I last = 0;
    A found = 0;
    for (int i = 0; i < 4; i++) {
        I e = (I)first + i, number = e / inner * period + (period > 1 ? e % period : 0);
        if (i == 0 || number != last) found = Philox(key, number).uniform(0) >= p ? scale : A(0);
        factor[i] = found;
        last = number;
    }
}

extern "C" __global__ void drop(
    const T* x, T* out, const Index* key, Index n, Index inner, Index period, double p, double scale
) {
    bool aligned = fits<T, 4>(x) && fits<T, 4>(out), small = n <= 0xfffffff0;
    FOR_EACH(group, (n + 3) / 4) {
        Index first = 4 * group;
        A factor[4];
        if (small) factors<unsigned>(key, first, (unsigned)inner, (unsigned)period, A(p), A(scale), factor);
        else factors<Index>(key, first, inner, period, A(p), A(scale), factor);
        if (aligned && first + 4 <= n) {
            Pack<T, 4> t = *(const Pack<T, 4>*)(x + first);
            for (int i = 0; i < 4; i++) t.at[i] = T(A(t.at[i]) * factor[i]);
            *(Pack<T, 4>*)(out + first) = t;
        } else {
            for (int i = 0; i < 4 && first + i < n; i++) out[first + i] = T(A(x[first + i]) * factor[i]);
        }
    }
}
""",
)

ElementOrder = tuple[int, ...]


def element_order(x: Array, shape: tuple[int, ...]) -> ElementOrder:
    """The axes of x in the order in which its elements are numbered: that of memory, if it can be."""
    axes = tuple(range(x.ndim))
    if x.flags.c_contiguous:
        return axes
    found = order_of(x)
    # What is shared is numbered as images lie: with the axes that share one draw side by side.
    if (shape == x.shape or (found == (0, 2, 3, 1) and shape[2:] == (1, 1))) and x.transpose(found).flags.c_contiguous:
        return found
    return axes


def drop(xp: Any, x: Array, key: Array, p: float, shape: tuple[int, ...], order: ElementOrder) -> Array:
    """x where its number is kept, scaled; elsewhere 0. shape: of what is drawn, with ones for x's last axes.

    key: (2,) of int64 in device memory
    """
    turned = x.transpose(order)
    given = xp.ascontiguousarray(turned).reshape(turned.shape)  # of no axes it makes one
    out = xp.ndarray(turned.shape, x.dtype)
    inner = period = 0
    if shape != x.shape and x.size:
        inner, period = x.size // math.prod(shape), 1
        if order == (0, 2, 3, 1):
            period = x.shape[1]
            inner *= period
    scale = 1 / (1 - p) if p < 1 else 0.0
    numbers = x.size, inner, period, float(p), scale
    DROPOUT.over(xp, "drop", x.dtype, -(-x.size // 4), given, out, key, *numbers)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return out.transpose(back)


def dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    key, order = dropout_seed(xp, generator), element_order(x, shape)
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
