"""Matrix products: matmul, einsum, the linear layer, and layers fused with an activation; factors and inverses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.ops.activation import gelu
from ddp.ops.arrays import (
    Array,
    ForwardResult,
    Ints,
    array_function,
    astype,
    compute_dtype,
    total,
    unbroadcast,
    where_or_zero,
)
from ddp.ops.op import Gradients, Needs, Op, Saved, unary_op
from ddp.ops.shape import zeros_but

# Matrix products, and the linear layer: its product and its bias are one op.


@array_function
def product(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """Returns a @ b, written to `out` if given. NumPy's float16 products are always in new memory."""
    # NumPy has no float16 kernel: its own loop is 250 times slower than float32.
    if a.dtype.char == "e":
        float32 = np.dtype("float32")
        float16 = np.dtype("float16")
        return astype(xp, astype(xp, a, float32) @ astype(xp, b, float32), float16)
    return xp.matmul(a, b, out=out)


def rows_of(x: Array) -> Array:
    """Reshapes x (..., n) to (rows, n)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@functools.lru_cache(maxsize=32)
def _kept_ones(n: int, dtype: Any) -> Array:
    return np.ones(n, dtype)


@array_function
def ones(xp: Any, n: int, dtype: Any) -> Array:
    """A vector of n ones, which must not be written to: calls may share it. A product with it is a sum."""
    return _kept_ones(n, dtype) if n <= 1 << 16 else xp.ones(n, dtype)


@array_function
def column_sums(xp: Any, g: Array, out: Array | None = None) -> Array:
    """The sum of g (rows, n) over its rows. The result may be written to `out`."""
    if g.dtype.char == "e":
        return total(g, 0)
    # A product of a vector and a matrix is faster than NumPy's sum over axis 0, for large and small g.
    return xp.matmul(ones(xp, g.shape[0], g.dtype), g, out=out)


# z = x @ y;  dx = g @ y^T, dy = x^T @ g, summed over broadcast leading axes; a vector is a matrix of one row or column
def _matmul(xp: Any, x: Array, y: Array) -> ForwardResult:
    shapes = x.shape, y.shape
    if y.ndim == 2 and x.ndim > 2:  # one large product instead of many small ones
        return product(xp, rows_of(x), y).reshape(*x.shape[:-1], y.shape[1]), shapes
    return product(xp, x, y), shapes


def _matmul_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any, grad_outs: Sequence[Array | None] = (None, None)
) -> Gradients:
    y, x = saved
    x_shape, y_shape = shapes
    dx = dy = None
    if len(y_shape) == 2 and len(x_shape) > 1:
        rows = rows_of(g)
        if needs[0]:
            dx = product(xp, rows, y.T).reshape(x_shape)
        if needs[1]:
            dy = product(xp, rows_of(x).T, rows, grad_outs[1])
        return dx, dy
    if len(x_shape) == 1:
        g = g[..., None, :] if len(y_shape) > 1 else g[None]
    if len(y_shape) == 1:
        g = g[..., None]
    if needs[0]:
        shape = (1, *x_shape) if len(x_shape) == 1 else x_shape
        columns = y[:, None] if len(y_shape) == 1 else y
        dx = unbroadcast(product(xp, g, columns.swapaxes(-1, -2)), shape).reshape(x_shape)
    if needs[1]:
        shape = (*y_shape, 1) if len(y_shape) == 1 else y_shape
        lines = x[None] if len(x_shape) == 1 else x
        dy = unbroadcast(product(xp, lines.swapaxes(-1, -2), g), shape).reshape(y_shape)
    return dx, dy


matmul = Op("matmul", _matmul, _matmul_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)}, grad_out=True)


# z = x @ w^T + b;  dx = g @ w, dw = g^T @ x, db = sum g, rows of all leading axes taken together
def _linear(xp: Any, x: Array, w: Array, b: Array | None) -> ForwardResult:
    out = product(xp, rows_of(x), w.T)
    if b is not None:
        out += b
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.shape[0]), x.shape


def _linear_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any, grad_outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    w, x = saved
    g = rows_of(g)
    dx = dw = db = None
    if needs[0]:
        dx = product(xp, g, w)
        if len(shape) != 2:
            dx = dx.reshape(shape)
    if needs[1]:
        dw = product(xp, g.T, rows_of(x), grad_outs[1])
    if needs[2]:
        db = column_sums(xp, g, grad_outs[2])
    return dx, dw, db


linear = Op(
    "linear",
    _linear,
    _linear_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
    grad_out=True,
)


# einsum of two factors, as one batched matrix product. Labels are integers that stand for the letters of `np.einsum`.


Labels = Ints


# Merging batch axes copies arrays that are not contiguous. A GPU does not need it: its batched product takes strides.
@array_function
def merges_batches(xp: Any) -> bool:
    """Whether `contract` merges several batch axes into one before a product."""
    return True


def contract(xp: Any, x: Array, of_x: Labels, y: Array, of_y: Labels, of_out: Labels) -> Array:
    """The product of x and y, summed over the labels that `of_out` lacks.

    No label occurs twice in of_x, in of_y or in of_out. A label that only x or only y has must be in of_out.
    """
    batch = [k for k in of_out if k in of_x and k in of_y]
    rows = [k for k in of_out if k in of_x and k not in of_y]
    across = [k for k in of_out if k in of_y and k not in of_x]
    inner = [k for k in of_x if k in of_y and k not in of_out]
    size = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_y, y.shape, strict=True))}

    stacks = [batch] if merges_batches(xp) else [[k] for k in batch]

    def matrix(array: Array, labels: Labels, *groups: Sequence[int]) -> Array:
        order = [labels.index(k) for group in groups for k in group]
        return array.transpose(order).reshape([math.prod([size[k] for k in group]) for group in groups])

    out = product(xp, matrix(x, of_x, *stacks, rows, inner), matrix(y, of_y, *stacks, inner, across))
    labels_of_product = (*batch, *rows, *across)
    return out.reshape([size[k] for k in labels_of_product]).transpose([labels_of_product.index(k) for k in of_out])


# z = sum x*y over the labels that z lacks;  dx = sum g*y over those that x lacks, dy = sum x*g over those that y lacks
def _einsum(xp: Any, x: Array, y: Array, labels: tuple[Labels, Labels, Labels]) -> ForwardResult:
    return contract(xp, x, labels[0], y, labels[1], labels[2]), labels


def _einsum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, labels: Any) -> Gradients:
    y, x = saved
    of_x, of_y, of_out = labels
    return (
        contract(xp, g, of_out, y, of_y, of_x) if needs[0] else None,
        contract(xp, g, of_out, x, of_x, of_y) if needs[1] else None,
    )


einsum = Op("einsum", _einsum, _einsum_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)})


def _diagonals(xp: Any, x: Array, labels: Labels) -> Array:
    """The diagonal of x over axes with the same label: a view with one axis per label, in order of first appearance."""
    once = tuple(dict.fromkeys(labels))
    shape = [x.shape[labels.index(k)] for k in once]
    strides = [sum(s for s, k in zip(x.strides, labels, strict=True) if k == label) for label in once]
    return xp.lib.stride_tricks.as_strided(x, shape, strides)


# z_i.. = x_i..i..;  dx = g on the diagonal, 0 elsewhere
def _take_diagonals(xp: Any, x: Array, labels: Labels) -> ForwardResult:
    return _diagonals(xp, x, labels).copy(), (x.shape, labels)


def _take_diagonals_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, labels = residual
    return (zeros_but(xp, g, shape, lambda xp, x: _diagonals(xp, x, labels)),)


diagonals = Op("diagonals", _take_diagonals, _take_diagonals_backward, inputs=("x",))


# A linear layer with its activation, and two linear layers with an activation between: the feed-forward part of a
# Transformer.
#
# On a GPU, the products compute the activation, its derivative and the bias gradients, too, which saves passes over
# arrays of the hidden width. Elsewhere these are separate operations, one after the other.


ACTIVATIONS = ("relu", "gelu_tanh")


def _act(xp: Any, x: Array, activation: str) -> tuple[Array, Any]:
    """z = act(x), and what its backward reads."""
    if activation == "relu":
        z = xp.maximum(x, 0)
        return z, z > 0
    return gelu.reference.forward(xp, x, tanh=True)[0], x


def _act_backward(xp: Any, g: Array, kept: Array, activation: str) -> Array:
    if activation == "relu":
        return where_or_zero(xp, kept, g)
    return gelu.reference.backward(xp, g, (True,), (kept,), {"tanh": True})[0]


# z = act(x @ w^T + b);  with dy = g*act': dx = dy @ w, dw = dy^T @ x, db = sum dy
def _linear_act(xp: Any, x: Array, w: Array, b: Array | None, activation: str, keep: bool) -> ForwardResult:
    y, shape = _linear(xp, x, w, b)
    z, kept = _act(xp, y, activation)
    return z, (kept if keep else None, activation, shape)


def _linear_act_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    kept, activation, shape = residual
    return _linear_backward(xp, _act_backward(xp, g, kept, activation), needs, saved[:2], shape, grad_outs)


linear_act = Op(
    "linear_act",
    _linear_act,
    _linear_act_backward,
    inputs=("x", "w", "b"),
    # Backward does not read b. It is saved so that `keep_call` stores the call even if only b needs a gradient.
    saves={"x": ("w",), "w": ("x",), "b": ("b",)},
    derived=True,
    grad_out=True,
)


# h = act(x @ w1^T + b1), z = h @ w2^T + b2;  dw2 = g^T @ h, db2 = sum g;  dx, dw1 and db1 as above, dy = (g @ w2)*act'
def _feed_forward(
    xp: Any, x: Array, w1: Array, b1: Array | None, w2: Array, b2: Array | None, activation: str, keep: bool
) -> ForwardResult:
    hidden, residual = _linear_act(xp, x, w1, b1, activation, keep)
    z, shape = _linear(xp, hidden, w2, b2)
    return z, (hidden, residual, shape)


def _feed_forward_backward(
    xp: Any,
    g: Array,
    needs: Needs,
    saved: Saved,
    residual: Any,
    grad_outs: Sequence[Array | None] = (None, None, None, None, None),
) -> Gradients:
    w2, w1, x = saved
    hidden, inner, shape = residual
    first = any(needs[:3])
    wants = (first, *needs[3:])
    places = (None, *grad_outs[3:])
    dh, dw2, db2 = _linear_backward(xp, g, wants, (w2, hidden), shape, places)
    if not first:
        return None, None, None, dw2, db2
    assert dh is not None
    return (*_linear_act_backward(xp, dh, needs[:3], (w1, x), inner, grad_outs[:3]), dw2, db2)


feed_forward = Op(
    "feed_forward",
    _feed_forward,
    _feed_forward_backward,
    inputs=("x", "w1", "b1", "w2", "b2"),
    saves={"x": ("w2", "w1"), "w1": ("w2", "x"), "b1": ("w2",), "w2": (), "b2": ()},
    derived=True,
    grad_out=True,
)


# Cholesky factors and inverses of matrices (..., n, n). LAPACK has no float16.


@array_function
def invert(xp: Any, x: Array) -> Array:
    """The inverses of matrices x (..., n, n)."""
    return xp.linalg.inv(x.astype(compute_dtype(x.dtype))).astype(x.dtype)


# z = x^-1;  dx = -z^T @ g @ z^T
def _inverse_gradient(xp: Any, g: Array, z: Array) -> Array:
    turned = z.swapaxes(-1, -2)
    return -product(xp, product(xp, turned, g), turned)


inverse = unary_op("inverse", invert, _inverse_gradient, "out")


def _cholesky(xp: Any, x: Array) -> Array:
    return xp.linalg.cholesky(x.astype(compute_dtype(x.dtype))).astype(x.dtype)


# x = z @ z^T, z lower triangular;  with p = z^T @ g, l its lower triangle, and s = l without the diagonal:
# dx = z^-T @ (l + s^T)/2 @ z^-1.  Source: Murray 2016, arXiv:1602.07527.
def _cholesky_gradient(xp: Any, g: Array, z: Array) -> Array:
    p = product(xp, z.swapaxes(-1, -2), g)
    symmetric = xp.tril(p) + xp.tril(p, -1).swapaxes(-1, -2)
    inverted = invert(xp, z)
    return product(xp, product(xp, inverted.swapaxes(-1, -2), symmetric / 2), inverted)


cholesky = unary_op("cholesky", _cholesky, _cholesky_gradient, "out")
