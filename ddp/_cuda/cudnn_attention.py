"""Attention by cuDNN: softmax(scale * q @ k^T) @ v as one cuDNN graph, and its gradients as another.

cuDNN is used for 16-bit arrays (B, H, T, D) without a mask, if it supports their shapes. Other cases are computed by
the array formulas. The first three axes may have any order in memory: q, k and v may be views of one projection, and
the result has the order of q. Keys and values may have fewer heads than queries: each of their heads serves a group of
adjacent query heads.
`stats` is the logsumexp of each query's scores, (B, H, T, 1) in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._cuda import cudnn_graph
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec, tensor_spec
from ddp._engine import modes
from ddp.errors import GraphError
from ddp.ops.arrays import BFLOAT16, Array
from ddp.ops.attention import attention as reference
from ddp.ops.memory_formats import dense_strides, empty_in_order, order_of
from ddp.ops.op import Gradients, Needs, Saved

# The uids of the tensors in a graph.
Q, K, V, OUT, STATS, SEED, OFFSET, DO, DQ, DK, DV = range(1, 12)
_SCALAR = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "int64")

# The alignment of rows that cuDNN requires, in bytes.
_ALIGNMENT = 16


class AttentionOptions(NamedTuple):
    """Options of an attention graph.

    scale: multiplies the scores; causal: query i sees only keys 0 to i; p: the probability of dropout
    """

    scale: float
    causal: bool
    p: float


class AttentionGraph:
    """A cuDNN graph of attention's forward or, if `specs` contains DO, of the gradients of q, k and v.

    specs: descriptions of the graph's tensors, by uid
    """

    def __init__(self, specs: dict[int, TensorSpec], options: AttentionOptions) -> None:
        self.specs = specs
        self._options = options
        self._key = ("attention", *specs.items(), options)

    def _build(self, graph: GraphBuilder) -> None:
        scale, causal, p = self._options
        inputs = {uid: graph.input(uid, spec) for uid, spec in self.specs.items() if uid not in self._outputs}
        arguments: dict[str, Any] = {"attn_scale": scale, "q": inputs[Q], "k": inputs[K], "v": inputs[V]}
        if causal:
            arguments["diagonal_alignment"] = graph.cudnn.diagonal_alignment.TOP_LEFT
            arguments["diagonal_band_right_bound"] = 0
        if p:
            arguments["dropout"] = (p, graph.input(SEED, _SCALAR), graph.input(OFFSET, _SCALAR))
        if DO in inputs:
            arguments |= {"o": inputs[OUT], "dO": inputs[DO], "stats": inputs[STATS]}
            deterministic = cudnn_graph.settings.deterministic
            outputs = graph.raw.sdpa_backward(**arguments, use_deterministic_algorithm=deterministic)
        else:
            outputs = graph.raw.sdpa(**arguments, generate_stats=True)
        for uid, tensor in zip(self._outputs, outputs, strict=True):
            graph.output(uid, tensor, self.specs[uid])

    @property
    def _outputs(self) -> tuple[int, ...]:
        return (DQ, DK, DV) if DO in self.specs else (OUT, STATS)

    def has_plan(self, xp: Any) -> bool:
        """Whether cuDNN supports the graph."""
        return cudnn_graph.has_plan(xp, self._key, self.specs[Q].dtype, self._build, {})

    def run(self, xp: Any, arrays: dict[int, Array], key: Array | None) -> bool:
        """Runs the graph on arrays by uid. Returns: False if cuDNN does not support it.

        key: (2,) int64, the seed and offset of dropout, or None
        """
        if key is not None:  # as addresses: every launch of a CUDA graph reads the key anew
            arrays = {**arrays, SEED: key.data.ptr, OFFSET: key.data.ptr + key.itemsize}
        return cudnn_graph.run_graph(xp, self._key, self.specs[Q].dtype, self._build, arrays)


def _four_axes(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array] | None:
    """q as (B, H, L, D), k as (B, Hk, S, D) and v as (B, Hk, S, E), where Hk is a divisor of H.

    Arrays of three axes get one head. Arrays of five axes have grouped heads: q (B, Hk, H/Hk, L, D), k (B, Hk, 1, S,
    D), v (B, Hk, 1, S, E). Returns: None for shapes that cuDNN does not take, or if a length is 0.
    """
    if q.ndim == 3:
        q, k, v = (x[:, None] for x in (q, k, v))
    elif q.ndim == 5 and k.shape[2] == 1 == v.shape[2] and q.shape[:2] == k.shape[:2] == v.shape[:2]:
        q = q.reshape(q.shape[0], q.shape[1] * q.shape[2], *q.shape[3:])
        k = k[:, :, 0]
        v = v[:, :, 0]
    if q.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        return None
    if 0 in (*q.shape, *k.shape, *v.shape) or q.shape[1] % k.shape[1]:
        return None
    return q, k, v


def _readable(xp: Any, x: Array) -> Array:
    """x, or a copy if its rows are not contiguous or not aligned, or if it is broadcast."""
    strides = [stride for stride, size in zip(x.strides[:-1], x.shape[:-1], strict=True) if size > 1]
    regular = x.strides[-1] == x.itemsize and all(stride > 0 and stride % _ALIGNMENT == 0 for stride in strides)
    return x if regular and x.data.ptr % _ALIGNMENT == 0 else xp.array(x, order="C")


def _order(x: Array) -> tuple[int, ...]:
    order = order_of(x)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def _empty_like(xp: Any, x: Array, width: int) -> Array:
    """A new array with x's dtype, shape and order of axes in memory, but with rows of `width` elements."""
    return empty_in_order(xp, (*x.shape[:-1], width), x.dtype, _order(x))


