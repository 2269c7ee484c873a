"""Attention: scaled dot products, and the layer with several heads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np

from ddp._device import generator, on
from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp._tensor.dtypes import bool_, is_float
from ddp._tensor.functions import cat
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn import init
from ddp.nn.activation import softmax
from ddp.nn.dropout import dropout
from ddp.nn.linear import Linear, linear
from ddp.nn.module import Layer
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
    """softmax(scale * query @ key^T + mask) @ value. Backward computes the probabilities again instead of saving them.

    query: (..., L, E), key: (..., S, E), value: (..., S, Ev); leading axes broadcast; returns (..., L, Ev).
    attn_mask: broadcasts to (..., L, S); True where a query may see a key, or numbers to add to the scores.
    is_causal: query i sees keys 0 to i. scale: 1/sqrt(E) unless given. dropout_p: applied in evaluation, too.
    enable_gqa: query is (..., Hq, L, E). Key and value have Hk heads, each of them for Hq/Hk neighbouring query heads.
    A query that may see no key gets 0.

    Raises: ShapeError; DtypeError; ArgumentError for a dropout_p outside [0, 1], or is_causal with an attn_mask.
    Source: Dao et al. 2022, arXiv:2205.14135.
    """
    tensors = (query, key, value)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) < 2 for shape in shapes) or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise ShapeError(
            f"{_NAME}: query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: expected (..., L, E), (..., S, E), "
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
        scale = 1 / math.sqrt(max(shapes[0][-1], 1))
    ndim = max(*map(len, shapes), 3)
    q, k, v = (x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x for x in tensors)
    grouped = 1
    if enable_gqa:
        heads = q.shape[-3]
        shared = k.shape[-3]
        if v.shape[-3] != shared or not shared or heads % shared:
            raise ShapeError(
                f"{_NAME}: enable_gqa: {heads} heads of query are no multiple of those of key {shapes[1]} and value "
                f"{shapes[2]}"
            )
        grouped = heads // shared
    leading = _broadcast_leading(q, k, v, grouped, shapes)
    mask = None if attn_mask is None else _mask(attn_mask, query, (*leading, q.shape[-2], k.shape[-2]))
    if grouped > 1:
        # Query heads that share a key head get their own axis, along which key and value broadcast.
        split = (leading[-1] // grouped, grouped)
        q = q.reshape((*q.shape[:-3], *split, *q.shape[-2:]))
        k = k.unsqueeze(-3)
        v = v.unsqueeze(-3)
        if mask is not None:
            joint = mask.shape[-3]
            mask = mask.reshape((*mask.shape[:-3], *(split if joint > 1 else (1, 1)), *mask.shape[-2:]))
    seed: Any = 0
    if dropout_p:
        with on(query.device):
            seed = attention.dropout_seed(query.device.xp, generator(query.device))
    out: Tensor = apply(
        attention.attention, (q, k, v, mask), scale=float(scale), causal=is_causal, p=float(dropout_p), seed=seed
    )
    if grouped > 1:
        out = out.reshape((*leading, *out.shape[-2:]))
    return out if max(map(len, shapes)) == ndim else out.squeeze(0)


def _broadcast_leading(q: Tensor, k: Tensor, v: Tensor, grouped: int, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Broadcasts the leading sizes. Grouped heads: key and value get query's number of heads. Raises: ShapeError."""
    heads = (q.shape[-3],) if grouped > 1 else None
    others = [tuple(x.shape[:-2]) if heads is None else (*x.shape[:-3], *heads) for x in (k, v)]
    try:
        return np.broadcast_shapes(tuple(q.shape[:-2]), *others)
    except ValueError:
        raise ShapeError(
            f"{_NAME}: leading axes of query {shapes[0]}, key {shapes[1]}, value {shapes[2]} do not broadcast"
        ) from None


def _mask(mask: Tensor, query: Tensor, full: tuple[int, ...]) -> Tensor:
    """Reshapes the mask to as many dimensions as `full`, the shape of the scores. Raises: ShapeError, DtypeError."""
    if mask.dtype not in (bool_, query.dtype) and not (modes.state.autocast and is_float(mask.dtype)):
        raise DtypeError(f"{_NAME}: attn_mask is bool or {query.dtype} like the query, not {mask.dtype}")
    padded = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
    if len(padded) != len(full) or any(n not in (1, m) for n, m in zip(padded, full, strict=True)):
        raise ShapeError(f"{_NAME}: attn_mask {tuple(mask.shape)} does not broadcast to the scores {full}")
    return mask.reshape(padded)


