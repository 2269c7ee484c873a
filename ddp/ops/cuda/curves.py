"""The error function, its complement and its inverse by the functions that CUDA has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source

_KERNEL = """
extern "C" __global__ void NAME_of(const T* x, T* out, Index n) {
    FOR_EACH(i, n) out[i] = T(NAME(A(x[i])));
}
"""

SOURCE = Source("curves", "".join(_KERNEL.replace("NAME", name) for name in ("erf", "erfc", "erfinv")))


def function(name: str) -> Callable[[Any, Array], Array]:
    """erf, erfc or erfinv of floating arrays."""

    def call(xp: Any, x: Array) -> Array:
        out = xp.ndarray(x.shape, x.dtype)
        SOURCE.over(xp, f"{name}_of", x.dtype, x.size, xp.ascontiguousarray(x), out, x.size)
        return out

    return call
