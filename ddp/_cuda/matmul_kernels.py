"""Matrix products on a GPU: through cuBLASLt (`gemm`), or by a kernel of ours for what that lacks.

cuBLASLt takes factors as they lie, in 16 bits too, and fuses what follows a product: the bias, ReLU and GELU (in
its tanh form, the only one that cuBLASLt has), in backward their slopes and the sum of rows that is the bias gradient.
Where it has no such form for a dtype or layout, the parts are launched one by one, with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._cuda import gemm
from ddp._cuda.raw_kernel import FLOATING, KernelSource, flat
from ddp._engine.leaves import AccumulateInto
from ddp.errors import DtypeError
from ddp.ops.activation import gelu
from ddp.ops.arrays import BFLOAT16, Array, total, where_or_zero
from ddp.ops.op import Gradients, Needs, Saved

# One thread an element of the result: for integers, of which there are few, and right before it is fast.
PRODUCT = KernelSource(
    "products",
    """
extern "C" __global__ void product(
    const T* a, const T* b, T* out, Index count, Index m, Index n, Index k, Index a_step, Index b_step
) {
    FOR_EACH(i, count * m * n) {
        Index column = i % n, row = i / n % m, which = i / n / m;
        const T* left = a + which * a_step + row * k;
        const T* right = b + which * b_step + column;
        A sum = A(0);
        for (Index j = 0; j < k; j++) sum += A(left[j]) * A(right[j * n]);
        out[i] = T(sum);
    }
}
""",
    (*FLOATING, "int64"),
)


def product(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b; in `out` if given."""
    made = gemm.gemm(xp, a, b, out)
    return product_by_kernel(xp, a, b, out) if made is None else made


