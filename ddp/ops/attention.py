"""Scaled dot-product attention in tiles that stay in cache: of the L x S probabilities only a tile ever exists.

Forward keeps the result and one number a query, the logarithm of the sum of its exponentials; backward computes the
probabilities again from that, tile by tile. Source: Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddp.ops.op import Array, Gradients, Needs, Op, Saved, array_function, compute_dtype, fold
from ddp.ops.products import ones, product

# How attention is cut: into tiles of a few heads times a block of queries, against all keys that these may see.
#
# All keys at once, so that no running maximum is needed. A tile lies transposed, (heads, keys, queries): products are
# fastest with K on the left as it is in memory, and maxima and sums over the keys run down the rows.


# Bytes of one tile. On the CPU forward has one and backward two, and L2 is 1 MiB or more; a GPU wants few launches.
@array_function
def score_bytes(xp: Any) -> int:
    """Bytes of scores that exist at a time."""
    return 512 << 10


# A causal block of fewer queries would skip more of what lies above the diagonal, but its products would be small.
FEWEST = 64


At = tuple[Any, ...]  # an index into the leading axes: numbers, and a slice of heads last


class Grid(NamedTuple):
    """How (lead, L, S) is cut: `heads` of the last leading axis times `rows` queries a tile."""

    lead: tuple[int, ...]
    length: int
    keys: int
    causal: bool
    rows: int
    heads: int

    def groups(self) -> Iterator[At]:
        """The indices into the leading axes, each ending in a slice of the last one."""
        for outer in itertools.product(*map(range, self.lead[:-1])):
            for h in range(0, self.lead[-1], self.heads):
                yield (*outer, slice(h, h + self.heads))

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, how many keys these queries may see); the last first, because that one sees the most keys."""
        for start in reversed(range(0, self.length, self.rows)):
            stop = min(start + self.rows, self.length)
            yield start, stop, min(stop, self.keys) if self.causal else self.keys


