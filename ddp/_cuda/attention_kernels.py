"""Attention on a GPU: by cuDNN where it is there and takes the case, else products around one kernel.

cuDNN takes 16 bits without a mask (see `fused`). Else a portion of the heads has its scores multiplied by the GEMM door
from q and k as they lie, added up in float32; a kernel puts mask, softmax and dropout over each row, and gives the
probabilities in the dtype that the second product reads. Only one portion's scores exist at a time, and none are kept:
backward makes them again, from one number a query. What is dropped follows from where the generator stood and from the
element's number, so that nothing of it is stored either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from ddp._cuda import cudnn_attention
from ddp._cuda.matmul_kernels import product
from ddp._cuda.raw_kernel import PHILOX, KernelSource, wide
from ddp.ops.memory_formats import empty_in_order, order_of
from ddp.ops.op import Array, Gradients, Needs, Saved, fold

SCORES = 256 << 20  # bytes of scores that exist at a time

# Rows are counted within a portion: `heads` of the `all` heads of each of some samples. Mask, logs and what is dropped
# are those of all heads. A key after the query is not seen, though its score be infinite.
SOURCE = KernelSource(
    "attending",
    PHILOX
    + """
struct Where {
    Index first, all, heads, length, keys;  // first: the number of the portion's first head

    __device__ Index sample(Index row) const { return row / length / heads; }
    __device__ Index head(Index row) const { return row / length % heads; }
    __device__ Index query(Index row) const { return row % length; }
    __device__ Index whole(Index row) const {  // its number among the rows of all heads
        return (first + sample(row) * all + head(row)) * length + query(row);
    }
};

struct Mask {
    const bool* allowed;
    const A* added;
    Index start, sample, head, query, key;  // elements from one to the next, 0 where it is broadcast
    bool causal;

    __device__ A shown(A score, const Where& at, Index row, Index i) const {
        if (allowed || added) {
            Index k = start + at.sample(row) * sample + at.head(row) * head + at.query(row) * query + i * key;
            if (added) score += added[k];
            else if (!allowed[k]) score = LOWEST;
        }
        return causal && i > at.query(row) ? LOWEST : score;
    }
};

// Of each draw an element takes the first number.
struct Drop {
    const Index* key;  // seed and offset; null: nothing is dropped
    A p, stretch;

    __device__ A kept(Index element) const {
        if (!key) return 1;
        return Philox(key, element).uniform(0) >= p ? stretch : A(0);
    }
};

// probs become P with its dropped elements, and may lie where the scores do; logs: the logarithm of each row's sum.
extern "C" __global__ void attend(
    A* scores, T* probs, A* logs, const bool* allowed, const A* added, const Index* key, double p, double stretch,
    double scale, Index causal, Index start, Index mask_sample, Index mask_head, Index mask_query, Index mask_key,
    Index first, Index all, Index heads, Index length, Index keys, Index rows
) {
    Where at = {first, all, heads, length, keys};
    Mask mask = {allowed, added, start, mask_sample, mask_head, mask_query, mask_key, causal != 0};
    Drop drop = {key, A(p), A(stretch)};
    FOR_ROWS(row, rows) {
        A* score = scores + row * keys;
        Index seen = causal && at.query(row) + 1 < keys ? at.query(row) + 1 : keys;
        A top = LOWEST;
        for (Index i = threadIdx.x; i < seen; i += blockDim.x) {
            A v = mask.shown(score[i] * A(scale), at, row, i);
            score[i] = v;
            top = v > top || v != v ? v : top;
        }
        top = Block::max(top);
        if (top == LOWEST) top = 0;  // a query that may see no key
        A sum = 0;
        for (Index i = threadIdx.x; i < seen; i += blockDim.x) {
            score[i] = exp(score[i] - top);
            sum += score[i];
        }
        sum = Block::sum(sum);
        if (sum == 0) sum = 1;
        Index whole = at.whole(row);
        for (Index i = threadIdx.x; i < keys; i += blockDim.x) {
            probs[row * keys + i] = T(i < seen ? score[i] / sum * drop.kept(whole * keys + i) : A(0));
        }
        if (threadIdx.x == 0) logs[whole] = log(sum) + top;
    }
}

