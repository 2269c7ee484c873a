"""Scaled dot-product attention over a few heads at a time.

Forward keeps the result and one number per query: log sum e^score. Backward computes the probabilities again from this
number. Source: Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, compute_dtype, unbroadcast
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.products import product

DEVICE_SCORE_BYTES = 256 << 20

Heads = tuple[Any, ...]  # an index of the leading axes: only slices, or numbers and then one slice


@array_function
def score_bytes(xp: Any) -> int:
    """How many bytes of scores to compute at a time; a head with more is not split. On the CPU they fit in cache.

    A GPU computes more of them at a time, so that there are few launches.
    """
    return 512 << 10


@array_function
def dropout_seed(xp: Any, rng: Any) -> Any:
    """Draws the seed of the dropout masks from the generator `rng`."""
    return int(rng.integers(1 << 62))


@array_function
def drawn_masks(xp: Any, seed: Any, p: float) -> Callable[[Ints], Array]:
    """Returns a function shape -> bool array. Each call draws which probabilities of the next heads are kept.

    With the same seed, backward draws the same masks as forward, because both take the heads in the same order.
    """
    generator = xp.random.default_rng(seed)
    return lambda shape: generator.random(shape, dtype=xp.float32) >= p


class _Attention:
    """What forward and backward share: the broadcast inputs, the groups of heads, and the scores."""

    def __init__(self, xp: Any, inputs: Saved, scale: float, causal: bool) -> None:
        q, k, v, mask = inputs
        self.xp = xp
        self.scale = scale
        self.dtype = compute_dtype(q.dtype)
        sizes = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
        self.lead = tuple(0 if 0 in lengths else max(lengths) for lengths in sizes)
        self.q, self.k, self.v = (self.broadcast(x.astype(self.dtype, copy=False)) for x in (q, k, v))
        self.mask = None if mask is None else self.broadcast(mask)
        self.later = ~xp.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else None
        self.bytes_of_head = q.shape[-2] * k.shape[-2] * self.dtype.itemsize

    def broadcast(self, x: Array) -> Array:
        """Broadcasts x over all leading axes."""
        return self.xp.broadcast_to(x, (*self.lead, *x.shape[-2:]))

    def empty(self, like: Array, last: int) -> Array:
        """An uninitialized array (*lead, rows of `like`, last), in the memory order of `like`.

        If `like` has other leading axes than `lead`, the array is C-contiguous.
        """
        if like.shape[:-2] != self.lead:
            return self.xp.empty((*self.lead, like.shape[-2], last), self.dtype)
        return self.xp.empty_like(like, self.dtype, shape=(*like.shape[:-1], last))

    def heads(self) -> Iterator[Heads]:
        """Yields indices of groups of heads: all heads, if `score_bytes` has room for them.

        Otherwise, a group has heads along the last leading axis only: as many as there is room for, at least one.
        """
        limit = score_bytes(self.xp)
        if math.prod(self.lead) * self.bytes_of_head <= limit:
            yield (slice(None),) * len(self.lead)
            return
        step = max(1, limit // max(self.bytes_of_head, 1))
        for outer in itertools.product(*map(range, self.lead[:-1])):
            for start in range(0, self.lead[-1], step):
                yield (*outer, slice(start, start + step))

    def scores(self, heads: Heads) -> Array:
        """scale*q@k^T + mask: (heads, L, S); -inf where a bool mask is False or `causal` hides a later key."""
        xp = self.xp
        scores = product(xp, self.q[heads] * self.scale, self.k[heads].swapaxes(-1, -2))
        if self.mask is not None and self.mask.dtype == bool:
            xp.copyto(scores, -xp.inf, where=~self.mask[heads])
        elif self.mask is not None:
            scores += self.mask[heads]
        if self.later is not None:
            xp.copyto(scores, -xp.inf, where=self.later)
        return scores


# P = softmax(scale*q@k^T + mask), z = (P*d)@v, d = keep/(1-p) with dropout, else 1;
# dv = (P*d)^T@g, dP = (g@v^T)*d, dS = P*(dP - sum_e g*z), dq = scale*dS@k, dk = scale*dS^T@q, dmask = dS
def _attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: int
) -> ForwardResult:
    """q: (..., L, D), k: (..., S, D), v: (..., S, E), mask: (..., L, S), bool or floating; leading axes broadcast."""
    work = _Attention(xp, (q, k, v, mask), scale, causal)
    out = work.empty(q, v.shape[-1])
    sums = xp.zeros(out.shape[:-1], work.dtype)
    if not k.shape[-2]:
        out[...] = 0
        return out.astype(q.dtype, copy=False), (sums, scale, causal, p, seed)
    keep = drawn_masks(xp, seed, p) if p else None
    for heads in work.heads():
        scores = work.scores(heads)
        top = scores.max(-1, keepdims=True)
        xp.copyto(top, 0, where=top == -xp.inf)  # a query attends to no key: -inf - -inf would be nan
        scores -= top
        xp.exp(scores, out=scores)
        added = scores.sum(-1, keepdims=True)
        added += added == 0  # for a query that attends to no key, the result is 0/1
        sums[heads] = (xp.log(added) + top)[..., 0]
        if keep is not None:
            scores *= keep(scores.shape)
            added *= 1 - p if p < 1 else 1
        out[heads] = product(xp, scores, work.v[heads]) / added
    return out.astype(q.dtype, copy=False), (sums, scale, causal, p, seed)


def _attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    *inputs, out = saved
    q, k, v, mask = inputs
    sums, scale, causal, p, seed = residual
    work = _Attention(xp, inputs, scale, causal)
    g = g.astype(work.dtype, copy=False)
    out = out.astype(work.dtype, copy=False)
    dq, dk, dv = (work.empty(x, x.shape[-1]) if need else None for x, need in zip((q, k, v), needs[:3], strict=True))
    dmask = xp.zeros(mask.shape, work.dtype) if needs[3] else None
    keep = drawn_masks(xp, seed, p) if p else None
    for heads in work.heads() if k.shape[-2] else ():
        probabilities = work.scores(heads)
        probabilities -= sums[heads][..., None]
        xp.exp(probabilities, out=probabilities)
        dscores = product(xp, g[heads], work.v[heads].swapaxes(-1, -2))
        kept: Any = None
        if keep is not None:
            kept = keep(probabilities.shape) * work.dtype.type(1 / (1 - p) if p < 1 else 1)
            dscores *= kept
        dscores -= (g[heads] * out[heads]).sum(-1, keepdims=True)
        dscores *= probabilities
        if dq is not None:
            dq[heads] = product(xp, dscores, work.k[heads]) * scale
        if dk is not None:
            dk[heads] = product(xp, dscores.swapaxes(-1, -2), work.q[heads]) * scale
        if dv is not None:
            dv[heads] = product(
                xp, (probabilities if kept is None else probabilities * kept).swapaxes(-1, -2), g[heads]
            )
        if dmask is not None:
            index = list(heads)
            for axis, n in enumerate(mask.shape[: len(heads)]):
                if n <= 1:  # broadcast: every head adds to the same part
                    index[axis] = slice(None) if isinstance(index[axis], slice) else 0
            part = dmask[tuple(index)]
            part += unbroadcast(dscores, part.shape)
    if not k.shape[-2] and dq is not None:
        dq[...] = 0
    summed = [None if d is None else unbroadcast(d, x.shape) for d, x in zip((dq, dk, dv), (q, k, v), strict=True)]
    return [None if d is None else d.astype(q.dtype, copy=False) for d in (*summed, dmask)]


attention = Op(
    "scaled_dot_product_attention",
    _attention,
    _attention_backward,
    inputs=("q", "k", "v", "mask"),
    saves=("q", "k", "v", "mask", "out"),
    derived=True,
)