def product_by_kernel(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b by our own kernel. Raises: DtypeError for complex numbers."""
    dtype = np.result_type(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
    kind = dtype if PRODUCT.takes(dtype) else np.dtype("int64")
    if out is not None and out.dtype == "float32" and dtype.itemsize == 2:
        kind = dtype = out.dtype  # what 16 bits are added up in is wanted as it is
    if dtype.kind == "c":
        raise DtypeError(f"matmul on a GPU: no product of {dtype}")
    left, right = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    (m, k), n = left.shape[-2:], right.shape[-1]
    shape = (*lead, *(() if a.ndim == 1 else (m,)), *(() if b.ndim == 1 else (n,)))
    count = math.prod(lead)
    factors: list[Array] = []
    for x in (left, right):
        if math.prod(x.shape[:-2]) not in (1, count):
            x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
        factors.append(flat(xp, x, kind))
    steps = [0 if math.prod(x.shape[:-2]) == 1 else x.shape[-2] * x.shape[-1] for x in factors]
    made = xp.ndarray(shape, kind)
    PRODUCT.over(xp, "product", kind, made.size, *factors, made, count, m, n, k, *steps)
    if kind != dtype:
        made = made != 0 if dtype.kind == "b" else made.astype(dtype)
    if out is None:
        return made
    out[...] = made
    return out


def column_sums(xp: Any, g: Array, out: Array | None = None) -> Array:
    """The sum of g: (rows, n) over its rows."""
    if g.dtype.itemsize > 2:
        return total(g, 0)
    return product(xp, xp.ones((1, g.shape[0]), g.dtype), g, None if out is None else out[None]).reshape(g.shape[1])


def _rows(x: Array) -> Array:
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _laid(xp: Any, g: Array) -> Array:
    """A gradient as rows, copied once if it lies as no product takes it: what sum() hands back is broadcast, say."""
    g = _rows(g)
    down, right = g.strides
    return g if (right == g.itemsize and down > 0) or (down == g.itemsize and right > 0) else xp.array(g, order="C")


def _in_one_piece(xp: Any, b: Array) -> Array:
    return b if b.strides == (b.itemsize,) else flat(xp, b)  # a look is cheaper than the call


def _affine(xp: Any, x: Array, w: Array, b: Array | None) -> Array:
    """x @ w^T + b of rows."""
    if b is None:
        return product(xp, x, w.T)
    out = xp.ndarray((x.shape[0], w.shape[0]), x.dtype)
    if gemm.gemm(xp, x, w.T, out, False, "BIAS", _in_one_piece(xp, b)) is None:
        out = product(xp, x, w.T, out)
        out += b
    return out


def _parameters(
    xp: Any, g: Array, x: Array, wants: Sequence[bool], outs: Sequence[Array | None]
) -> tuple[Array | None, Array | None]:
    """dw = g^T @ x and db = sum g of rows, in one launch where both are wanted, and in `outs` where given."""
    dw, db = outs[0], _free(outs[1])
    if all(wants):
        added = isinstance(dw, AccumulateInto)
        weight = dw.array if isinstance(dw, AccumulateInto) else dw
        if weight is None:
            weight = xp.ndarray((g.shape[1], x.shape[1]), g.dtype)
        bias = xp.ndarray(g.shape[1], g.dtype) if db is None else db
        if gemm.gemm(xp, g.T, x, weight, added, "BGRADB", bias) is not None:
            return weight, bias
    return (
        _placed(xp, g.T, x, dw) if wants[0] else None,
        column_sums(xp, g, db) if wants[1] else None,
    )


def _free(out: Any) -> Array | None:
    """A place to write to; what is to be added to one that is not free is computed elsewhere."""
    return None if type(out) is AccumulateInto else out


def _placed(xp: Any, a: Array, b: Array, out: Any) -> Array:
    """a @ b in its place, or added to what is there."""
    if type(out) is not AccumulateInto:
        return product(xp, a, b, out)
    place = out.array
    if gemm.gemm(xp, a, b, place, True) is None:
        place += product_by_kernel(xp, a, b)
    return place


# As in ddp.ops.products.
def linear(xp: Any, x: Array, w: Array, b: Array | None) -> tuple[Array, Any]:
    out = _affine(xp, _rows(x), w, b)
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.shape[0]), x.shape


def linear_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any, outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    w, x = saved
    g = _laid(xp, g)
    dx = product(xp, g, w) if needs[0] else None
    if len(shape) != 2 and dx is not None:
        dx = dx.reshape(shape)
    if not needs[1]:
        return dx, None, column_sums(xp, g, _free(outs[2])) if needs[2] else None
    return dx, *_parameters(xp, g, _rows(x), needs[1:], outs[1:])


# As in ddp.ops.perceptron.
class Activated(NamedTuple):
    """A fused layer's result, and what its backward needs.

    kept: what the epilogue wrote for backward, with rows of `lead` elements, or the numbers before the activation;
    None where the result says it all; for_epilogue: whether the epilogue of a backward can read it
    """

    out: Array
    kept: Array | None
    lead: int
    for_epilogue: bool
    activation: str


def _activated(xp: Any, x: Array, w: Array, b: Array | None, activation: str, keep: bool) -> Activated:
    """act(x @ w^T + b) of rows."""
    relu = activation == "relu"
    n = w.shape[0]
    lead = -(-n // 128) * 128 if relu else -(-n // 8) * 8
    out = xp.ndarray((x.shape[0], n), x.dtype)
    kept = None
    if keep:
        kept = xp.ndarray((x.shape[0], lead // 8), "uint8") if relu else xp.ndarray((x.shape[0], lead), x.dtype)
    epilogue = ("RELU" if relu else "GELU") + "_AUX" * keep + "_BIAS" * (b is not None)
    bias = None if b is None else _in_one_piece(xp, b)
    if gemm.gemm(xp, x, w.T, out, False, epilogue, bias, kept, lead if keep else 0) is not None:
        return Activated(out, kept, lead, keep, activation)
    before = _affine(xp, x, w, b)
    if relu:
        return Activated(xp.maximum(before, 0, out=before), None, n, False, activation)
    run = gelu.upcast if x.dtype is BFLOAT16 else gelu
    # Rows without gaps may be such as the epilogue of a backward reads.
    return Activated(run.forward(xp, before, tanh=True)[0], before, n, True, activation)


def _slope(xp: Any, g: Array, made: Activated) -> Array:
    """g times the slope of the activation."""
    if made.activation == "relu":
        return where_or_zero(xp, made.out > 0, g)
    assert made.kept is not None
    saved = (made.kept[:, : g.shape[1]],)  # kept may have longer rows
    how = {"tanh": True}
    if g.dtype is BFLOAT16:
        return gelu.upcast.backward(xp, g, (True,), saved, (how, None))[0]
    return gelu.backward(xp, g, (True,), saved, how)[0]


def linear_act(xp: Any, x: Array, w: Array, b: Array | None, activation: str, keep: bool) -> tuple[Array, Any]:
    # ReLU's slope is in its result.
    made = _activated(xp, _rows(x), w, b, activation, keep and activation != "relu")
    shaped = made.out if x.ndim == 2 else made.out.reshape(*x.shape[:-1], w.shape[0])
    return shaped, (made if activation == "relu" else made._replace(out=None), x.shape)


def linear_act_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    made, shape = residual
    return linear_backward(xp, _slope(xp, _rows(g), made), needs, saved, shape, outs)


def feed_forward(
    xp: Any, x: Array, w1: Array, b1: Array | None, w2: Array, b2: Array | None, activation: str, keep: bool
) -> tuple[Array, Any]:
    made = _activated(xp, _rows(x), w1, b1, activation, keep)
    out = _affine(xp, made.out, w2, b2)
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w2.shape[0]), (made, x.shape)


def feed_forward_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Sequence[Array | None] = (None,) * 5
) -> Gradients:
    w2, w1, x = saved
    made, shape = residual
    g = _laid(xp, g)
    dx = dw1 = db1 = dw2 = db2 = None
    if needs[3] or needs[4]:
        dw2, db2 = _parameters(xp, g, made.out, needs[3:5], outs[3:5])
    if needs[0] or needs[1] or needs[2]:
        before, db1 = _before(xp, g, w2, made, _free(outs[2]), needs[2])
        if needs[0]:
            dx = product(xp, before, w1).reshape(shape)
        if needs[1]:
            dw1 = _placed(xp, before.T, _rows(x), outs[1])
    return dx, dw1, db1, dw2, db2


def _before(
    xp: Any, g: Array, w: Array, made: Activated, out: Array | None, summed: bool
) -> tuple[Array, Array | None]:
    """The gradient before the activation, and its sum over rows if wanted: one launch where the library has it."""
    if made.for_epilogue:
        before = xp.ndarray((g.shape[0], w.shape[1]), g.dtype)
        sums = (xp.ndarray(w.shape[1], g.dtype) if out is None else out) if summed else None
        epilogue = ("DRELU" if made.activation == "relu" else "DGELU") + "_BGRAD" * summed
        if made.lead % 8 == 0 and gemm.gemm(xp, g, w, before, False, epilogue, sums, made.kept, made.lead) is not None:
            return before, sums
    before = _slope(xp, product(xp, g, w), made)
    return before, column_sums(xp, before, out) if summed else None