def grid(lead: tuple[int, ...], length: int, keys: int, causal: bool, item: int, tile: int) -> Grid:
    """The cut for tiles of at most `tile` bytes at `item` bytes a number, but of at least 16 queries."""
    keys_bytes = max(keys, 1) * item
    rows = max(min(length, tile // keys_bytes), 16)
    if causal:
        rows = min(rows, max(FEWEST, -(-length // 8)))
    return Grid(lead, length, keys, causal, rows, max(1, min(lead[-1], tile // (rows * keys_bytes))))


class AttentionPlan:
    """What forward and backward prepare alike: wide inputs over all leading axes, the grid, the mask by tile."""

    def __init__(self, xp: Any, q: Array, k: Array, v: Array, mask: Array | None, causal: bool) -> None:
        self.xp = xp
        self.dtype = compute_dtype(q)
        sizes = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
        self.lead = tuple(0 if 0 in each else max(each) for each in sizes)
        # Tiles take their heads from one axis, and it is the longest.
        self.axis = max(range(len(self.lead)), key=self.lead.__getitem__)
        self.q, self.k, self.v = (self.laid(x) for x in (q, k, v))
        length, keys, item = q.shape[-2], k.shape[-2], self.dtype.itemsize
        self.grid = grid(self.q.shape[:-2], length, keys, causal, item, score_bytes(xp))
        self.empty = 0 in (*self.lead, length, keys)
        self.mask = None if mask is None else self._additive(mask)
        rows = self.grid.rows
        # The most that a score may be: keys after the query must not be seen though their scores be infinite.
        later = xp.tri(rows, k=-1, dtype=bool)
        self.most = xp.where(later, -xp.inf, xp.inf).astype(self.dtype) if causal else None

    def laid(self, x: Array) -> Array:
        """x: (..., n, d) over all leading axes, the one that tiles cut as the last of them."""
        x = x.astype(self.dtype, copy=False)
        if x.strides[-1] != x.itemsize:
            x = self.xp.ascontiguousarray(x)  # else the products would not go to the BLAS
        return self.xp.moveaxis(self.xp.broadcast_to(x, (*self.lead, *x.shape[-2:])), self.axis, -3)

    def result(self, like: Array, last: int) -> tuple[Array, Array]:
        """An array (*lead, n, last) in the memory order of `like`: (*lead, n, d), and a view of it as `laid` has it.

        What was a view of (N, L, H, D) comes back as one, and is joined to (N, L, H*D) without a copy.
        """
        xp, shape = self.xp, (*self.lead, like.shape[-2], last)
        plain = like.shape[:-2] != self.lead or 0 in like.strides or like.strides[-1] != like.itemsize
        out = xp.empty(shape, self.dtype) if plain else xp.empty_like(like, self.dtype, shape=shape)
        return out, xp.moveaxis(out, self.axis, -3)

    def memory(self, *sizes: int) -> Array:
        """Room for `sizes` numbers for each head of a tile."""
        return self.xp.empty(self.grid.heads * math.prod(sizes), self.dtype)

    def _additive(self, mask: Array) -> Array:
        # Transposed as tiles are; in memory too where heads share it.
        xp = self.xp
        hidden = mask.swapaxes(-1, -2)
        if mask.dtype == bool:
            hidden = xp.where(hidden, self.dtype.type(0), self.dtype.type(-xp.inf))
        else:
            hidden = hidden.astype(self.dtype, copy=False)
            if mask.shape[:-2] != self.lead:
                hidden = xp.ascontiguousarray(hidden)
        return xp.moveaxis(hidden, self.axis, -3)

    def hide(self, scores: Array, at: At, start: int, stop: int, seen: int) -> None:
        """Adds the mask to the scores of a tile, and puts -inf where a key comes after the query."""
        if self.mask is not None:
            scores += self.mask[met(self.mask.shape, at, start, stop, seen)]
        if self.most is not None and start < seen:
            diagonal = scores[:, start:]
            self.xp.minimum(diagonal, self.most[: seen - start, : stop - start], out=diagonal)


def met(shape: tuple[int, ...], at: At, start: int, stop: int, seen: int) -> tuple[Any, ...]:
    """The index of what a tile meets of a mask of `shape`, (..., keys, queries), that broadcasts."""
    wanted = (*at, slice(0, seen), slice(start, stop))
    return tuple(
        i if n > 1 else (slice(None) if isinstance(i, slice) else 0) for n, i in zip(shape, wanted, strict=True)
    )


# Scaled dot-product attention in tiles that stay in cache: of the L x S probabilities only a tile ever exists.
#
# Forward keeps the result and one number a query, the logarithm of the sum of its exponentials; backward computes the
# probabilities again from that, tile by tile. Source: Dao et al. 2022, arXiv:2205.14135.


def dots(x: Array, y: Array) -> Array:
    """The sums of x * y over the last axis."""
    result: Array = (x * y).sum(axis=-1)
    return result


@array_function
def scores_are_bounded(xp: Any, q: Array, k: Array, scale: float) -> bool:
    """Whether no score is large; a device says False, since the host would have to wait for the answer."""
    # |q.k| <= |q||k|. The exponentials of scores within 40 neither overflow nor vanish, so the maximum, which costs two
    # passes over the tile, need not be taken off. A nan is not below 40.
    return math.sqrt(float(dots(q, q).max()) * float(dots(k, k).max())) * abs(scale) < 40


def _cut(memory: Array, *shape: int) -> Array:
    return memory[: math.prod(shape)].reshape(shape)


# P = softmax(scale*q@k^T + mask), z = P@v, where dropout puts P*keep/(1-p) in place of P;
# dv = P^T@g, dP = g@v^T, dS = P*(dP - sum_e g*z), dq = scale*dS@k, dk = scale*dS^T@q, dmask = dS
def _attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: int
) -> tuple[Array, Any]:
    """q: (..., L, D), k: (..., S, D), v: (..., S, E), mask: (..., L, S), bool or floating; leading axes broadcast."""
    work = AttentionPlan(xp, q, k, v, mask, causal)
    out, outs = work.result(q, v.shape[-1])
    sums = xp.zeros(outs.shape[:-1], work.dtype)
    if work.empty:
        out[...] = 0
        return out.astype(q.dtype, copy=False), (sums, scale, causal, p, seed)
    cuts, depth = work.grid, q.shape[-1]
    tile, columns, room = (work.memory(cuts.rows, n) for n in (cuts.keys, depth, v.shape[-1]))
    certain = mask is None or mask.dtype == bool
    keep = drawn_masks(xp, seed, p) if p else None
    for at in cuts.groups():
        # Copies, where heads lie inside one another: rows 2 KiB apart share few cache lines.
        queries, keys, values = work.q[at], xp.ascontiguousarray(work.k[at]), xp.ascontiguousarray(work.v[at])
        for start, stop, seen in cuts.blocks():
            block = queries[:, start:stop]
            q_t = _cut(columns, len(block), depth, stop - start)
            scores = _cut(tile, len(block), seen, stop - start)
            xp.multiply(block.swapaxes(1, 2), scale, out=q_t)
            product(xp, keys[:, :seen], q_t, scores)
            work.hide(scores, at, start, stop, seen)
            top = None
            if not (certain and scores_are_bounded(xp, block, keys, scale)):
                top = scores.max(1, keepdims=True)
                xp.copyto(top, 0, where=top == -xp.inf)  # a query that may see no key
                scores -= top
            xp.exp(scores, out=scores)
            added = product(xp, ones(xp, seen, work.dtype), scores)
            added += added == 0  # no key seen: the result is 0/1
            kept = sums[at][:, start:stop]
            xp.log(added, out=kept)
            if top is not None:
                kept += top[:, 0]
            if keep is not None:
                scores *= keep(scores.shape)
                added *= 1 - p if p < 1 else 1
            z = outs[at][:, start:stop]
            joined = _cut(room, *z.shape)
            product(xp, scores.swapaxes(1, 2), values[:, :seen], joined)
            xp.divide(joined, added[..., None], out=z)
    return out.astype(q.dtype, copy=False), (sums, scale, causal, p, seed)


@array_function
def drawn_masks(xp: Any, seed: Any, p: float) -> Callable[[tuple[int, ...]], Array]:
    """A function that draws which probabilities of the next tile are kept: bool, of the shape that it is given.

    The same seed gives backward the same masks, because it goes through the same tiles.
    """
    generator = xp.random.default_rng(seed)
    return lambda shape: generator.random(shape, dtype=xp.float32) >= p


def _attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    q, k, v, mask, out = saved
    sums, scale, causal, p, seed = residual
    work = AttentionPlan(xp, q, k, v, mask, causal)
    results = [work.result(x, x.shape[-1]) if need else (None, None) for x, need in zip((q, k, v), needs, strict=False)]
    (dq, dqs), (dk, dks), (dv, dvs) = results
    dmask = xp.zeros(mask.shape, work.dtype) if needs[3] else None
    if work.empty:
        for d in (dq, dk, dv):
            if d is not None:
                d[...] = 0
    else:
        dmasks = None if dmask is None else xp.moveaxis(dmask.swapaxes(-1, -2), work.axis, -3)
        _tiles_backward(work, work.laid(g), work.laid(out), sums, scale, p, seed, dqs, dks, dvs, dmasks)
    found = [None if d is None else fold(d, x.shape) for d, x in zip((dq, dk, dv), (q, k, v), strict=True)]
    return [None if d is None else d.astype(q.dtype, copy=False) for d in (*found, dmask)]


def _tiles_backward(
    work: AttentionPlan,
    gs: Array,
    outs: Array,
    sums: Array,
    scale: float,
    p: float,
    seed: int,
    dqs: Array | None,
    dks: Array | None,
    dvs: Array | None,
    dmasks: Array | None,
) -> None:
    """Fills the gradients that are wanted: all as `AttentionPlan.laid` has them, the mask's transposed besides."""
    xp, cuts = work.xp, work.grid
    depth, wide = work.q.shape[-1], work.v.shape[-1]
    tile, slopes = work.memory(cuts.rows, cuts.keys), work.memory(cuts.rows, cuts.keys)
    # A column of ones at k and a row -log(sum) at q^T: so the product itself is the logarithm of P. v and g^T alike.
    q_memory, g_memory = work.memory(cuts.rows, depth + 1), work.memory(cuts.rows, wide + 1)
    k_one, v_one = (xp.ones((cuts.heads, cuts.keys, n + 1), work.dtype) for n in (depth, wide))
    partial = work.memory(cuts.keys, max(depth, wide))
    # Products are written here, not into results whose rows may lie apart.
    dk_room, dv_room, dq_room = map(work.memory, (cuts.keys, cuts.keys, cuts.rows), (depth, wide, depth))
    keep = drawn_masks(xp, seed, p) if p else None
    stretch = 1 / (1 - p) if p < 1 else 1.0

    def add(total: Array, a: Array, b: Array, first: bool) -> None:
        """total (heads, keys, n) + a @ b, whose keys are those that the block sees."""
        seen = a.shape[1]
        if first:
            product(xp, a, b, total[:, :seen])
            total[:, seen:] = 0
        else:
            total[:, :seen] += product(xp, a, b, _cut(partial, *a.shape[:2], b.shape[2]))

    for at in cuts.groups():
        queries, keys, g_heads = work.q[at], work.k[at], gs[at]
        n = len(queries)
        dk, dv = _cut(dk_room, n, cuts.keys, depth), _cut(dv_room, n, cuts.keys, wide)
        k_one[:n, :, :depth] = keys
        v_one[:n, :, :wide] = work.v[at]
        for start, stop, seen in cuts.blocks():
            first, block, gz = stop == cuts.length, queries[:, start:stop], g_heads[:, start:stop]
            q_t, g_t = _cut(q_memory, n, depth + 1, stop - start), _cut(g_memory, n, wide + 1, stop - start)
            probs, ds = _cut(tile, n, seen, stop - start), _cut(slopes, n, seen, stop - start)
            xp.multiply(block.swapaxes(1, 2), scale, out=q_t[:, :depth])
            xp.negative(sums[at][:, start:stop], out=q_t[:, depth])
            product(xp, k_one[:n, :seen], q_t, probs)
            work.hide(probs, at, start, stop, seen)
            xp.exp(probs, out=probs)
            xp.multiply(gz.swapaxes(1, 2), stretch, out=g_t[:, :wide])
            less = dots(gz, outs[at][:, start:stop])
            if keep is None:
                xp.negative(less, out=g_t[:, wide])
                product(xp, v_one[:n, :seen], g_t, ds)
                ds *= probs
            else:
                kept = keep(probs.shape)
                product(xp, v_one[:n, :seen, :wide], g_t[:, :wide], ds)
                ds *= kept
                ds -= less[:, None]
                ds *= probs
                probs *= kept
            if dvs is not None:
                add(dv, probs, g_t[:, :wide].swapaxes(1, 2) if p else gz, first)
            if dqs is not None:
                dq = dqs[at][:, start:stop]
                made = _cut(dq_room, *dq.shape)
                product(xp, ds.swapaxes(1, 2), k_one[:n, :seen, :depth], made)
                xp.multiply(made, scale, out=dq)
            if dks is not None:
                add(dk, ds, block, first)
            if dmasks is not None:
                index = met(dmasks.shape, at, start, stop, seen)
                dmasks[index] += fold(ds, dmasks[index].shape)
        if dks is not None:
            xp.multiply(dk, scale, out=dks[at])
        if dvs is not None:
            dvs[at] = dv


@array_function
def dropout_seed(xp: Any, rng: Any) -> Any:
    """The `seed` that says what is dropped, from an array module's generator."""
    return int(rng.integers(1 << 62))


attention = Op(
    "scaled_dot_product_attention",
    _attention,
    _attention_backward,
    inputs=("q", "k", "v", "mask"),
    saves=("q", "k", "v", "mask", "out"),
)
