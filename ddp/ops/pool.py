"""Max pooling as a running maximum over shifted views: one pass an element of the kernel, and no unfolded copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import BITS, Array, Gradients, Needs, Op, Saved, select
from ddp.ops.windows import Walk, frame, samples


def _lowest(xp: Any, dtype: Any) -> Any:
    return -xp.inf if dtype.kind == "f" else xp.iinfo(dtype).min


# z = max of x under the window;  dx = g at the first element that equals it, at the last nan (as PyTorch has it)
def _max_pool2d(xp: Any, x: Array, walk: Walk) -> tuple[Array, Any]:
    framed = frame(xp, x, walk, _lowest(xp, x.dtype))
    seen = [framed[..., rows, columns] for rows, columns in walk.shifts()]
    top = xp.empty((*x.shape[:2], *walk.out), x.dtype)
    xp.maximum(seen[0], seen[min(1, len(seen) - 1)], out=top)
    for each in seen[2:]:
        xp.maximum(top, each, out=top)
    return top, walk


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    x, out = saved
    dx = xp.empty(x.shape, x.dtype)
    whole = walk.framed == walk.image
    scratch: tuple[Array, Array, Array] | None = None
    for tile in samples(xp, len(x), dx[:1].nbytes):
        n = tile.stop - tile.start
        if scratch is None:
            bits = BITS[g.dtype.itemsize]
            scratch = xp.empty(out[tile].shape, bits), xp.empty(out[tile].shape, bits), xp.empty(out[tile].shape, bool)
        rest, part, hit = scratch[0][:n], scratch[1][:n], scratch[2][:n]
        back = dx[tile] if whole else xp.empty((*dx[tile].shape[:2], *walk.framed), x.dtype)
        if not walk.even:
            back[...] = 0
        _hand_out(xp, g[tile], x[tile], out[tile], walk, back, rest, part, hit)
        if not whole:
            dx[tile] = back[..., walk.inside[0], walk.inside[1]]
    return (dx,)


# A GPU is not asked, which would wait for it: there the second pass always runs.
ANY_LEFT: dict[str, Callable[[Array], Any]] = {"numpy": lambda rest: rest.any(), "cupy": lambda rest: True}


def _hand_out(
    xp: Any, g: Array, x: Array, top: Array, walk: Walk, back: Array, rest: Array, part: Array, hit: Array
) -> None:
    # By the bits of g as integers, as `select` does it: `rest` is what has not gone anywhere yet.
    rest.view(g.dtype)[...] = g
    framed = frame(xp, x, walk, xp.nan)  # which equals nothing: a window of -inf must not find the frame
    for rows, columns in walk.shifts():
        part[...] = xp.equal(framed[..., rows, columns], top, out=hit)  # not in the product: it would convert in pieces
        xp.multiply(part, rest, out=part)
        xp.bitwise_xor(rest, part, out=rest)
        if walk.apart:
            back[..., rows, columns] = part.view(g.dtype)
        else:
            back[..., rows, columns] += part.view(g.dtype)
    if ANY_LEFT[xp.__name__](rest):  # windows whose maximum is nan
        framed = frame(xp, x, walk, 0)
        for rows, columns in reversed(list(walk.shifts())):
            part[...] = xp.isnan(framed[..., rows, columns], out=hit)
            xp.multiply(part, rest, out=part)
            xp.bitwise_xor(rest, part, out=rest)
            back[..., rows, columns] += part.view(g.dtype)


max_pool2d = Op("max_pool2d", _max_pool2d, _max_pool2d_backward, inputs=("x",), saves=("x", "out"))


# z = max of x under the window, and where in (H, W) it lies, as one number;  dx = g there
def _max_pool2d_with_indices(xp: Any, x: Array, walk: Walk) -> tuple[tuple[Array, Array], Any]:
    framed = frame(xp, x, walk, _lowest(xp, x.dtype))
    lines, across = (xp.arange(n) * s - p for n, s, p in zip(walk.out, walk.stride, walk.padding, strict=True))
    top = xp.full((*x.shape[:2], *walk.out), _lowest(xp, x.dtype), x.dtype)
    which = xp.full(top.shape, -1, "int32")  # the kernel's element; none yet
    index = xp.zeros(top.shape, "int64")
    for element, (rows, columns) in enumerate(walk.shifts()):
        value = framed[..., rows, columns]
        i, j = (k * d for k, d in zip(divmod(element, walk.kernel[1]), walk.dilation, strict=True))
        better = (value > top) | (which < 0)
        if x.dtype.kind == "f":
            better |= xp.isnan(value)
        p, q = (lines + i)[:, None], across + j
        better &= (p >= 0) & (p < walk.image[0]) & (q >= 0) & (q < walk.image[1])  # the frame is not the image
        top = xp.where(better, value, top)
        which = xp.where(better, element, which).astype("int32", copy=False)
        index = xp.where(better, p * walk.image[1] + q, index)
    return (top, index), (which, walk)


def _max_pool2d_with_indices_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (g, _), (which, walk) = g, residual
    back = xp.zeros((*g.shape[:2], *walk.framed), g.dtype)
    for element, (rows, columns) in enumerate(walk.shifts()):
        back[..., rows, columns] += select(xp, which == element, g)
    return (back[..., walk.inside[0], walk.inside[1]],)


max_pool2d_with_indices = Op(
    "max_pool2d_with_indices", _max_pool2d_with_indices, _max_pool2d_with_indices_backward, inputs=("x",)
)
