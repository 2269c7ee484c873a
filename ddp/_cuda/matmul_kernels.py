"""Matrix products and linear layers on a GPU, by cuBLASLt (`gemm`), or by our own kernel if it does not support a case.

cuBLASLt multiplies matrices of most layouts without a copy, also in 16 bits. Its epilogues compute, in the same launch,
the bias, ReLU and GELU (only the tanh formula), and in backward their derivatives and the bias gradient. If it has no
epilogue for a dtype or layout, the parts are launched one by one, and compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._cuda import gemm
from ddp._cuda.raw_kernel import FLOATING, KernelSource, contiguous
from ddp._engine.grad_buffer import AccumulateInto
from ddp.errors import DtypeError
from ddp.ops.activation import gelu
from ddp.ops.arrays import BFLOAT16, Array, total, where_or_zero
from ddp.ops.op import Gradients, Needs, Saved
from ddp.ops.products import rows_of

# A simple kernel, with a thread for each element of the result, for integers and for what cuBLASLt does not support.
PRODUCT = KernelSource(
    "products",
    """
extern "C" __global__ void product(
    const T* a, const T* b, T* out, Index count, Index m, Index n, Index k, Index a_step, Index b_step
) {
    FOR_EACH(i, count * m * n) {
        Index column = i % n, row = i / n % m, batch = i / n / m;
        const T* left = a + batch * a_step + row * k;
        const T* right = b + batch * b_step + column;
        A sum = A(0);
        for (Index j = 0; j < k; j++) sum += A(left[j]) * A(right[j * n]);
        out[i] = T(sum);
    }
}
""",
    (*FLOATING, "int64"),
)


def product(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b, written to `out` if that is given."""
    result = gemm.gemm(xp, a, b, out)
    return product_by_kernel(xp, a, b, out) if result is None else result


