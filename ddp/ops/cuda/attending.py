"""Attention as products by cuBLAS around one kernel: mask, softmax and dropout of a row of scores, in place.

Heads go in portions, so that only so many scores exist at a time; backward makes them again, from one number a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Saved, fold
from ddp.ops.cuda._source import REAL, Source

SCORES = 256 << 20  # bytes of scores that exist at a time

# A mask of (mask_rows, mask_columns), either of which may be 1, for head h is number which[h]. A key after the query is
# not seen, though its score be infinite.
SOURCE = Source(
    "attending",
    """
struct Mask {
    const bool* allowed;
    const A* added;
    const Index* which;
    Index rows, columns;
    bool causal;

    __device__ A shown(A score, Index head, Index query, Index key) const {
        if (allowed || added) {
            Index at = (which[head] * rows + (rows > 1 ? query : 0)) * columns + (columns > 1 ? key : 0);
            if (added) score += added[at];
            else if (!allowed[at]) score = LOWEST;
        }
        return causal && key > query ? LOWEST : score;
    }
};

// scores become P with its dropped elements; logs the logarithm of the sum of each row.
extern "C" __global__ void attend(
    A* scores, A* logs, const bool* allowed, const A* added, const Index* which, Index mask_rows, Index mask_columns,
    Index causal, const float* drawn, double p, double stretch, Index rows, Index length, Index keys
) {
    Mask mask = {allowed, added, which, mask_rows, mask_columns, causal != 0};
    FOR_ROWS(row, rows) {
        A* score = scores + row * keys;
        Index head = row / length, query = row % length;
        A top = LOWEST;
        for (Index i = threadIdx.x; i < keys; i += blockDim.x) {
            A v = mask.shown(score[i], head, query, i);
            score[i] = v;
            top = v > top || v != v ? v : top;
        }
        top = Block::max(top);
        if (top == LOWEST) top = 0;  // a query that may see no key
        A sum = 0;
        for (Index i = threadIdx.x; i < keys; i += blockDim.x) {
            score[i] = exp(score[i] - top);
            sum += score[i];
        }
        sum = Block::sum(sum);
        if (sum == 0) sum = 1;
        for (Index i = threadIdx.x; i < keys; i += blockDim.x) {
            A kept = drawn ? (drawn[row * keys + i] >= (float)p ? A(stretch) : A(0)) : A(1);
            score[i] = score[i] / sum * kept;
        }
        if (threadIdx.x == 0) logs[row] = log(sum) + top;
    }
}

