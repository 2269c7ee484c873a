"""Attention as a function."""

from __future__ import annotations

import math
from typing import Any

from ddp._device import generator, on
from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bool_, is_float
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import attention

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query @ key^T + mask) @ value, without the L x S probabilities ever in memory, backward included.

    query: (..., L, E), key: (..., S, E), value: (..., S, Ev); leading axes broadcast; returns (..., L, Ev).
    attn_mask: broadcasts to (..., L, S); True where a query may see a key, or numbers to add to the scores.
    is_causal: query i sees keys 0 to i. scale: 1/sqrt(E) unless given. dropout_p: always applied.
    enable_gqa: query (..., Hq, L, E) shares each of the Hk heads of key and value among Hq/Hk neighbours.
    A query that may see no key gets 0.

    Raises: ShapeError, DtypeError, ArgumentError. Source: Dao et al. 2022, arXiv:2205.14135.
    """
    tensors, given = (query, key, value), [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) < 2 for shape in given) or given[0][-1] != given[1][-1] or given[1][-2] != given[2][-2]:
        raise ShapeError(
            f"{_NAME}: query {given[0]}, key {given[1]}, value {given[2]}: expected (..., L, E), (..., S, E), "
            "(..., S, Ev)"
        )
    if not all(is_float(x.dtype) and (x.dtype == query.dtype or modes.state.autocast) for x in tensors):
        raise DtypeError(
            f"{_NAME}: query, key and value need one floating dtype, got {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if not 0 <= dropout_p <= 1:
        raise ArgumentError(f"{_NAME}: dropout_p is a probability, not {dropout_p}")
    if is_causal and attn_mask is not None:
        raise ArgumentError(f"{_NAME}: is_causal and attn_mask exclude each other; put the triangle into the mask")
    if scale is None:
        scale = 1 / math.sqrt(max(given[0][-1], 1))
    wanted = max(*map(len, given), 3)
    q, k, v = (x.reshape((1,) * (wanted - x.ndim) + tuple(x.shape)) if x.ndim < wanted else x for x in tensors)
    grouped = 1
    if enable_gqa:
        heads, shared = _heads(q), _heads(k)
        if _heads(v) != shared or not shared or heads % shared:
            raise ShapeError(
                f"{_NAME}: enable_gqa: {heads} heads of query are no multiple of those of key {given[1]} and value "
                f"{given[2]}"
            )
        grouped = heads // shared
    lead = _lead(q, k, v, grouped, given)
    mask = None if attn_mask is None else _mask(attn_mask, query, (*lead, q.shape[-2], k.shape[-2]))
    if grouped > 1:
        # Neighbours of one key head get an axis of their own, along which key and value broadcast.
        split = (lead[-1] // grouped, grouped)
        q = q.reshape((*q.shape[:-3], *split, *q.shape[-2:]))
        k, v = k.unsqueeze(-3), v.unsqueeze(-3)
        if mask is not None:
            joint = mask.shape[-3]
            mask = mask.reshape((*mask.shape[:-3], *(split if joint > 1 else (1, 1)), *mask.shape[-2:]))
    seed: Any = 0
    if dropout_p:
        with on(query.device):
            seed = attention.drawn(query.device.xp, generator(query.device))
    out: Tensor = apply(
        attention.attention, (q, k, v, mask), scale=float(scale), causal=is_causal, p=float(dropout_p), seed=seed
    )
    if grouped > 1:
        out = out.reshape((*lead, *out.shape[-2:]))
    return out if max(map(len, given)) == wanted else out.squeeze(0)


def _heads(x: Tensor) -> int:
    return int(x.shape[-3])


def _lead(q: Tensor, k: Tensor, v: Tensor, grouped: int, given: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The common leading sizes. Raises: ShapeError if they do not broadcast."""
    found = []
    for i, sizes in enumerate(zip(*(tuple(x.shape[:-2]) for x in (q, k, v)), strict=True)):
        if grouped > 1 and i == q.ndim - 3:
            sizes = sizes[:1]
        distinct = set(sizes) - {1}
        if len(distinct) > 1:
            raise ShapeError(
                f"{_NAME}: leading axes of query {given[0]}, key {given[1]}, value {given[2]} do not broadcast"
            )
        found.append(distinct.pop() if distinct else 1)
    return tuple(found)


def _mask(mask: Tensor, query: Tensor, full: tuple[int, ...]) -> Tensor:
    """The mask with as many dimensions as `full`. Raises: ShapeError, DtypeError."""
    if mask.dtype not in (bool_, query.dtype) and not (modes.state.autocast and is_float(mask.dtype)):
        raise DtypeError(f"{_NAME}: attn_mask is bool or {query.dtype} like the query, not {mask.dtype}")
    padded = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
    if len(padded) != len(full) or any(n not in (1, m) for n, m in zip(padded, full, strict=True)):
        raise ShapeError(f"{_NAME}: attn_mask {tuple(mask.shape)} does not broadcast to the scores {full}")
    return mask.reshape(padded)