def product_by_kernel(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b by our own kernel, written to `out` if that is given. Raises: DtypeError for complex numbers."""
    dtype = np.result_type(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
    kernel_dtype = dtype if PRODUCT.takes(dtype) else np.dtype("int64")
    if out is not None and out.dtype == "float32" and dtype.itemsize == 2:
        # The sums of 16-bit products are float32, and are not rounded.
        dtype = out.dtype
        kernel_dtype = dtype
    if dtype.kind == "c":
        raise DtypeError(f"matmul on a GPU: no product of {dtype}")
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    batch_shape = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    m, k = left.shape[-2:]
    n = right.shape[-1]
    shape = (*batch_shape, *(() if a.ndim == 1 else (m,)), *(() if b.ndim == 1 else (n,)))
    count = math.prod(batch_shape)
    factors: list[Array] = []
    for x in (left, right):
        if math.prod(x.shape[:-2]) not in (1, count):
            x = xp.broadcast_to(x, (*batch_shape, *x.shape[-2:]))
        factors.append(contiguous(xp, x, kernel_dtype))
    steps = [0 if math.prod(x.shape[:-2]) == 1 else x.shape[-2] * x.shape[-1] for x in factors]
    result = xp.ndarray(shape, kernel_dtype)
    PRODUCT.launch(xp, "product", kernel_dtype, result.size, *factors, result, count, m, n, k, *steps)
    if kernel_dtype != dtype:
        result = result != 0 if dtype.kind == "b" else result.astype(dtype)
    if out is None:
        return result
    out[...] = result
    return out


def column_sums(xp: Any, g: Array, out: Array | None = None) -> Array:
    """The sum of g (rows, n) over its rows. out: memory for the result; used only if g has 16 bits"""
    if g.dtype.itemsize > 2:
        return total(g, 0)
    # As a product with ones, which cuBLASLt sums in float32.
    return product(xp, xp.ones((1, g.shape[0]), g.dtype), g, None if out is None else out[None]).reshape(g.shape[1])


def _gradient_rows(xp: Any, g: Array) -> Array:
    """A gradient as (rows, n). Copied if cuBLASLt cannot read it, for example the broadcast gradient of a sum.

    Without this copy, every product that reads the gradient would make one.
    """
    g = rows_of(g)
    row_stride, column_stride = g.strides
    readable = (column_stride == g.itemsize and row_stride > 0) or (row_stride == g.itemsize and column_stride > 0)
    return g if readable else xp.array(g, order="C")


def _contiguous_bias(xp: Any, b: Array) -> Array:
    return b if b.strides == (b.itemsize,) else contiguous(xp, b)  # to compare takes less time than to call CuPy


def _affine(xp: Any, x: Array, w: Array, b: Array | None) -> Array:
    """x @ w^T + b for x: (rows, n)."""
    if b is None:
        return product(xp, x, w.T)
    out = xp.ndarray((x.shape[0], w.shape[0]), x.dtype)
    if gemm.gemm(xp, x, w.T, out, False, "BIAS", _contiguous_bias(xp, b)) is None:
        out = product(xp, x, w.T, out)
        out += b
    return out


def _parameter_gradients(
    xp: Any, g: Array, x: Array, needs: Sequence[bool], grad_outs: Sequence[Array | None]
) -> tuple[Array | None, Array | None]:
    """dw = g^T @ x and db = sum of g over rows. One launch, if both are needed and cuBLASLt has the epilogue."""
    grad_out = grad_outs[0]
    db = _unless_accumulating(grad_outs[1])
    if all(needs):
        accumulate = isinstance(grad_out, AccumulateInto)
        weight = grad_out.array if isinstance(grad_out, AccumulateInto) else grad_out
        if weight is None:
            weight = xp.ndarray((g.shape[1], x.shape[1]), g.dtype)
        bias = xp.ndarray(g.shape[1], g.dtype) if db is None else db
        if gemm.gemm(xp, g.T, x, weight, accumulate, "BGRADB", bias) is not None:
            return weight, bias
    return (
        _product_into(xp, g.T, x, grad_out) if needs[0] else None,
        column_sums(xp, g, db) if needs[1] else None,
    )


def _unless_accumulating(grad_out: Any) -> Array | None:
    """`grad_out`, or None for an `AccumulateInto`: then the gradient buffer adds the result that backward returns."""
    return None if type(grad_out) is AccumulateInto else grad_out


def _product_into(xp: Any, a: Array, b: Array, grad_out: Any) -> Array:
    """Writes a @ b to `grad_out`, adds it to an `AccumulateInto`, or returns a new array if `grad_out` is None."""
    if type(grad_out) is not AccumulateInto:
        return product(xp, a, b, grad_out)
    out = grad_out.array
    if gemm.gemm(xp, a, b, out, True) is None:
        out += product_by_kernel(xp, a, b)
    return out


# The device kernels of `linear`, `linear_act` and `feed_forward` in ddp.ops.products.


def linear(xp: Any, x: Array, w: Array, b: Array | None) -> tuple[Array, Any]:
    out = _affine(xp, rows_of(x), w, b)
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.shape[0]), x.shape


def linear_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any, grad_outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    w, x = saved
    g = _gradient_rows(xp, g)
    dx = product(xp, g, w) if needs[0] else None
    if len(shape) != 2 and dx is not None:
        dx = dx.reshape(shape)
    if not needs[1]:
        return dx, None, column_sums(xp, g, _unless_accumulating(grad_outs[2])) if needs[2] else None
    return dx, *_parameter_gradients(xp, g, rows_of(x), needs[1:], grad_outs[1:])


class LayerResult(NamedTuple):
    """The result of act(x @ w^T + b), and what its backward needs.

    aux: what the epilogue wrote for backward: an array with rows of `aux_ld` elements (bits for ReLU), or None.
        Without the epilogue: the values before GELU; None for ReLU
    for_epilogue: whether an epilogue of cuBLASLt can read `aux`
    """

    out: Array
    aux: Array | None
    aux_ld: int
    for_epilogue: bool
    activation: str


def _layer(xp: Any, x: Array, w: Array, b: Array | None, activation: str, with_aux: bool) -> LayerResult:
    """act(x @ w^T + b) for x: (rows, n). with_aux: computes `aux` for backward"""
    relu = activation == "relu"
    n = w.shape[0]
    aux_ld = -(-n // 128) * 128 if relu else -(-n // 8) * 8
    out = xp.ndarray((x.shape[0], n), x.dtype)
    aux = None
    if with_aux:
        aux = xp.ndarray((x.shape[0], aux_ld // 8), "uint8") if relu else xp.ndarray((x.shape[0], aux_ld), x.dtype)
    epilogue = ("RELU" if relu else "GELU") + "_AUX" * with_aux + "_BIAS" * (b is not None)
    bias = None if b is None else _contiguous_bias(xp, b)
    if gemm.gemm(xp, x, w.T, out, False, epilogue, bias, aux, aux_ld if with_aux else 0) is not None:
        return LayerResult(out, aux, aux_ld, with_aux, activation)
    before = _affine(xp, x, w, b)
    if relu:
        return LayerResult(xp.maximum(before, 0, out=before), None, n, False, activation)
    run = gelu.upcast if x.dtype is BFLOAT16 else gelu
    # The epilogue of backward can read the values before GELU. `_input_gradient` checks their leading dimension.
    return LayerResult(run.forward(xp, before, tanh=True)[0], before, n, True, activation)


def _activation_backward(xp: Any, g: Array, layer: LayerResult) -> Array:
    """g times the derivative of the activation."""
    if layer.activation == "relu":
        return where_or_zero(xp, layer.out > 0, g)
    assert layer.aux is not None
    saved = (layer.aux[:, : g.shape[1]],)  # without the padding of rows
    options = {"tanh": True}
    if g.dtype is BFLOAT16:
        return gelu.upcast.backward(xp, g, (True,), saved, (options, None))[0]
    return gelu.backward(xp, g, (True,), saved, options)[0]


def linear_act(xp: Any, x: Array, w: Array, b: Array | None, activation: str, keep: bool) -> tuple[Array, Any]:
    # No `aux` for ReLU: its derivative follows from its result.
    layer = _layer(xp, rows_of(x), w, b, activation, keep and activation != "relu")
    out = layer.out if x.ndim == 2 else layer.out.reshape(*x.shape[:-1], w.shape[0])
    return out, (layer if activation == "relu" else layer._replace(out=None), x.shape)


def linear_act_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    layer, shape = residual
    return linear_backward(xp, _activation_backward(xp, rows_of(g), layer), needs, saved[:2], shape, grad_outs)


def feed_forward(
    xp: Any, x: Array, w1: Array, b1: Array | None, w2: Array, b2: Array | None, activation: str, keep: bool
) -> tuple[Array, Any]:
    hidden = _layer(xp, rows_of(x), w1, b1, activation, keep)
    out = _affine(xp, hidden.out, w2, b2)
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w2.shape[0]), (hidden, x.shape)


def feed_forward_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Sequence[Array | None] = (None,) * 5
) -> Gradients:
    w2, w1, x = saved
    hidden, shape = residual
    g = _gradient_rows(xp, g)
    dx = dw1 = db1 = dw2 = db2 = None
    if needs[3] or needs[4]:
        dw2, db2 = _parameter_gradients(xp, g, hidden.out, needs[3:5], grad_outs[3:5])
    if needs[0] or needs[1] or needs[2]:
        dz, db1 = _input_gradient(xp, g, w2, hidden, _unless_accumulating(grad_outs[2]), needs[2])
        if needs[0]:
            dx = product(xp, dz, w1).reshape(shape)
        if needs[1]:
            dw1 = _product_into(xp, dz.T, rows_of(x), grad_outs[1])
    return dx, dw1, db1, dw2, db2


def _input_gradient(
    xp: Any, g: Array, w: Array, hidden: LayerResult, out: Array | None, with_sums: bool
) -> tuple[Array, Array | None]:
    """The gradient of act(z) @ w^T with respect to z, (rows, n), and with `with_sums` its sum over rows.

    Needs one launch if cuBLASLt has the epilogue. hidden: the result of act(z); out: memory for the sum, or None
    """
    if hidden.for_epilogue and hidden.aux_ld % 8 == 0:
        dz = xp.ndarray((g.shape[0], w.shape[1]), g.dtype)
        sums = None
        if with_sums:
            sums = xp.ndarray(w.shape[1], g.dtype) if out is None else out
        epilogue = ("DRELU" if hidden.activation == "relu" else "DGELU") + "_BGRAD" * with_sums
        if gemm.gemm(xp, g, w, dz, False, epilogue, sums, hidden.aux, hidden.aux_ld) is not None:
            return dz, sums
    dz = _activation_backward(xp, product(xp, g, w), hidden)
    return dz, column_sums(xp, dz, out) if with_sums else None
