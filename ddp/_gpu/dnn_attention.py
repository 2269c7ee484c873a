"""Attention by cuDNN: softmax(scale * q @ k^T) @ v in one kernel, and its gradients in another.

Arrays are (B, H, T, D) with any strides whose last one is of one element, so that q, k and v may be views of one
projection. Key and value may have fewer heads, each of which serves as many neighbours of query's. Stats is the
logarithm of the sum of the exponentials of each query's scores, (B, H, T, 1) in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddp._gpu import dnn
from ddp._gpu.dnn import Graph, Spec

Array = Any
Q, K, V, OUT, STATS, SEED, OFFSET, DO, DQ, DK, DV = range(1, 12)  # the numbers of the tensors
_ONE = Spec((1, 1, 1, 1), (1, 1, 1, 1), "int64")


class How(NamedTuple):
    """scale: of the scores; causal: query i sees keys 0 to i; p: the share of probabilities that is dropped."""

    scale: float
    causal: bool
    p: float


def _options(graph: Graph, how: How) -> dict[str, Any]:
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


def forward(xp: Any, q: Array, k: Array, v: Array, out: Array, stats: Array, how: How, key: Array | None) -> bool:
    """Writes `out` and `stats`; False: cuDNN cannot. key: (2,) of int64, the seed and the offset of what is dropped."""
    specs = [dnn.spec(each) for each in (q, k, v, out, stats)]

    def build(graph: Graph) -> None:
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
    return dnn.ran(xp, ("attention", *specs, how), specs[0].dtype, build, arrays)


class Backward:
    """The graph of the gradients of q, k and v, for arrays like these."""

    def __init__(self, q: Spec, k: Spec, v: Spec, out: Spec, g: Spec, stats: Spec, found: list[Spec], how: How) -> None:
        self._specs = q, k, v, out, g, stats, *found
        self._how = how

    def _build(self, graph: Graph) -> None:
        q, k, v, out, g, stats, dq, dk, dv = self._specs
        found = graph.raw.sdpa_backward(
            q=graph.input(Q, q),
            k=graph.input(K, k),
            v=graph.input(V, v),
            o=graph.input(OUT, out),
            dO=graph.input(DO, g),
            stats=graph.input(STATS, stats),
            use_deterministic_algorithm=dnn.settings.deterministic,
            **_options(graph, self._how),
        )
        for uid, tensor, like in zip((DQ, DK, DV), found, (dq, dk, dv), strict=True):
            graph.output(uid, tensor, like)

    @property
    def _key(self) -> Any:
        return "gradient of attention", *self._specs, self._how

    def there(self, xp: Any) -> bool:
        """Whether cuDNN can run it."""
        return dnn.has(xp, self._key, self._specs[0].dtype, self._build, {})

    def run(self, xp: Any, arrays: dict[int, Array], key: Array | None) -> bool:
        """Runs it on arrays by number; False: cuDNN cannot."""
        return dnn.ran(
            xp, self._key, self._specs[0].dtype, self._build, {**arrays, **_seeds(key)}, begun=bool(self._how.p)
        )
