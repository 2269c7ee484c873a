"""How attention is cut: into tiles of a few heads times a block of queries, against all keys that these may see.

All keys at once, so that no running maximum is needed. A tile lies transposed, (heads, keys, queries): products are
fastest with K on the left as it is in memory, and maxima and sums over the keys run down the rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddp.ops._op import Array, working

# Bytes of one tile. On the CPU forward has one and backward two, and L2 is 1 MiB or more; a GPU wants few launches.
TILE = {"numpy": 512 << 10, "cupy": 256 << 20}
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


class Layout:
    """What forward and backward prepare alike: wide inputs over all leading axes, the grid, the mask by tile."""

    def __init__(self, xp: Any, q: Array, k: Array, v: Array, mask: Array | None, causal: bool) -> None:
        self.xp = xp
        self.dtype = working(q)
        sizes = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
        self.lead = tuple(0 if 0 in each else max(each) for each in sizes)
        # Tiles take their heads from one axis, and it is the longest.
        self.axis = max(range(len(self.lead)), key=self.lead.__getitem__)
        self.q, self.k, self.v = (self.laid(x) for x in (q, k, v))
        length, keys, item = q.shape[-2], k.shape[-2], self.dtype.itemsize
        self.grid = grid(self.q.shape[:-2], length, keys, causal, item, TILE[xp.__name__])
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
