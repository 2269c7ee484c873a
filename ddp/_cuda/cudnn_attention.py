"""Attention by cuDNN: softmax(scale * q @ k^T) @ v in one kernel, and its gradients in another.

cuDNN is asked for 16 bits without a mask, arrays (B, H, T, D) in any order of memory whose rows lie in one piece: q, k
and v as views of one projection are read where they lie, and the result lies as q does. Key and value may have fewer
heads, each of which serves as many neighbours of query's. Stats is the logarithm of the sum of the exponentials of each
query's scores, (B, H, T, 1) in float32. All else is computed by the same formulas as on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._cuda import cudnn_graph
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec, tensor_spec
from ddp._engine import modes
from ddp.ops.arrays import BFLOAT16, Array
from ddp.ops.attention import attention as reference
from ddp.ops.memory_formats import dense_strides, empty_in_order, order_of
from ddp.ops.op import Gradients, Needs, Saved

Q, K, V, OUT, STATS, SEED, OFFSET, DO, DQ, DK, DV = range(1, 12)  # the numbers of the tensors
_ONE = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "int64")
_ALIGNED = 16  # bytes, of every row


class AttentionOptions(NamedTuple):
    """scale: of the scores; causal: query i sees keys 0 to i; p: the share of probabilities that is dropped."""

    scale: float
    causal: bool
    p: float


class AttentionGraph:
    """The graph of the forward, or of the gradients of q, k and v. specs: of its tensors, by number"""

    def __init__(self, specs: dict[int, TensorSpec], how: AttentionOptions) -> None:
        self.specs, self._how = specs, how
        self._key = "attention", *specs.items(), how

    def _build(self, graph: GraphBuilder) -> None:
        how, inputs = self._how, {n: graph.input(n, spec) for n, spec in self.specs.items() if n not in self._written}
        options: dict[str, Any] = {"attn_scale": how.scale}
        if how.causal:
            options["diagonal_alignment"] = graph.cudnn.diagonal_alignment.TOP_LEFT
            options["diagonal_band_right_bound"] = 0
        if how.p:
            options["dropout"] = (how.p, graph.input(SEED, _ONE), graph.input(OFFSET, _ONE))
        options |= {"q": inputs[Q], "k": inputs[K], "v": inputs[V]}
        if DO in inputs:
            options |= {"o": inputs[OUT], "dO": inputs[DO], "stats": inputs[STATS]}
            deterministic = cudnn_graph.settings.deterministic
            made = graph.raw.sdpa_backward(**options, use_deterministic_algorithm=deterministic)
        else:
            made = graph.raw.sdpa(**options, generate_stats=True)
        for number, tensor in zip(self._written, made, strict=True):
            graph.output(number, tensor, self.specs[number])

    @property
    def _written(self) -> tuple[int, ...]:
        return (DQ, DK, DV) if DO in self.specs else (OUT, STATS)

    def has_plan(self, xp: Any) -> bool:
        """Whether cuDNN can run it."""
        return cudnn_graph.has_plan(xp, self._key, self.specs[Q].dtype, self._build, {})

    def run(self, xp: Any, arrays: dict[int, Array], key: Array | None) -> bool:
        """Runs it on arrays by number; False: cuDNN cannot. key: (2,) of int64, the seed and offset of dropout."""
        if key is not None:  # in device memory: a replayed CUDA graph reads what is there then
            arrays = {**arrays, SEED: key.data.ptr, OFFSET: key.data.ptr + key.itemsize}
        return cudnn_graph.run_graph(xp, self._key, self.specs[Q].dtype, self._build, arrays)


def _four_axes(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array] | None:
    """q, k, v as (B, H, T, D), where key and value may have a divisor of H; None if they are anything else.

    Five axes are those of grouped heads: (B, Hk, H/Hk, T, D) and (B, Hk, 1, T, D).
    """
    if q.ndim == 3:
        q, k, v = (x[:, None] for x in (q, k, v))
    elif q.ndim == 5 and k.shape[2] == 1 == v.shape[2] and q.shape[:2] == k.shape[:2] == v.shape[:2]:
        q, k, v = q.reshape(q.shape[0], q.shape[1] * q.shape[2], *q.shape[3:]), k[:, :, 0], v[:, :, 0]
    if q.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        return None
    if 0 in (*q.shape, *k.shape, *v.shape) or q.shape[1] % k.shape[1]:
        return None
    return q, k, v


def _readable(xp: Any, x: Array) -> Array:
    """x, or a copy where a row does not lie in one piece, is not aligned, or is broadcast."""
    steps = [n for n, size in zip(x.strides[:-1], x.shape[:-1], strict=True) if size > 1]
    good = x.strides[-1] == x.itemsize and all(n > 0 and n % _ALIGNED == 0 for n in steps)
    return x if good and x.data.ptr % _ALIGNED == 0 else xp.array(x, order="C")


def _order(x: Array) -> tuple[int, ...]:
    order = order_of(x)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def _like(xp: Any, x: Array, last: int) -> Array:
    """Memory for an array like x, in its order, with `last` elements a row."""
    return empty_in_order(xp, (*x.shape[:-1], last), x.dtype, _order(x))


def _backward_graph(q: Array, k: Array, v: Array, out: Array, stats: Array, how: AttentionOptions) -> AttentionGraph:
    # The gradient of the result lies as the result does, and those of q, k and v in their order, without gaps.
    read = {Q: q, K: k, V: v, OUT: out, DO: out, STATS: stats}
    written = {n: tensor_spec(x, dense_strides(x.shape, _order(x))) for n, x in ((DQ, q), (DK, k), (DV, v))}
    return AttentionGraph({**{n: tensor_spec(x) for n, x in read.items()}, **written}, how)


def attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: Any
) -> tuple[Array, Any]:
    """As `ddp.ops.attention`. seed: (2,) of int64 on the device, read where p is not 0"""
    how = AttentionOptions(float(scale), bool(causal), float(p))
    found = None if mask is not None else _cudnn_forward(xp, q, k, v, how, seed if p else None)
    if found is not None:
        return found
    op: Any = reference.upcast if BFLOAT16 in [x.dtype for x in (q, k, v, mask) if x is not None] else reference
    out, residual = op.forward(xp, q, k, v, mask, scale=scale, causal=causal, p=p, seed=seed)
    return out, (op, residual)


def _cudnn_forward(
    xp: Any, q: Array, k: Array, v: Array, how: AttentionOptions, key: Array | None
) -> tuple[Array, Any] | None:
    """The result and what backward wants; None where cuDNN does not take it."""
    if q.dtype.itemsize != 2 or not q.dtype == k.dtype == v.dtype or how.p >= 1:
        return None
    seen = _four_axes(q, k, v)
    if seen is None or not cudnn_graph.settings.enabled or cudnn_graph.library(xp) is None:
        return None
    queries, keys, values = (_readable(xp, x) for x in seen)
    out = _like(xp, queries, values.shape[-1])
    stats = xp.ndarray((*queries.shape[:3], 1), "float32")
    arrays = {Q: queries, K: keys, V: values, OUT: out, STATS: stats}
    # A backward has to go on where this began. With dropout, a recomputation has to drop the same elements as a forward
    # under no_grad did, and so has to take the same way.
    if (modes.state.enabled or how.p) and not _backward_graph(queries, keys, values, out, stats, how).has_plan(xp):
        return None
    if not AttentionGraph({n: tensor_spec(x) for n, x in arrays.items()}, how).run(xp, arrays, key):
        return None
    return out.reshape(*q.shape[:-1], v.shape[-1]), (None, (stats, key, how))


def attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    op, inner = residual
    if op is not None:
        found: Gradients = op.backward(xp, g, needs, saved, inner)
        return found
    q, k, v, _, out = saved
    stats, key, how = inner
    seen = _four_axes(q, k, v)
    assert seen is not None
    queries, keys, values = (_readable(xp, x) for x in seen)
    shape = (*queries.shape[:3], values.shape[-1])
    out, g = (_readable(xp, x.reshape(shape)) for x in (out, g))
    if g.strides != out.strides:  # the plan that was found in forward is of a gradient that lies as the result does
        given, g = g, _like(xp, out, out.shape[-1])
        g[...] = given
    made = [_like(xp, x, x.shape[-1]) for x in (queries, keys, values)]
    arrays = {Q: queries, K: keys, V: values, OUT: out, DO: g, STATS: stats, DQ: made[0], DK: made[1], DV: made[2]}
    done = _backward_graph(queries, keys, values, out, stats, how).run(xp, arrays, key)
    assert done, "its plan was found before the forward"
    return [*[d.reshape(x.shape) if need else None for d, x, need in zip(made, (q, k, v), needs, strict=False)], None]