// probs become P with its dropped elements, slopes the gradient of q @ k^T; they may lie where scores and dP do.
// dmask: the gradient of what was added, of this portion, or null.
extern "C" __global__ void attend_backward(
    const A* scores, const A* falls, T* probs, T* slopes, A* dmask, const A* logs, const A* less, const bool* allowed,
    const A* added, const Index* key, double p, double stretch, double scale, Index causal, Index start,
    Index mask_sample, Index mask_head, Index mask_query, Index mask_key, Index first, Index all, Index heads,
    Index length, Index keys, Index rows
) {
    Where at = {first, all, heads, length, keys};
    Mask mask = {allowed, added, start, mask_sample, mask_head, mask_query, mask_key, causal != 0};
    Drop drop = {key, A(p), A(stretch)};
    FOR_EACH(k, rows * keys) {
        Index row = k / keys, i = k % keys, whole = at.whole(row);
        A prob = exp(mask.shown(scores[k] * A(scale), at, row, i) - logs[whole]);
        A kept = drop.kept(whole * keys + i), slope = prob * (falls[k] * kept - less[whole]);
        if (dmask) dmask[k] = slope;
        slopes[k] = T(slope * A(scale));
        probs[k] = T(prob * kept);
    }
}

// Of each row: the product of g and z, which lie with these elements between samples, heads and queries.
extern "C" __global__ void row_dots(
    const T* g, const T* z, A* out, Index g_sample, Index g_head, Index g_query, Index z_sample, Index z_head,
    Index z_query, Index heads, Index length, Index rows, Index depth
) {
    FOR_ROWS(row, rows) {
        Index sample = row / length / heads, head = row / length % heads, query = row % length;
        const T* u = g + sample * g_sample + head * g_head + query * g_query;
        const T* v = z + sample * z_sample + head * z_head + query * z_query;
        A sum = 0;
        for (Index i = threadIdx.x; i < depth; i += blockDim.x) sum += A(u[i]) * A(v[i]);
        sum = Block::sum(sum);
        if (threadIdx.x == 0) out[row] = sum;
    }
}
""",
)


class _Work:
    """What forward and backward prepare alike: the common leading sizes, the mask, the portions of heads.

    Arrays have at least two leading axes here; the last two of them are cut into portions.
    """

    def __init__(
        self, xp: Any, q: Array, k: Array, v: Array, mask: Array | None, causal: bool, p: float, key: Any
    ) -> None:
        self.xp, self.causal, self.p, self.key = xp, causal, float(p), key if p else None
        self.dtype, self.kind = q.dtype, wide(q.dtype)
        self.extra = max(0, 4 - q.ndim)  # leading axes that are put before
        sizes = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
        lead = tuple(0 if 0 in each else max(each) for each in sizes)
        self.lead = ((1,) * self.extra + lead)[-max(len(lead), 2) :]
        self.given = lead
        self.length, self.keys = q.shape[-2], k.shape[-2]
        self.empty = 0 in (*self.lead, self.length, self.keys)
        self.allowed = self.added = None
        self.mask_strides: tuple[int, ...] = (0,) * (len(self.lead) + 2)
        if mask is not None:
            mask = self.deep(mask)
            if mask.dtype == bool:
                self.allowed = xp.ascontiguousarray(mask)
            else:
                self.added = xp.ascontiguousarray(mask, self.kind)
            steps, step = [], 1
            for n in reversed(mask.shape):
                steps.append(0 if n == 1 else step)
                step *= n
            self.mask_strides = tuple(reversed(steps))

    def deep(self, x: Array) -> Array:
        """x with at least two leading axes."""
        return x[(None,) * self.extra] if self.extra else x

    def at(self, x: Array, index: tuple[Any, ...]) -> Array:
        """What a portion meets of x, which broadcasts against all heads."""
        return x[
            tuple(
                i if n > 1 else (slice(None) if isinstance(i, slice) else 0)
                for n, i in zip(x.shape[:-2], index, strict=True)
            )
        ]

    def portions(self) -> Iterator[tuple[tuple[Any, ...], tuple[int, int]]]:
        """(index into the leading axes, how many samples and heads): those whose scores may exist together."""
        samples, heads = self.lead[-2:]
        most = max(1, SCORES // max(self.length * self.keys * self.kind.itemsize, 1))
        few = min(heads, most)
        step = max(1, most // heads) if few == heads else 1
        for outer in itertools.product(*map(range, self.lead[:-2])):
            for i in range(0, samples, step):
                for j in range(0, heads, few):
                    stop = min(i + step, samples), min(j + few, heads)
                    yield (*outer, slice(i, stop[0]), slice(j, stop[1])), (stop[0] - i, stop[1] - j)

    def options(self, index: tuple[Any, ...], counts: tuple[int, int], scale: float) -> tuple[Any, ...]:
        """The arguments that both kernels end with."""
        begins = [i.start if isinstance(i, slice) else i for i in index]
        start = sum(i * step for i, step in zip(begins, self.mask_strides, strict=False))
        first = 0
        for i, n in zip(begins, self.lead, strict=True):
            first = first * n + i
        stretch = 1 / (1 - self.p) if self.p < 1 else 1.0
        rows = counts[0] * counts[1] * self.length
        return (
            *(self.allowed, self.added, self.key, self.p, stretch, scale, self.causal, start, *self.mask_strides[-4:]),
            *(first, self.lead[-1], counts[1], self.length, self.keys, rows),
        )

    def room(self, counts: tuple[int, int], dtype: Any) -> Array:
        """Memory for the scores of a portion."""
        return self.xp.ndarray((*counts, self.length, self.keys), dtype)

    def narrow(self, scores: Array) -> Array:
        """Where what is made of `scores` goes: there, unless it has fewer bits."""
        return scores if self.dtype == self.kind else self.xp.ndarray(scores.shape, self.dtype)

    def result(self, like: Array, dtype: Any = None) -> Array:
        """An array (*lead, n, d) for all heads in the memory order of `like`, so that what was a view of (B, T, H, D)
        comes back as one."""
        return self.ordered(like, like.shape[-1], dtype)

    def ordered(self, like: Array, last: int, dtype: Any = None) -> Array:
        """As `result`, with `last` elements a row."""
        order = order_of(like) if like.shape[:-2] == self.lead and like.strides[-1] == like.itemsize else None
        shape = (*self.lead, like.shape[-2], last)
        dtype = self.dtype if dtype is None else dtype
        if order is None or order[-1] != len(shape) - 1:
            return self.xp.ndarray(shape, dtype)
        return empty_in_order(self.xp, shape, dtype, order)

    def back(self, d: Array | None, like: Array) -> Array | None:
        """A gradient for all heads as that of `like`, added up along which it was broadcast."""
        if d is None:
            return None
        d = d[(0,) * self.extra] if self.extra else d
        return fold(d, like.shape).astype(self.dtype, copy=False)


def attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: Any
) -> tuple[Array, Any]:
    """As `attention._attention`; seed: (2,) of int64 on the device, read where p is not 0."""
    if mask is None:
        done = cudnn_attention.cudnn_forward(xp, q, k, v, scale, causal, p, seed)
        if done is not None:
            return done
    work = _Work(xp, q, k, v, mask, causal, p, seed)
    deep = [work.deep(x) for x in (q, k, v)]
    out = work.ordered(deep[0], v.shape[-1])
    logs = xp.zeros((*work.lead, work.length), work.kind)
    if work.empty:
        out.fill(0)
    else:
        for index, counts in work.portions():
            queries, keys, values = (work.at(x, index) for x in deep)
            scores = work.room(counts, work.kind)
            product(xp, queries, keys.swapaxes(-1, -2), scores)
            probs = work.narrow(scores)
            options = work.options(index, counts, float(scale))
            SOURCE.rows(xp, "attend", work.dtype, options[-1], scores, probs, logs, *options)
            product(xp, probs, values, out[index])
    out = out[(0,) * work.extra] if work.extra else out
    return out, (logs, float(scale), causal, p, work.key, None)


def _lying(xp: Any, x: Array) -> tuple[Array, tuple[int, ...]]:
    """x's memory as an array in one piece, and the elements from one sample, head and row to the next."""
    order = order_of(x)
    turned = x.transpose(order)
    if not turned.flags.c_contiguous or order[-1] != x.ndim - 1:
        x = turned = xp.ascontiguousarray(x)
    return turned, tuple(n // x.itemsize for n in x.strides[-4:-1])


def _dots(xp: Any, work: _Work, g: Array, out: Array) -> Array:
    """(*lead, L): the products of rows of g and of the result."""
    shape = (math.prod(work.lead[:-1]), work.lead[-1], *out.shape[-2:])
    (one, one_steps), (two, two_steps) = (
        _lying(xp, x if x.ndim == 4 else x.reshape(shape)) for x in (work.deep(g), work.deep(out))
    )
    less = xp.ndarray((*work.lead, work.length), work.kind)
    numbers = *one_steps, *two_steps, work.lead[-1], work.length, less.size, out.shape[-1]
    SOURCE.rows(xp, "row_dots", work.dtype, less.size, one, two, less, *numbers)
    return less


def attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    """As `attention._attention_backward`."""
    q, k, v, mask, out = saved
    logs, scale, causal, p, key, by_dnn = residual
    if by_dnn is not None:
        done = cudnn_attention.cudnn_backward(xp, g, needs, (q, k, v, out), residual)
        if done is not None:
            return [*done, None]
    work = _Work(xp, q, k, v, mask, causal, p, key)
    deep = [work.deep(x) for x in (q, k, v)]
    # What was broadcast is added up over heads: in the dtype that is computed in.
    found = [
        work.result(x, work.dtype if x.shape[:-2] == work.lead else work.kind) if need else None
        for x, need in zip(deep, needs, strict=False)
    ]
    dq, dk, dv = found
    dmask = xp.zeros((*work.lead, work.length, work.keys), work.kind) if needs[3] else None
    if work.empty:
        for d in found:
            if d is not None:
                d.fill(0)
    else:
        logs = logs.reshape((*work.lead, work.length))
        less = _dots(xp, work, g, out)
        slopes_in = work.deep(g)
        for index, counts in work.portions():
            queries, keys, values = (work.at(x, index) for x in deep)
            gs = slopes_in[index]
            scores, falls = work.room(counts, work.kind), work.room(counts, work.kind)
            product(xp, queries, keys.swapaxes(-1, -2), scores)
            product(xp, gs, values.swapaxes(-1, -2), falls)
            probs, slopes = work.narrow(scores), work.narrow(falls)
            added = None if dmask is None else work.room(counts, work.kind)
            options = work.options(index, counts, scale)
            arrays = scores, falls, probs, slopes, added, logs, less
            SOURCE.over(xp, "attend_backward", work.dtype, scores.size, *arrays, *options)
            if dq is not None:
                product(xp, slopes, keys, dq[index])
            if dk is not None:
                product(xp, slopes.swapaxes(-1, -2), queries, dk[index])
            if dv is not None:
                product(xp, probs.swapaxes(-1, -2), gs, dv[index])
            if dmask is not None:
                dmask[index] = added
    if dmask is not None:
        assert mask is not None
        dmask = work.back(dmask, mask)
        assert dmask is not None
        dmask = dmask.astype(mask.dtype, copy=False)
    return [*[work.back(d, x) for d, x in zip(found, (q, k, v), strict=True)], dmask]