class SDPBackend(Enum):
    """The implementations of attention that PyTorch names."""

    MATH = 0
    FLASH_ATTENTION = 1
    EFFICIENT_ATTENTION = 2
    CUDNN_ATTENTION = 3
    OVERRIDEABLE = 4


@contextlib.contextmanager
def sdpa_kernel(backends: SDPBackend | Sequence[SDPBackend], set_priority: bool = False) -> Iterator[None]:
    """Accepted, and ignored: the device and the shapes choose the implementation. Works as a decorator, too.

    Raises: DtypeError unless `backends` is an SDPBackend, or a sequence of them.
    """
    given = backends if isinstance(backends, Sequence) else [backends]
    if not all(isinstance(backend, SDPBackend) for backend in given):
        raise DtypeError(f"sdpa_kernel: expected an SDPBackend or a list of them, got {backends!r}")
    yield


class NonDynamicallyQuantizableLinear(Linear):
    """A Linear, under the name that PyTorch prints for the last projection of its attention."""


class MultiheadAttention(Layer):
    """Attention in num_heads subspaces of embed_dim/num_heads each, between learned projections.

    in_proj_weight: (3*embed_dim, embed_dim); if kdim or vdim is not embed_dim, q_proj_weight, k_proj_weight and
    v_proj_weight instead. in_proj_bias: (3*embed_dim,); out_proj: Linear. add_bias_kv: appends a learned key and value;
    add_zero_attn: appends a key and a value of zeros. kdim, vdim: widths of key and value; None: embed_dim. dropout:
    the probability with which an attention weight becomes 0 in training.

    Raises: ArgumentError unless embed_dim and num_heads are positive, and num_heads divides embed_dim.
    Source: Vaswani et al. 2017, arXiv:1706.03762.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ArgumentError(f"MultiheadAttention: embed_dim {embed_dim} is no multiple of num_heads {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        same = self.kdim == embed_dim and self.vdim == embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {
            "q_proj_weight": None if same else (embed_dim, embed_dim),
            "k_proj_weight": None if same else (embed_dim, self.kdim),
            "v_proj_weight": None if same else (embed_dim, self.vdim),
            "in_proj_weight": (3 * embed_dim, embed_dim) if same else None,
            "in_proj_bias": (3 * embed_dim,) if bias else None,
            "bias_k": (1, 1, embed_dim) if add_bias_kv else None,
            "bias_v": (1, 1, embed_dim) if add_bias_kv else None,
        }
        self._register_empty(device, dtype, **shapes)
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight, self.in_proj_weight):
            if weight is not None:
                init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            init.zeros_(self.in_proj_bias)
            init.zeros_(self.out_proj.bias)
        if self.bias_k is not None:
            init.xavier_normal_(self.bias_k)
            init.xavier_normal_(self.bias_v)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query: (L, N, E), key: (S, N, kdim), value: (S, N, vdim); N first if batch_first; no N if unbatched.

        key_padding_mask: (N, S), or (S,) if unbatched; attn_mask: (L, S) or (N*num_heads, L, S); True where a key may
        NOT be seen, or numbers to add to the scores. is_causal: promises that attn_mask is the causal mask, which then
        need not be read.

        Returns (result, weights). result: of query's shape; weights: (N, L, S), averaged over the heads, or (N,
        num_heads, L, S) without average_attn_weights; no N if unbatched. S includes the keys that add_bias_kv and
        add_zero_attn append. A query that may see no key has weights of 0. need_weights=False returns (result, None),
        in less time and memory.

        Raises: ShapeError; DtypeError; ArgumentError for is_causal without attn_mask, or in training for a dropout
        outside [0, 1].
        """
        self._check(query, key, value)
        if is_causal and attn_mask is None:
            raise ArgumentError("MultiheadAttention: is_causal is a hint about attn_mask, which is missing")
        batched = query.ndim == 3
        q, k, v = self._heads(query, key, value)
        added = (self.bias_k is not None) + self.add_zero_attn
        causal = is_causal and key_padding_mask is None and not need_weights and not added
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k.shape[-2] - added, added)
        p = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * (1 / math.sqrt(self.head_dim))) @ k.transpose(-1, -2)
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == bool_ else scores + mask
                # A row that is all -inf would make softmax and all gradients nan.
                blind = (scores == -math.inf).all(-1, keepdim=True)
                weights = softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
            else:
                weights = softmax(scores, -1)
            weights = dropout(weights, p)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            heads = scaled_dot_product_attention(q, k, v, mask, p, causal)
        inner = heads.permute(0, 2, 1, 3) if self.batch_first or not batched else heads.permute(2, 0, 1, 3)
        joined = inner.reshape((*inner.shape[:2], self.embed_dim))
        return self.out_proj(joined if batched else joined.squeeze(0)), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        widths = (self.embed_dim, self.kdim, self.vdim)
        length, batch = (1, 0) if self.batch_first and query.ndim == 3 else (0, 1)
        if (
            query.ndim not in (2, 3)
            or any(len(shape) != query.ndim or shape[-1] != n for shape, n in zip(shapes, widths, strict=True))
            or shapes[1][length] != shapes[2][length]
            or (query.ndim == 3 and len({shape[batch] for shape in shapes}) > 1)
        ):
            order = "(N, L, E), (N, S, Ek), (N, S, Ev)" if self.batch_first else "(L, N, E), (S, N, Ek), (S, N, Ev)"
            raise ShapeError(
                f"MultiheadAttention: query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: expected {order}, "
                f"or no N, with E, Ek, Ev = {widths}"
            )

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projects query, key and value to (N, num_heads, L or S, head_dim), and appends the learned and zero keys.

        With an in_proj_weight, this takes one matrix product if query, key and value are the same tensor, and two if
        only key and value are the same tensor.
        """
        weight = self.in_proj_weight
        bias = self.in_proj_bias
        parts: list[Tensor]
        if weight is not None and query is key and key is value:
            parts = self._parts(linear(query, weight, bias), 3)
        elif weight is not None and key is value:
            sizes = [self.embed_dim, 2 * self.embed_dim]
            w, w_kv = weight.split(sizes)
            b, b_kv = (None, None) if bias is None else bias.split(sizes)
            parts = [*self._parts(linear(query, w, b), 1), *self._parts(linear(key, w_kv, b_kv), 2)]
        else:
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
            )
            biases = (None, None, None) if bias is None else bias.chunk(3)
            inputs = (query, key, value)
            parts = [self._parts(linear(x, w, b), 1)[0] for x, w, b in zip(inputs, weights, biases, strict=True)]
        if self.bias_k is not None:
            extra = (x.reshape((1, self.num_heads, 1, self.head_dim)) for x in (self.bias_k, self.bias_v))
            parts[1:] = [
                cat([x, e.expand(x.shape[0], -1, -1, -1)], dim=2) for x, e in zip(parts[1:], extra, strict=True)
            ]
        if self.add_zero_attn:
            shape = (*parts[1].shape[:2], 1, self.head_dim)
            nothing = zeros(shape, dtype=query.dtype, device=query.device)
            parts[1:] = [cat([x, nothing], dim=2) for x in parts[1:]]
        return parts

    def _parts(self, x: Tensor, count: int) -> list[Tensor]:
        split = x.reshape((*x.shape[:-1], count, self.num_heads, self.head_dim)).unbind(-3)
        if x.ndim == 2:
            return [part.permute(1, 0, 2).unsqueeze(0) for part in split]
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        return [part.permute(order) for part in split]

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int, added: int
    ) -> Tensor | None:
        """Makes the mask for scaled_dot_product_attention: True where a key may be seen, or numbers to add.

        The last `added` keys may always be seen.
        """
        batch, heads, length = q.shape[:3]
        masks = []
        if attn_mask is not None:
            shared = (length, keys)
            per_head = (batch * heads, length, keys)
            if tuple(attn_mask.shape) not in (shared, per_head):
                raise ShapeError(
                    f"MultiheadAttention: attn_mask {tuple(attn_mask.shape)}: expected {shared} or {per_head}"
                )
            masks.append(attn_mask.reshape((1, 1, *shared) if attn_mask.ndim == 2 else (batch, heads, *shared)))
        if padding is not None:
            if tuple(padding.shape) != (batch, keys) and not (batch == 1 and tuple(padding.shape) == (keys,)):
                raise ShapeError(f"MultiheadAttention: key_padding_mask {tuple(padding.shape)}: not {(batch, keys)}")
            masks.append(padding.reshape((batch, 1, 1, keys)))
        for i, mask in enumerate(masks):
            if mask.dtype != bool_ and not is_float(mask.dtype):
                raise DtypeError(f"MultiheadAttention: a mask is bool or floating, not {mask.dtype}")
            if added:
                ends = zeros((*mask.shape[:3], added), dtype=mask.dtype, device=mask.device)
                masks[i] = cat([mask, ends], dim=3)
        if not masks:
            return None
        if all(mask.dtype == bool_ for mask in masks):
            return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
        numbers = [_as_additive_mask(mask, q) for mask in masks]
        return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]


def _as_additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add, in the dtype of `like`. True in a bool mask hides a key, and becomes -inf."""
    if mask.dtype != bool_:
        return mask.to(dtype=like.dtype)
    return zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -math.inf)