def _backward_graph(
    q: Array, k: Array, v: Array, out: Array, stats: Array, options: AttentionOptions
) -> AttentionGraph:
    # DO has the layout of the result. DQ, DK and DV have the order of q, k and v, without gaps.
    like = {Q: q, K: k, V: v, OUT: out, DO: out, STATS: stats}
    inputs = {uid: tensor_spec(x) for uid, x in like.items()}
    outputs = {uid: tensor_spec(x, dense_strides(x.shape, _order(x))) for uid, x in ((DQ, q), (DK, k), (DV, v))}
    return AttentionGraph(inputs | outputs, options)


def attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: Any
) -> tuple[Array, Any]:
    """See `ddp.ops.attention`. seed: (2,) int64 on the device, used if p is not 0"""
    options = AttentionOptions(float(scale), bool(causal), float(p))
    if mask is None:
        result = _cudnn_forward(xp, q, k, v, options, seed if p else None)
        if result is not None:
            return result
    op: Any = reference.upcast if BFLOAT16 in [x.dtype for x in (q, k, v, mask) if x is not None] else reference
    out, residual = op.forward(xp, q, k, v, mask, scale=scale, causal=causal, p=p, seed=seed)
    return out, (op, residual)


def _cudnn_forward(
    xp: Any, q: Array, k: Array, v: Array, options: AttentionOptions, key: Array | None
) -> tuple[Array, Any] | None:
    """The result and the residual for backward; None if cuDNN does not support the case."""
    if q.dtype.itemsize != 2 or not q.dtype == k.dtype == v.dtype or options.p >= 1:
        return None
    operands = _four_axes(q, k, v)
    if operands is None or not cudnn_graph.settings.enabled or cudnn_graph.library(xp) is None:
        return None
    queries, keys, values = (_readable(xp, x) for x in operands)
    out = _empty_like(xp, queries, values.shape[-1])
    stats = xp.ndarray((*queries.shape[:3], 1), "float32")
    arrays = {Q: queries, K: keys, V: values, OUT: out, STATS: stats}
    # Only cuDNN can compute the backward of this forward, so check that it has a plan for backward. With dropout, check
    # also under no_grad: a user's code may run the forward under no_grad, and again with recording on to recompute it
    # for backward. Both runs must drop the same elements, so both must use cuDNN or neither.
    needs_backward = modes.state.enabled or options.p
    if needs_backward and not _backward_graph(queries, keys, values, out, stats, options).has_plan(xp):
        return None
    graph = AttentionGraph({uid: tensor_spec(x) for uid, x in arrays.items()}, options)
    if not graph.run(xp, arrays, key):
        return None
    return out.reshape(*q.shape[:-1], v.shape[-1]), (None, (stats, key, options))


def reference_residual(xp: Any, residual: Any) -> Any:
    """The residual of the op's reference, if the reference computed the forward.

    If cuDNN computed the forward without dropout, the caller does not use what this returns: create_graph runs the
    forward of the reference again. Raises: GraphError if cuDNN computed it with dropout: its kernels do not tell which
    elements they drop, so the reference cannot drop the same ones.
    """
    op, inner = residual
    if op is None and inner[1] is not None:
        raise GraphError(
            "scaled_dot_product_attention: create_graph=True after dropout by cuDNN, which does not tell what it "
            "dropped: run the forward with ddp.backends.cudnn.enabled = False"
        )
    return inner


def attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    op, inner = residual
    if op is not None:
        gradients: Gradients = op.backward(xp, g, needs, saved, inner)
        return gradients
    q, k, v, _, out = saved
    stats, key, options = inner
    operands = _four_axes(q, k, v)
    assert operands is not None
    queries, keys, values = (_readable(xp, x) for x in operands)
    shape = (*queries.shape[:3], values.shape[-1])
    out, g = (_readable(xp, x.reshape(shape)) for x in (out, g))
    if g.strides != out.strides:  # the plan of backward requires a gradient with the layout of the result
        source = g
        g = _empty_like(xp, out, out.shape[-1])
        g[...] = source
    dq, dk, dv = (_empty_like(xp, x, x.shape[-1]) for x in (queries, keys, values))
    arrays = {
        Q: queries,
        K: keys,
        V: values,
        OUT: out,
        DO: g,
        STATS: stats,
        DQ: dq,
        DK: dk,
        DV: dv,
    }
    supported = _backward_graph(queries, keys, values, out, stats, options).run(xp, arrays, key)
    assert supported, "forward checks that there is a plan"
    return (
        dq.reshape(q.shape) if needs[0] else None,
        dk.reshape(k.shape) if needs[1] else None,
        dv.reshape(v.shape) if needs[2] else None,
        None,
    )
