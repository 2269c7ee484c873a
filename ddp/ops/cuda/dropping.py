"""Dropout of given random numbers: compared, scaled and kept for backward in one kernel."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source

SOURCE = Source(
    "dropping",
    """
extern "C" __global__ void drop(const T* x, const float* drawn, T* out, bool* keep, Index n, double p, double scale) {
    FOR_EACH(i, n) {
        bool kept = drawn[i] >= (float)p;
        keep[i] = kept;
        out[i] = T(A(x[i]) * A(kept) * A(scale));
    }
}

extern "C" __global__ void drop_backward(const T* g, const bool* keep, T* dx, Index n, double scale) {
    FOR_EACH(i, n) dx[i] = T(A(g[i]) * A(keep[i]) * A(scale));
}
""",
)


def drop(xp: Any, x: Array, drawn: Array, p: float, scale: float) -> tuple[Array, Array]:
    """x where drawn >= p, scaled, and which these are. drawn: float32 like x."""
    out, keep = xp.empty(x.shape, x.dtype), xp.empty(x.shape, bool)
    SOURCE.over(xp, "drop", x.dtype, x.size, xp.ascontiguousarray(x), drawn, out, keep, x.size, float(p), scale)
    return out, keep


def drop_backward(xp: Any, g: Array, keep: Array, scale: float) -> Array:
    """g where keep, scaled."""
    dx = xp.empty(g.shape, g.dtype)
    SOURCE.over(xp, "drop_backward", g.dtype, g.size, xp.ascontiguousarray(g), keep, dx, g.size, scale)
    return dx
