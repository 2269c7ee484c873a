"""Embeddings as a function."""

from __future__ import annotations

from typing import Any

from ddp._device import on
from ddp._engine import no_grad
from ddp._tensor.base import apply, borrowed, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.watching import placed_by_any
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import lookup
from ddp.ops.cuda import bounds


@placed_by_any
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight[input]: the rows of a table. input: integers in [0, V), any shape; weight: (V, D); returns (*input, D).

    padding_idx: a row that gets no gradient. max_norm: rows that are used and longer, by the norm of `norm_type`, are
    shortened in place first. scale_grad_by_freq: a row's gradient is divided by how often it occurs in the input.

    Raises: DtypeError, ShapeError; RangeError naming the first number out of range; ArgumentError for `sparse`.
    """
    if sparse:
        raise ArgumentError("embedding: sparse gradients are not supported here; leave sparse=False")
    if input._device is not weight._device:  # the op runs where the table is
        with on(weight._device):
            there = input.to(weight._device)
            return embedding(there, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if input.dtype.kind not in "iu":
        raise DtypeError(f"embedding: input holds row numbers (int64), not {input.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {tuple(weight.shape)}: expected (V, D)")
    rows, index = weight.shape[0], input._array
    if padding_idx is not None:
        padding_idx = _padding("embedding", padding_idx, rows)
    if weight.device.type == "cuda":
        told = "embedding: input {value} is not one of the {limit} rows 0 to {last}"
        index = bounds.checked(weight.device.xp, index, 0, rows, RangeError, told)
    elif index.size and not (index.min() >= 0 and index.max() < rows):
        bad = index[(index < 0) | (index >= rows)][0]
        raise RangeError(f"embedding: input {int(bad)} is not one of the {rows} rows 0 to {rows - 1}")
    if max_norm is not None:
        _shorten(weight, index, max_norm, norm_type)
    if weight.device.type != "cuda":  # there it is a new array already
        index = borrowed(index, weight)
    out: Tensor = apply(lookup.embedding, (weight,), index=index, padding=padding_idx, by_frequency=scale_grad_by_freq)
    return out


def _padding(name: str, padding_idx: int, rows: int) -> int:
    """padding_idx counted from the front. Raises: RangeError."""
    if not -rows <= padding_idx < rows:
        raise RangeError(f"{name}: padding_idx {padding_idx} is not one of the {rows} rows")
    return padding_idx % rows


def _shorten(weight: Tensor, index: Any, max_norm: float, norm_type: float) -> None:
    xp = weight.device.xp
    used = xp.unique(index)
    with no_grad():
        long = weight[wrap(used, weight.device)]
        norms = xp.linalg.norm(long._array.astype("float64"), norm_type, axis=1)
        over = norms > max_norm
        if over.any():
            shorter = long._array[over] * (max_norm / (norms[over] + 1e-7))[:, None].astype(weight.dtype)
            weight[wrap(used[over], weight.device)] = wrap(shorter, weight.device)