// scores become P with its dropped elements, slopes (dP) the gradient of the scores.
extern "C" __global__ void attend_backward(
    A* scores, A* slopes, const A* logs, const A* less, const bool* allowed, const A* added, const Index* which,
    Index mask_rows, Index mask_columns, Index causal, const float* drawn, double p, double stretch, Index rows,
    Index length, Index keys
) {
    Mask mask = {allowed, added, which, mask_rows, mask_columns, causal != 0};
    FOR_EACH(k, rows * keys) {
        Index row = k / keys, key = k % keys;
        A prob = exp(mask.shown(scores[k], row / length, row % length, key) - logs[row]);
        A kept = drawn ? (drawn[k] >= (float)p ? A(stretch) : A(0)) : A(1);
        slopes[k] = prob * (slopes[k] * kept - less[row]);
        scores[k] = prob * kept;
    }
}
""",
    REAL,
)


class _Work:
    """What forward and backward prepare alike: q, k, v as (heads, n, d), the mask, the portions of heads."""

    def __init__(
        self, xp: Any, q: Array, k: Array, v: Array, mask: Array | None, causal: bool, p: float, seed: int
    ) -> None:
        self.xp, self.causal, self.p, self.seed = xp, causal, p, seed
        self.kind = xp.dtype("float32") if q.dtype == "float16" else q.dtype
        sizes = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
        self.lead = tuple(0 if 0 in each else max(each) for each in sizes)
        self.heads, self.length, self.keys = math.prod(self.lead), q.shape[-2], k.shape[-2]
        self.stretch = 1 / (1 - p) if p < 1 else 1.0
        self.allowed = self.added = self.which = None
        self.mask_shape = (1, 1) if mask is None else mask.shape[-2:]
        if mask is not None:
            numbers = xp.arange(math.prod(mask.shape[:-2])).reshape(mask.shape[:-2])
            self.which = xp.ascontiguousarray(xp.broadcast_to(numbers, self.lead), "int64").reshape(-1)
            if mask.dtype == bool:
                self.allowed = xp.ascontiguousarray(mask)
            else:
                self.added = xp.ascontiguousarray(mask, self.kind)

    def laid(self, x: Array) -> Array:
        """x over all leading axes, as (heads, n, d)."""
        x = x.astype(self.kind, copy=False)
        return self.xp.broadcast_to(x, (*self.lead, *x.shape[-2:])).reshape(self.heads, *x.shape[-2:])

    def portions(self) -> Iterator[slice]:
        """Heads whose scores may exist together."""
        step = max(1, SCORES // max(self.length * self.keys * self.kind.itemsize, 1))
        return (slice(start, min(start + step, self.heads)) for start in range(0, self.heads, step))

    def random(self) -> Any:
        """The generator of what is dropped; backward draws the same numbers, in the same order."""
        return self.xp.random.default_rng(self.seed) if self.p else None

    def options(self, at: slice, random: Any) -> tuple[Any, ...]:
        """The arguments that both kernels end with."""
        count = at.stop - at.start
        drawn = None if random is None else random.random((count, self.length, self.keys), dtype=self.xp.float32)
        which = None if self.which is None else self.which[at]
        shape = (count * self.length, self.length, self.keys)
        return (
            *(self.allowed, self.added, which, *self.mask_shape, self.causal),
            *(drawn, float(self.p), self.stretch, *shape),
        )


def attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: int
) -> tuple[Array, Any]:
    """As `attention._attention`."""
    work = _Work(xp, q, k, v, mask, causal, p, seed)
    out = xp.zeros((work.heads, work.length, v.shape[-1]), work.kind)
    logs = xp.zeros((work.heads, work.length), work.kind)
    if work.heads and work.length and work.keys:
        queries, keys, values = work.laid(q) * work.kind.type(scale), work.laid(k), work.laid(v)
        random = work.random()
        for at in work.portions():
            scores = xp.ascontiguousarray(xp.matmul(queries[at], keys[at].swapaxes(1, 2)))
            options = work.options(at, random)
            SOURCE.rows(xp, "attend", work.kind, logs[at].size, scores, logs[at], *options)
            out[at] = xp.matmul(scores, values[at])
    return out.reshape(*work.lead, *out.shape[1:]).astype(q.dtype, copy=False), (logs, scale, causal, p, seed)


def attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """As `attention._attention_backward`."""
    q, k, v, mask, out = saved
    logs, scale, causal, p, seed = residual
    work = _Work(xp, q, k, v, mask, causal, p, seed)
    queries, keys, values, gs, outs = (work.laid(x) for x in (q, k, v, g, out))
    dq, dk, dv = (
        xp.zeros(x.shape, work.kind) if need else None for x, need in zip((queries, keys, values), needs, strict=False)
    )
    dmask = None
    if needs[3]:
        dmask = xp.zeros((work.heads, work.length, work.keys), work.kind)
    less = xp.einsum("hle,hle->hl", gs, outs)
    if work.heads and work.length and work.keys:
        scaled = queries * work.kind.type(scale)
        random = work.random()
        for at in work.portions():
            scores = xp.ascontiguousarray(xp.matmul(scaled[at], keys[at].swapaxes(1, 2)))
            slopes = xp.ascontiguousarray(xp.matmul(gs[at], values[at].swapaxes(1, 2)))
            arrays = scores, slopes, logs[at], less[at]
            SOURCE.over(xp, "attend_backward", work.kind, scores.size, *arrays, *work.options(at, random))
            if dq is not None:
                dq[at] = xp.matmul(slopes, keys[at])
            if dk is not None:
                dk[at] = xp.matmul(slopes.swapaxes(1, 2), scaled[at])
            if dv is not None:
                dv[at] = xp.matmul(scores.swapaxes(1, 2), gs[at])
            if dmask is not None:
                dmask[at] = slopes
    if dq is not None:
        dq *= work.kind.type(scale)
    if dmask is not None:
        assert mask is not None
        dmask = fold(dmask.reshape(*work.lead, work.length, work.keys), mask.shape).astype(q.dtype, copy=False)
    found = [
        None if d is None else fold(d.reshape(*work.lead, *d.shape[1:]), x.shape).astype(q.dtype, copy=False)
        for d, x in zip((dq, dk, dv), (q, k, v), strict=True)
    ]
    return [*found, dmask]
