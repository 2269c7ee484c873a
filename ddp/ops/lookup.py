"""Rows of a table looked up by number; the table's gradient adds up the rows that were looked up."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved
from ddp.ops.index import add_rows


# z = w[index];  dw = g added up at index, divided by how often a row occurs if by_frequency, 0 at padding
def _embedding(xp: Any, w: Array, index: Array, padding: int | None, by_frequency: bool) -> tuple[Array, Any]:
    """w: (V, D), index: any shape, 0 <= index < V."""
    return xp.take(w, index, axis=0), (w.shape, index, padding, by_frequency)


def _embedding_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None,)
) -> Gradients:
    shape, index, padding, by_frequency = residual
    where, rows = index.reshape(-1), g.reshape(index.size, shape[1])
    if by_frequency:
        rows = rows / xp.bincount(where, minlength=shape[0])[where][:, None].astype(g.dtype)
    dw = add_rows(xp, shape[0], where, rows, outs[0])
    if padding is not None:
        dw[padding] = 0
    return (dw,)


embedding = Op("embedding", _embedding, _embedding_backward, inputs=("w",), into=True)
