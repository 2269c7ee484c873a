"""Tiles: a chain of elementwise steps over a large array costs a trip to memory a step, over a tile only to the cache.

A kernel is a function of tiles that writes into those it is given. On a GPU one tile is the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp.ops._op import BITS, Array

TILE = 128 * 1024  # bytes of each array: large against the cost of a call, small enough for four in a level 2 cache

Kernel = Callable[..., None]


def tiled(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int = 0, **parameters: Any) -> None:
    """kernel(xp, *tiles, *scratch tiles) over `arrays` of one shape; None stays None.

    Arrays that are written to are C-contiguous. Small ones are one tile, in their own shape.
    """
    LOOPS[xp.__name__](xp, kernel, arrays, scratch, parameters)


def _whole(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int, parameters: Any) -> None:
    kernel(xp, *arrays, *[xp.empty_like(arrays[0]) for _ in range(scratch)], **parameters)


def _by_tiles(xp: Any, kernel: Kernel, arrays: Sequence[Array | None], scratch: int, parameters: Any) -> None:
    first = arrays[0]
    assert first is not None
    size = first.size
    step = TILE // first.itemsize
    if size <= step:
        _whole(xp, kernel, arrays, scratch, parameters)
        return
    flat = [None if each is None else xp.ascontiguousarray(each).reshape(-1) for each in arrays]
    extra = [xp.empty(step, first.dtype) for _ in range(scratch)]
    for start in range(0, size, step):
        end = start + step
        if end > size:
            extra = [each[: size - start] for each in extra]
        kernel(xp, *[None if each is None else each[start:end] for each in flat], *extra, **parameters)


LOOPS: dict[str, Callable[..., None]] = {"numpy": _by_tiles, "cupy": _whole}
NARROW = 2  # bytes of float16, whose steps are taken in float32: NumPy's are slow, and each would be rounded


def curve(xp: Any, kernel: Kernel, x: Array, slope: bool, scratch: int, **parameters: Any) -> tuple[Array, Any]:
    """z = f(x) and with `slope` f'(x), else None, by kernel(xp, x, z, f'(x) or None, *scratch).

    Where both share their costly part, f'(x) is kept instead of x: as much memory, and backward is one product.
    """
    if x.dtype.itemsize == NARROW:
        out, d = curve(xp, kernel, x.astype("float32"), slope, scratch, **parameters)
        return out.astype(x.dtype), d.astype(x.dtype) if slope else None
    out = xp.empty(x.shape, x.dtype)
    d = xp.empty(x.shape, x.dtype) if slope else None
    tiled(xp, kernel, (x, out, d), scratch, **parameters)
    return out, d


def product(xp: Any, kernel: Kernel, g: Array, saved: Sequence[Array], scratch: int = 0, **parameters: Any) -> Array:
    """dx by kernel(xp, g, *saved, dx, *scratch): a backward that takes several steps an element."""
    dx = xp.empty(g.shape, g.dtype)
    tiled(xp, kernel, (g, *saved, dx), scratch, **parameters)
    return dx


def _blend_by_bits(xp: Any, mask: Array, a: Array, b: Array, out: Array) -> None:
    # As `select` does it: a choice by integer arithmetic doesn't branch at every element.
    kind = BITS[a.dtype.itemsize]
    one, other = a.view(kind), b.view(kind)
    difference = xp.empty(out.shape, kind)
    xp.bitwise_xor(one, other, out=difference)
    xp.multiply(difference, mask, out=difference)
    xp.bitwise_xor(difference, other, out=out.view(kind))


def _blend_by_where(xp: Any, mask: Array, a: Array, b: Array, out: Array) -> None:
    out[...] = xp.where(mask, a, b)


BLENDS = {"numpy": _blend_by_bits, "cupy": _blend_by_where}


def blend(xp: Any, mask: Array, a: Array, b: Array, out: Array) -> None:
    """out = a where mask, else b: floating arrays of one dtype and size; `out` may be one of them."""
    BLENDS[xp.__name__](xp, mask, a, b, out)


def _keep_by_bits(xp: Any, mask: Array, a: Array, out: Array) -> None:
    kind = BITS[a.dtype.itemsize]
    xp.multiply(a.view(kind), mask, out=out.view(kind))


def _keep_by_where(xp: Any, mask: Array, a: Array, out: Array) -> None:
    out[...] = xp.where(mask, a, a.dtype.type(0))


KEEPS = {"numpy": _keep_by_bits, "cupy": _keep_by_where}


def keep(xp: Any, mask: Array, a: Array, out: Array) -> None:
    """out = a where mask, else 0: floating arrays of one dtype and size; `out` may be `a`."""
    KEEPS[xp.__name__](xp, mask, a, out)
