"""Losses: cross-entropy and its relatives, likelihoods, distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp.ops.arrays import Array, ForwardResult, compute_dtype, sum_of_squares, total, upcast
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.softmax_ops import exponentials

# Losses of classification. Cross entropy keeps no probabilities: backward computes them again from the logits, which
# halves the memory that a large vocabulary takes.


def columns(x: Array) -> Array:
    """Reshapes x (N, C, ...) to (N, C) or (N, C, M): a view if the memory allows one."""
    return x if x.ndim == 2 else x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


def classes(xp: Any, x: Array, target: Array, keep: Array | None, weight: Array | None) -> tuple[Array, Any]:
    """The positions of the targets in x.ravel(), and the weight of each sample: an array, or None if all are 1.

    x: (N, C) or (N, C, M); target: (N, M'), M' = 1 or M; keep: (N, M') bool, False for ignored targets; None if all
    targets are kept.
    """
    n, count = x.shape[:2]
    inner = x.shape[2] if x.ndim > 2 else 1
    if keep is not None:
        target = target * keep  # class 0 stands in for ignored targets
    flat_index = target * inner if inner > 1 else target
    flat_index = flat_index + xp.arange(0, n * count * inner, count * inner).reshape(n, 1)
    if inner > 1:
        flat_index += xp.arange(inner)
    weights = None if weight is None else weight.take(target).astype(compute_dtype(x.dtype), copy=False)
    if keep is not None:
        weights = keep.astype(compute_dtype(x.dtype)) if weights is None else weights * keep
    return flat_index, weights


def sample_gradient(
    xp: Any, g: Array, scale: Any, weights: Array | None, keep: Array | None, flat_index: Array, reduction: str
) -> Array:
    """The gradient of each sample's unreduced loss, times its weight if there are weights.

    scale: for the mean, 1 / the sum of the weights. Returns (N, M') as in `classes`, or () if all samples have the same
    gradient.
    """
    if reduction == "none":
        g = g.reshape(flat_index.shape)
    elif reduction == "mean":
        g = g * scale
    if weights is not None:
        g = g * weights
    # If no sample is kept, the mean is nan and its scale infinite; ignored samples get 0 even then.
    return g if keep is None else xp.where(keep.reshape(flat_index.shape), g, g.dtype.type(0))


def reduce_weighted(xp: Any, losses: Array, weights: Array | None, reduction: str) -> tuple[Array, Any]:
    """Reduces losses that were multiplied by their weights: to the sum, or to the sum / the sum of the weights.

    weights: None: all are 1. Returns: the result, and its scale: 1 for the sum, else 1 / the sum of the weights (0 if
    there are neither losses nor weights).
    """
    added_up = losses.sum()
    if reduction == "sum":
        return added_up, 1.0
    if weights is None:
        # The mean over no samples is nan, as in PyTorch.
        return (added_up / losses.size, 1 / losses.size) if losses.size else (xp.full((), xp.nan), 0.0)
    weight = weights.sum()
    return added_up / weight, 1 / weight


# Unreduced: z_n = w_n*(1-s)*(l_n - x_n,t(n)) + s/C*sum_c w_c*(l_n - x_nc), l_n = log sum_c e^x_nc, t(n) the target;
# dx_nc = g_n*(w_n*(1-s)*(p_nc - [c = t(n)]) + s/C*(p_nc*sum_c w_c - w_c)), p_nc = e^(x_nc - l_n)
def _cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
    float32_loss: bool = False,
) -> ForwardResult:
    """x: (N, C, ...); target: (N, ...) of integers in [0, C), or anything where `keep` is False; weight: (C,).

    Backward reads `target`, too: the caller must not write to it. float32_loss: the loss is float32, whatever the dtype
    of x
    """
    rows = columns(x)
    shape = target.shape
    target = target.reshape(len(rows), rows.shape[2] if rows.ndim > 2 else 1)
    keep = None if keep is None else keep.reshape(target.shape)
    flat_index, weights = classes(xp, rows, target, keep, weight)
    compute = compute_dtype(x.dtype)
    if weight is not None:
        weight = weight.astype(compute, copy=False)
    top, sums = exponential_sums(xp, rows.astype(compute, copy=False))
    # One number per sample, in float64: a loss near 0 is the difference of large numbers.
    logs = (xp.log(sums, dtype="float64") + top).reshape(flat_index.shape)
    losses = logs - rows.reshape(-1).take(flat_index)
    if weights is not None:
        losses *= weights
    if keep is not None:
        losses = xp.where(keep, losses, 0)  # the product with 0 would be nan for infinite logits
    if smoothing:
        mass = rows.shape[1] if weight is None else weight.sum()
        weighted = rows.astype(compute, copy=False)
        weighted = weighted if weight is None else weighted * weight.reshape(-1, *[1] * (rows.ndim - 2))
        even = logs * mass - weighted.sum(axis=1).reshape(flat_index.shape)
        if keep is not None:
            even = xp.where(keep, even, 0)
        losses = losses * (1 - smoothing) + even * (smoothing / rows.shape[1])
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(shape)
    else:
        out, scale = reduce_weighted(xp, losses, weights, reduction)
    dtype = "float32" if float32_loss else x.dtype
    return out.astype(dtype), (top, sums, target, keep, weight, smoothing, scale, reduction)


def exponential_sums(xp: Any, x: Array) -> tuple[Array, Array]:
    """The maxima, and the sums of e^(x - maximum), along axis 1, which gets size 1. x: (N, C) or (N, C, M)."""
    if not x.size:
        empty = xp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype)
        return empty, empty
    return exponentials(xp, x, 1)[1:]


def scaled_exponentials(xp: Any, x: Array, top: Array, factor: Array) -> Array:
    """factor * e^(x - top). x: (N, C) or (N, C, M); top, factor: of size 1 along axis 1."""
    e = xp.exp(x - top)
    e *= factor
    return e


def _cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x = saved[0]
    top, sums, target, keep, weight, smoothing, scale, reduction = residual
    rows = columns(x)
    compute = sums.dtype
    flat_index, weights = classes(xp, rows, target, keep, weight)
    at_target = of_all = sample_gradient(xp, g.astype(compute, copy=False), scale, weights, keep, flat_index, reduction)
    even = None
    if smoothing:
        part = sample_gradient(xp, g.astype(compute, copy=False), scale, None, keep, flat_index, reduction) * (
            smoothing / rows.shape[1]
        )
        mass = rows.shape[1] if weight is None else weight.sum()
        at_target = at_target * (1 - smoothing)
        of_all = at_target + part * mass
        even = xp.broadcast_to(part, flat_index.shape).reshape(sums.shape).astype(compute, copy=False)
    factor = xp.divide(of_all.reshape(sums.shape) if of_all.ndim else of_all, sums, dtype=compute)
    dx = scaled_exponentials(xp, rows.astype(compute, copy=False), top, factor)
    if even is not None:
        dx -= even if weight is None else even * weight.reshape(-1, *[1] * (dx.ndim - 2))
    dx = xp.ascontiguousarray(dx, x.dtype)
    flat = dx.reshape(-1)
    flat[flat_index] -= at_target.astype(dx.dtype, copy=False)
    return (dx.reshape(x.shape),)


cross_entropy = Op("cross_entropy", _cross_entropy, _cross_entropy_backward, inputs=("x",), saves=("x",), derived=True)


# Unreduced: z_n = sum_c t_nc*(l_n - x_nc), l_n = log sum_c e^x_nc;  dx_nc = g_n*(p_nc*sum_c t_nc - t_nc),
# dt_nc = g_n*(l_n - x_nc)
def _soft_cross_entropy(xp: Any, x: Array, t: Array, reduction: str) -> ForwardResult:
    """x, t: (N, C, ...); t holds the (weighted) probability of each class."""
    rows, targets = map(upcast, (columns(x), columns(t)))
    top, sums = exponential_sums(xp, rows)
    mass = targets.sum(axis=1, keepdims=True)
    losses = xp.log(sums, dtype="float64") * mass - ((rows - top) * targets).sum(axis=1, keepdims=True)
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(x.shape[0], *x.shape[2:])
    else:
        out, scale = reduce_weighted(xp, losses, None, reduction)
    return out.astype(x.dtype), (top, sums, mass, scale, reduction)


def _soft_cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, t = saved
    top, sums, mass, scale, reduction = residual
    rows = columns(x).astype(sums.dtype, copy=False)
    compute = sums.dtype
    g = sample_gradient(xp, g.astype(compute, copy=False), scale, None, None, sums, reduction)
    dx = dt = None
    if needs[0]:
        dx = scaled_exponentials(xp, rows, top, (g * mass / sums).astype(compute, copy=False))
        dx = (dx - columns(t).astype(compute, copy=False) * g).astype(x.dtype, copy=False).reshape(x.shape)
    if needs[1]:
        dt = ((top + xp.log(sums) - rows) * g).astype(x.dtype, copy=False).reshape(x.shape)
    return dx, dt


soft_cross_entropy = Op(
    "soft_cross_entropy",
    _soft_cross_entropy,
    _soft_cross_entropy_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
    derived=True,
)


# Unreduced: z_n = -w_n*x_n,t(n), t(n) the target;  dx_nc = -g_n*w_n*[c = t(n)]
def _nll_loss(
    xp: Any, x: Array, target: Array, keep: Array | None, weight: Array | None, reduction: str
) -> ForwardResult:
    """x: (N, C, ...); target: (N, ...) of integers in [0, C), or anything where `keep` is False; weight: (C,)."""
    rows = columns(x)
    shape = target.shape
    target = target.reshape(len(rows), rows.shape[2] if rows.ndim > 2 else 1)
    flat_index, weights = classes(xp, rows, target, None if keep is None else keep.reshape(target.shape), weight)
    losses = -rows.reshape(-1).take(flat_index).astype(compute_dtype(x.dtype), copy=False)
    if weights is not None:
        losses *= weights
    if keep is not None:
        losses = xp.where(keep.reshape(flat_index.shape), losses, 0)
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(shape)
    else:
        out, scale = reduce_weighted(xp, losses, weights, reduction)
    return out.astype(x.dtype, copy=False), (x.shape, flat_index, keep, weights, scale, reduction)


def _nll_loss_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, flat_index, keep, weights, scale, reduction = residual
    dx = xp.zeros(shape, g.dtype)
    dx.reshape(-1)[flat_index] = -sample_gradient(xp, g, scale, weights, keep, flat_index, reduction)
    return (dx,)


nll_loss = Op("nll_loss", _nll_loss, _nll_loss_backward, inputs=("x",))


# Losses between probabilities: binary cross entropy, also from logits, and the Kullback-Leibler divergence.


# z = -t*log x - (1 - t)*log(1 - x), the logarithms no less than -100;  dx = g*(x - t)/(x*(1 - x)),
# dt = g*(log(1 - x) - log x)
def _binary_cross_entropy(xp: Any, x: Array, t: Array, reduction: str) -> ForwardResult:
    yes = xp.maximum(xp.log(x), -100)
    no = xp.maximum(xp.log1p(-x), -100)
    losses = yes - no
    losses *= -t
    losses -= no
    return reduce_losses(xp, losses, reduction), reduction


def _binary_cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, reduction: Any) -> Gradients:
    x, t = saved
    g = unreduced_gradient(g, reduction, x.size)
    dx = dt = None
    if needs[0]:
        dx = x - t
        # The denominator has a minimum, as in PyTorch: at x = 0 and 1 the derivative is large, not infinite.
        dx /= xp.maximum((1 - x) * x, 1e-12 if x.dtype.itemsize > 2 else 6e-8)
        dx *= g
    if needs[1]:
        dt = (xp.log1p(-x) - xp.log(x)) * g
    return dx, dt


binary_cross_entropy = Op(
    "binary_cross_entropy",
    _binary_cross_entropy,
    _binary_cross_entropy_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
)


# z = (1 - t)*x + c*log(1 + e^-x), c = 1 + (w - 1)*t;  dx = g*(1 - t - c/(1 + e^x)),
# dt = g*((w - 1)*log(1 + e^-x) - x), w the weight of positive targets
def _with_logits(xp: Any, x: Array, t: Array, weight: Array | None, reduction: str) -> ForwardResult:
    losses = _softplus(xp, x)
    if weight is not None:
        losses *= 1 + (weight - 1) * t
    losses += x
    losses -= t * x
    return reduce_losses(xp, losses, reduction).reshape(x.shape if reduction == "none" else ()), (weight, reduction)


def _softplus(xp: Any, x: Array) -> Array:
    """log(1 + e^-x), without overflow."""
    out = xp.empty(x.shape or (1,), x.dtype)
    xp.abs(x, out=out)
    xp.negative(out, out=out)
    xp.exp(out, out=out)
    xp.log1p(out, out=out)
    out -= xp.minimum(x, 0)
    return out


def _with_logits_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, t = saved
    weight, reduction = residual
    g = unreduced_gradient(g, reduction, x.size)
    dx = dt = None
    if needs[0]:
        # The hyperbolic tangent gives 1/(1 + e^-x), which is 1 - 1/(1 + e^x), without overflow.
        dx = xp.tanh(x * x.dtype.type(0.5))
        dx *= 0.5
        if weight is None:
            dx += 0.5
            dx -= t
        else:
            dx -= 0.5
            dx *= 1 + (weight - 1) * t
            dx += 1 - t
        dx *= g
    if needs[1]:
        dt = -x if weight is None else (weight - 1) * _softplus(xp, x).reshape(x.shape) - x
        dt *= g
    return dx, dt


binary_cross_entropy_with_logits = Op(
    "binary_cross_entropy_with_logits",
    _with_logits,
    _with_logits_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
)


# z = t*(log t - x), 0 where t = 0;  dx = -g*t, dt = g*(log t + 1 - x).  With log_target, t stands for log t:
# z = e^t*(t - x);  dx = -g*e^t, dt = g*e^t*(t - x + 1)
def _kl_div(xp: Any, x: Array, t: Array, log_target: bool, reduction: str) -> ForwardResult:
    if log_target:
        losses = t - x
        losses *= xp.exp(t)
    else:
        losses = xp.log(xp.where(t > 0, t, 1).astype(t.dtype, copy=False))
        losses -= x
        losses *= t
        losses = xp.where(t < 0, xp.nan, losses).astype(t.dtype, copy=False)
    return reduce_losses(xp, losses, reduction), (log_target, reduction)


def _kl_div_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    t, x = saved
    log_target, reduction = residual
    g = unreduced_gradient(g, reduction, t.size)
    p = xp.exp(t) if log_target else t
    dx = p * -g if needs[0] else None
    if not needs[1]:
        return dx, None
    derivative = (t if log_target else xp.log(xp.where(t > 0, t, 1).astype(t.dtype, copy=False))) + 1 - x
    return dx, derivative * p * g if log_target else derivative * g


kl_div = Op("kl_div", _kl_div, _kl_div_backward, inputs=("x", "t"), saves={"x": ("t",), "t": ("t", "x")})


# Losses of a difference d = x - y: squared, absolute, and two that are quadratic near 0 and linear elsewhere.
#
# Each is made of two functions: the reduced loss, and the derivative times g. So the reduction and the factor g need no
# additional array.


def reduce_losses(xp: Any, losses: Array, reduction: str) -> Array:
    """The losses, their sum or their mean. The mean of no losses is nan, as in PyTorch."""
    if reduction == "none":
        return losses
    out = total(losses)
    if reduction == "sum":
        return out
    return out / losses.size if losses.size else xp.full((), xp.nan)


def unreduced_gradient(g: Array, reduction: str, size: int) -> Array:
    """The gradient of the losses before the reduction, as an array that broadcasts to them."""
    return g / max(size, 1) if reduction == "mean" else g


Value = Callable[[Any, Array, float, str], Array]  # the reduced loss of the differences
Derivative = Callable[[Any, Array, float, Array], Array]  # the derivative of the losses, times their gradient


def _difference(xp: Any, x: Array, y: Array) -> Array:
    return xp.subtract(x, y, dtype=compute_dtype(x.dtype))


def _pair(name: str, value: Value, derivative: Derivative) -> Op:
    def forward(xp: Any, x: Array, y: Array, reduction: str, bound: float = 1.0) -> ForwardResult:
        d = _difference(xp, x, y)
        return xp.asarray(value(xp, d, bound, reduction)).astype(x.dtype, copy=False), (bound, reduction)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        bound, reduction = residual
        d = _difference(xp, *saved)
        upcast_g = g.astype(d.dtype, copy=False)
        dx = derivative(xp, d, bound, unreduced_gradient(upcast_g, reduction, d.size)).astype(g.dtype, copy=False)
        return dx if needs[0] else None, -dx if needs[1] else None

    return Op(name, forward, backward, inputs=("x", "y"), saves=("x", "y"))


# z = d^2;  dd = 2*g*d
def _square(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    if reduction == "none" or not d.size:
        return reduce_losses(xp, d * d, reduction)
    out = sum_of_squares(xp, d.reshape(-1))
    return out / d.size if reduction == "mean" else out


def _square_derivative(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return d * (2 * g)


mse_loss = _pair("mse_loss", _square, _square_derivative)


# z = |d|;  dd = g*sign d
def _absolute(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    return reduce_losses(xp, xp.abs(d), reduction)


def _absolute_derivative(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return xp.sign(d) * g


l1_loss = _pair("l1_loss", _absolute, _absolute_derivative)


# z = a*(d - a/2), a = d clipped to [-bound, bound];  dd = g*a
def _bounded(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    a = xp.clip(d, -bound, bound)
    losses = a * -0.5
    losses += d
    losses *= a
    return reduce_losses(xp, losses, reduction)


def _bounded_derivative(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return xp.clip(d, -bound, bound) * g


huber_loss = _pair("huber_loss", _bounded, _bounded_derivative)


# z = a*(d - a/2)/bound, a = d clipped to [-bound, bound];  dd = g*a/bound
def _smooth(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    return _bounded(xp, d, bound, reduction) / bound


def _smooth_derivative(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return _bounded_derivative(xp, d, bound, g / bound)


smooth_l1_loss = _pair("smooth_l1_loss", _smooth, _smooth_derivative)
