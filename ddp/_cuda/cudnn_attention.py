"""Attention by cuDNN: softmax(scale * q @ k^T) @ v in one kernel, and its gradients in another.

Arrays are (B, H, T, D) with any strides whose last one is of one element, so that q, k and v may be views of one
projection. Key and value may have fewer heads, each of which serves as many neighbours of query's. Stats is the
logarithm of the sum of the exponentials of each query's scores, (B, H, T, 1) in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._cuda import cudnn_graph
from ddp._cuda.cudnn_graph import GraphBuilder, TensorSpec
from ddp.ops.attention import attention as reference
from ddp.ops.memory_formats import dense_strides, empty_in_order, order_of
from ddp.ops.op import BFLOAT16, Array, Gradients, Needs, Saved

Q, K, V, OUT, STATS, SEED, OFFSET, DO, DQ, DK, DV = range(1, 12)  # the numbers of the tensors
_ONE = TensorSpec((1, 1, 1, 1), (1, 1, 1, 1), "int64")


class AttentionOptions(NamedTuple):
    """scale: of the scores; causal: query i sees keys 0 to i; p: the share of probabilities that is dropped."""

    scale: float
    causal: bool
    p: float


def _options(graph: GraphBuilder, how: AttentionOptions) -> dict[str, Any]:
    options: dict[str, Any] = {"attn_scale": how.scale}
    if how.causal:
        options["diagonal_alignment"] = graph.cudnn.diagonal_alignment.TOP_LEFT
        options["diagonal_band_right_bound"] = 0
    if how.p:
        options["dropout"] = (how.p, graph.input(SEED, _ONE), graph.input(OFFSET, _ONE))
    return options


def _seeds(key: Array | None) -> dict[int, Array]:
    # Where the generator stands, in device memory: a replayed CUDA graph reads what is there then.
    return {} if key is None else {SEED: key.data.ptr, OFFSET: key.data.ptr + key.itemsize}


def forward_graph(
    xp: Any, q: Array, k: Array, v: Array, out: Array, stats: Array, how: AttentionOptions, key: Array | None
) -> bool:
    """Writes `out` and `stats`; False: cuDNN cannot. key: (2,) of int64, the seed and the offset of what is dropped."""
    specs = [cudnn_graph.tensor_spec(each) for each in (q, k, v, out, stats)]

    def build(graph: GraphBuilder) -> None:
        o, s = graph.raw.sdpa(
            q=graph.input(Q, specs[0]),
            k=graph.input(K, specs[1]),
            v=graph.input(V, specs[2]),
            generate_stats=True,
            **_options(graph, how),
        )
        graph.output(OUT, o, specs[3])
        graph.output(STATS, s, specs[4])

    arrays = {Q: q, K: k, V: v, OUT: out, STATS: stats, **_seeds(key)}
    return cudnn_graph.run_graph(xp, ("attention", *specs, how), specs[0].dtype, build, arrays)


class BackwardGraph:
    """The graph of the gradients of q, k and v. specs: of q, k, v, out, its gradient, stats, and the three gradients"""

    def __init__(self, specs: tuple[TensorSpec, ...], how: AttentionOptions) -> None:
        self._specs, self._how = specs, how
        self._key = "gradient of attention", *specs, how

    def _build(self, graph: GraphBuilder) -> None:
        q, k, v, out, g, stats, *gradients = self._specs
        found = graph.raw.sdpa_backward(
            q=graph.input(Q, q),
            k=graph.input(K, k),
            v=graph.input(V, v),
            o=graph.input(OUT, out),
            dO=graph.input(DO, g),
            stats=graph.input(STATS, stats),
            use_deterministic_algorithm=cudnn_graph.settings.deterministic,
            **_options(graph, self._how),
        )
        for uid, tensor, like in zip((DQ, DK, DV), found, gradients, strict=True):
            graph.output(uid, tensor, like)

    def has_plan(self, xp: Any) -> bool:
        """Whether cuDNN can run it."""
        return cudnn_graph.has_plan(xp, self._key, self._specs[0].dtype, self._build, {})

    def run(self, xp: Any, arrays: dict[int, Array], key: Array | None) -> bool:
        """Runs it on arrays by number; False: cuDNN cannot."""
        arrays = {**arrays, **_seeds(key)}
        return cudnn_graph.run_graph(xp, self._key, self._specs[0].dtype, self._build, arrays, begun=True)


# Which cases cuDNN is asked for, and how arrays are shown to it.
#
# It is asked for 16 bits without a mask, (B, H, T, D) in any order of memory whose rows lie in one piece: q, k and v as
# views of one projection are read where they lie, and the result lies as q does.


ALIGNED = 16  # bytes, of every row


def _seen(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array] | None:
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


def _fit(xp: Any, x: Array) -> Array:
    """x, or a copy where a row does not lie in one piece, is not aligned, or is broadcast."""
    steps = [n for n, size in zip(x.strides[:-1], x.shape[:-1], strict=True) if size > 1]
    good = x.strides[-1] == x.itemsize and all(n > 0 and n % ALIGNED == 0 for n in steps)
    return x if good and x.data.ptr % ALIGNED == 0 else xp.array(x, order="C")


def _like(xp: Any, x: Array, last: int | None = None) -> Array:
    """Memory for an array like x, in its order, with `last` elements a row."""
    shape = (*x.shape[:-1], x.shape[-1] if last is None else last)
    return empty_in_order(xp, shape, x.dtype, _order(x))


def _order(x: Array) -> tuple[int, ...]:
    order = order_of(x)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: Any
) -> tuple[Array, Any]:
    """As `ddp.ops.attention`: by cuDNN if it plans both forward and backward, else by the same formulas as on the CPU.

    seed: (2,) of int64 on the device, read where p is not 0
    """
    how = AttentionOptions(float(scale), bool(causal), float(p))
    found = None if mask is not None else _cudnn_forward(xp, q, k, v, how, seed if p else None)
    if found is not None:
        return found
    op: Any = reference.upcast if BFLOAT16 in [x.dtype for x in (q, k, v, mask) if x is not None] else reference
    out, residual = op.forward(xp, q, k, v, mask, scale=scale, causal=causal, p=p, seed=seed)
    return out, (op, residual)


def attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    op, inner = residual
    if op is not None:
        found: Gradients = op.backward(xp, g, needs, saved, inner)
        return found
    q, k, v, _, out = saved
    return [*_cudnn_backward(xp, g, needs, (q, k, v, out), inner), None]


def _cudnn_forward(
    xp: Any, q: Array, k: Array, v: Array, how: AttentionOptions, key: Array | None
) -> tuple[Array, Any] | None:
    """The result and what backward wants; None where cuDNN does not take it."""
    if q.dtype.itemsize != 2 or not q.dtype == k.dtype == v.dtype or how.p >= 1:
        return None
    seen = _seen(q, k, v)
    if seen is None or cudnn_graph.library(xp) is None:
        return None
    queries, keys, values = (_fit(xp, x) for x in seen)
    out = _like(xp, queries, values.shape[-1])
    stats = xp.ndarray((*queries.shape[:3], 1), "float32")
    if not _backward_graph(queries, keys, values, out, stats, how).has_plan(xp):
        return None
    if not forward_graph(xp, queries, keys, values, out, stats, how, key):
        return None
    return out.reshape(*q.shape[:-1], v.shape[-1]), (None, (stats, key, how))


def _joint(q: Array, k: Array, v: Array) -> bool:
    return bool(q.shape == k.shape == v.shape and all(_order(x) == (0, 2, 1, 3) for x in (q, k, v)))


def _gradients(xp: Any, q: Array, k: Array, v: Array) -> list[Array]:
    """Memory for the gradients: of what lies as (B, T, H, D) in parts of one (B, T, 3, H, D), which joins them."""
    if not _joint(q, k, v):
        return [_like(xp, x) for x in (q, k, v)]
    batch, heads, length, depth = q.shape
    joint = xp.ndarray((batch, length, 3, heads, depth), q.dtype)
    return [joint[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


def _gradient_strides(q: Array, k: Array, v: Array) -> list[tuple[int, ...]]:
    """Of what `_gradients` gives, in elements."""
    if not _joint(q, k, v):
        return [dense_strides(x.shape, _order(x)) for x in (q, k, v)]
    _, heads, length, depth = q.shape
    return [(3 * length * heads * depth, depth, 3 * heads * depth, 1)] * 3


def _backward_graph(q: Array, k: Array, v: Array, out: Array, stats: Array, how: AttentionOptions) -> BackwardGraph:
    spec = cudnn_graph.tensor_spec
    found = [spec(x, strides) for x, strides in zip((q, k, v), _gradient_strides(q, k, v), strict=True)]
    return BackwardGraph((*map(spec, (q, k, v, out, out, stats)), *found), how)


def _cudnn_backward(
    xp: Any, g: Array, needs: Needs, saved: tuple[Array, ...], residual: tuple[Array, Array | None, AttentionOptions]
) -> list[Array | None]:
    """The gradients of q, k and v."""
    q, k, v, out = saved
    stats, key, how = residual
    seen = _seen(q, k, v)
    assert seen is not None
    queries, keys, values = (_fit(xp, x) for x in seen)
    shape = (*queries.shape[:3], values.shape[-1])
    out, g = (_fit(xp, x.reshape(shape)) for x in (out, g))
    if g.strides != out.strides:  # the plan that was found in forward is of a gradient that lies as the result does
        lying = _like(xp, out)
        lying[...] = g
        g = lying
    found = _gradients(xp, queries, keys, values)
    arrays = {Q: queries, K: keys, V: values, OUT: out, DO: g, STATS: stats}
    graph = _backward_graph(queries, keys, values, out, stats, how)
    assert graph.run(xp, {**arrays, **dict(zip((DQ, DK, DV), found, strict=True))}, key)
    return [d.reshape(x.shape) if need else None for d, x, need in zip(found, (q, k, v), needs, strict=False)]
