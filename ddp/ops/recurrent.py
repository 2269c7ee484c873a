"""Recurrent layers: one op computes one direction of one layer over a whole sequence.

In forward, one product before the loop over the time steps projects the inputs of all steps. In backward, one product
after the loop computes the gradient of each weight. Only what depends on the previous step is in the loop.

Arrays named `hs` and `cs` hold the states in the order in which they are computed, the initial state first. Arrays that
belong to the input are in the order of time; a reversed layer reads them through a reversed view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.ops.arrays import Array, Ints, array_function, compute_dtype, upcast
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.products import column_sums, product


def _in_order(x: Array, reverse: bool) -> Array:
    return x[::-1] if reverse else x


def _rows(x: Array) -> Array:
    """Reshapes x (T, N, n) to (T*N, n)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _projected(xp: Any, x: Array, w: Array, b: Array | None) -> Array:
    """x @ w^T + b, in new memory. x: (T, N, I), w: (G, I); returns (T, N, G)."""
    out = product(xp, _rows(x), w.T)
    if b is not None:
        out += b
    return out.reshape(x.shape[0], x.shape[1], w.shape[0])


def _states(xp: Any, steps: int, first: Array) -> Array:
    """An array for the states, (T + 1, N, H), with the first state filled in."""
    states = xp.empty((steps + 1, *first.shape), first.dtype)
    states[0] = first
    return states


def _results(dtype: Any, reverse: bool, hs: Array, *last: Array) -> tuple[Array, ...]:
    # Copies: backward reads the states, and the results belong to the caller.
    return tuple(x.astype(dtype) for x in (_in_order(hs[1:], reverse), hs[-1], *last))


def _output_gradients(xp: Any, g: Sequence[Array | None], hs: Array, reverse: bool) -> tuple[Array, Array]:
    """The gradients of all steps' states, in the order of computation, and the gradient of the last state.

    Both are in new memory. A gradient that backward did not get is zeros.
    """
    step_gradients = _gradient_or_zeros(xp, g[0], hs[1:].shape, g)
    return _in_order(step_gradients, reverse), _gradient_or_zeros(xp, g[1], hs[0].shape, g)


def _gradient_or_zeros(xp: Any, g: Array | None, shape: Ints, like: Sequence[Array | None]) -> Array:
    if g is not None:
        return g.astype(compute_dtype(g.dtype), order="C")
    return xp.zeros(shape, compute_dtype(next(x.dtype for x in like if x is not None)))


def _weights(
    xp: Any, needs: Needs, d_in: Array, d_re: Array, x: Array, hs: Array, w: Array, reverse: bool
) -> tuple[Array | None, ...]:
    """Computes dx, dw_ih, dw_hh, db_ih and db_hh, None where `needs` is False, from gradients before the activations.

    d_in: (T, N, G) in the order of time, the gradient of w_ih@x + b_ih; d_re: the same for w_hh@h + b_hh.
    """
    flat_in = _rows(d_in)
    flat_re = _rows(d_re)
    dx = product(xp, flat_in, w).reshape(x.shape) if needs[0] else None
    dw_ih = product(xp, flat_in.T, _rows(x)) if needs[1] else None
    dw_hh = product(xp, flat_re.T, _rows(_in_order(hs[:-1], reverse))) if needs[2] else None
    return (
        dx,
        dw_ih,
        dw_hh,
        column_sums(xp, flat_in) if needs[3] else None,
        column_sums(xp, flat_re) if needs[4] else None,
    )


# h_t = act(w_ih@x_t + b_ih + w_hh@h_(t-1) + b_hh), act = tanh or relu;
# da_t = dh_t*(1 - h_t^2) or dh_t*[h_t > 0], dh_(t-1) = g_(t-1) + w_hh^T@da_t
def _rnn(
    xp: Any, x: Array, h: Array, w_ih: Array, w_hh: Array, b_ih: Array | None, b_hh: Array | None, **how: Any
) -> tuple[Any, Any]:
    """x: (T, N, I), h: (N, H), w_ih: (H, I), w_hh: (H, H), biases: (H,); returns (T, N, H), (N, H)."""
    relu = how["relu"]
    reverse = how["reverse"]
    dtype = x.dtype
    x, h, w_ih, w_hh, b_ih, b_hh = map(upcast, (x, h, w_ih, w_hh, b_ih, b_hh))
    hs = _states(xp, len(x), h)
    added = _in_order(_projected(xp, x, w_ih, None if b_ih is None else b_ih + b_hh), reverse)
    recurrent = xp.ascontiguousarray(w_hh.T)
    for t in range(len(x)):
        product(xp, hs[t], recurrent, hs[t + 1])
        hs[t + 1] += added[t]
        if relu:
            xp.maximum(hs[t + 1], 0, out=hs[t + 1])
        else:
            xp.tanh(hs[t + 1], out=hs[t + 1])
    return _results(dtype, reverse, hs), (hs, relu, reverse)


def _rnn_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, w_ih, w_hh = map(upcast, saved)
    hs, relu, reverse = residual
    step_gradients, dh = _output_gradients(xp, g, hs, reverse)
    derivative = (hs[1:] > 0).astype(hs.dtype) if relu else 1 - hs[1:] * hs[1:]
    da = xp.empty_like(derivative)
    turned = _in_order(da, reverse)
    back = xp.ascontiguousarray(w_hh)
    for t in reversed(range(len(x))):
        dh += step_gradients[t]
        product(xp, xp.multiply(dh, derivative[t], out=turned[t]), back, dh)
    wants = (needs[0], *needs[2:])
    dx, *dws = _weights(xp, wants, da, da, x, hs, w_ih, reverse)
    return _narrow(saved[0].dtype, dx, dh if needs[1] else None, *dws)


def _narrow(dtype: Any, *gradients: Array | None) -> Gradients:
    return [None if d is None else d.astype(dtype, copy=False) for d in gradients]


rnn = Op(
    "rnn",
    _rnn,
    _rnn_backward,
    inputs=("x", "h", "w_ih", "w_hh", "b_ih", "b_hh"),
    saves=("x", "w_ih", "w_hh"),
    derived=True,
)


def halves(xp: Any, gates: int, size: int, dtype: Any) -> Array:
    """Factors (gates * size,): 1 for the third gate, else 0.5. Made on the device, as CUDA graphs require."""
    halves = xp.full(gates * size, 0.5, dtype)
    halves[2 * size : 3 * size] = 1
    return halves


# LSTM: a = w_ih@x_t + b_ih + w_hh@h_(t-1) + b_hh;  i, f, o = sigmoid(a_i, a_f, a_o), u = tanh(a_u);
# c_t = f*c_(t-1) + i*u, m_t = o*tanh(c_t), h_t = m_t, or w_hr@m_t;
# dc_t += dm_t*o*(1 - tanh^2 c_t), da_i = dc_t*u*i*(1 - i), da_f = dc_t*c_(t-1)*f*(1 - f), da_u = dc_t*i*(1 - u^2),
# da_o = dm_t*tanh(c_t)*o*(1 - o), dc_(t-1) = dc_t*f, dh_(t-1) = g_(t-1) + w_hh^T@da
@array_function
def lstm_steps(xp: Any, w: Array, w_hr: Array | None, gates: Array, cs: Array, hs: Array) -> None:
    """Computes the states from the initial ones: fills cs, (T + 1, N, H), and hs, (T + 1, N, P), from index 1 on.

    w: (P, 4H); gates: (T, N, 4H), w_ih@x + b_ih + b_hh of each step, which is replaced by the activations
    """
    size = cs.shape[2]
    # sigmoid(a) = tanh(a/2)/2 + 1/2: so all four gates need one tanh. `gates` and `recurrent` contain the factor 1/2.
    half = halves(xp, 4, size, gates.dtype)
    shift = 1 - half
    gates *= half
    recurrent = xp.ascontiguousarray(w * half)
    scratch = xp.empty_like(gates[0])
    inner = xp.empty_like(cs[0])
    for t in range(len(gates)):
        a = gates[t]
        a += product(xp, hs[t], recurrent, scratch)
        xp.tanh(a, out=a)
        a *= half
        a += shift
        xp.multiply(a[:, size : 2 * size], cs[t], out=cs[t + 1])
        cs[t + 1] += xp.multiply(a[:, :size], a[:, 2 * size : 3 * size], out=inner)
        xp.tanh(cs[t + 1], out=inner)
        if w_hr is None:
            xp.multiply(inner, a[:, 3 * size :], out=hs[t + 1])
        else:
            inner *= a[:, 3 * size :]
            product(xp, inner, w_hr.T, hs[t + 1])


def _lstm(
    xp: Any,
    x: Array,
    h: Array,
    c: Array,
    w_ih: Array,
    w_hh: Array,
    b_ih: Array | None,
    b_hh: Array | None,
    w_hr: Array | None,
    reverse: bool,
) -> tuple[Any, Any]:
    """x: (T, N, I), h: (N, P), c: (N, H), w_ih: (4H, I), w_hh: (4H, P), w_hr: (P, H).

    Returns (T, N, P), (N, P), (N, H). Gates in the order i, f, u, o.
    """
    dtype = x.dtype
    x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr = map(upcast, (x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr))
    hs = _states(xp, len(x), h)
    cs = _states(xp, len(x), c)
    gates = _projected(xp, x, w_ih, None if b_ih is None else b_ih + b_hh)
    lstm_steps(xp, w_hh.T, w_hr, _in_order(gates, reverse), cs, hs)
    return _results(dtype, reverse, hs, cs[-1]), (hs, cs, gates, reverse)


@array_function
def lstm_steps_backward(
    xp: Any,
    w: Array,
    w_hr: Array | None,
    gates: Array,
    cs: Array,
    step_gradients: Array,
    da: Array,
    dh: Array,
    dc: Array,
) -> None:
    """Writes to da, (T, N, 4H), the gradients of the `gates` that `lstm_steps` was given.

    w: (4H, P); step_gradients: (T, N, P), the gradients of hs[1:]; with w_hr, those through later steps are added
    gates: the activations; dh, dc: the gradients of the last states, replaced by those of the initial states
    """
    size = cs.shape[2]
    i, f, u, o = (gates[..., n * size : (n + 1) * size] for n in range(4))
    high = xp.tanh(cs[1:])
    # The factors of the gates' gradients, for all steps at once. The loop multiplies them by dc or dm, in place.
    for n, (a, factor) in enumerate(((i, u), (f, cs[:-1]), (None, i), (o, high))):
        part = da[..., n * size : (n + 1) * size]
        if a is None:
            xp.multiply(u, u, out=part)
            xp.subtract(1, part, out=part)
        else:
            xp.subtract(1, a, out=part)
            part *= a
        part *= factor
    through = 1 - high * high
    through *= o
    dm = dh
    back = xp.ascontiguousarray(w)
    for t in reversed(range(len(da))):
        dh += step_gradients[t]
        if w_hr is not None:
            step_gradients[t] = dh
            dm = product(xp, dh, w_hr)
        dc += dm * through[t]
        a = da[t]
        to_cell = a.reshape(len(a), 4, size)[:, :3]
        to_cell *= dc[:, None]
        a[:, 3 * size :] *= dm
        dc *= f[t]
        product(xp, a, back, dh)


def _lstm_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, w_ih, w_hh, w_hr = map(upcast, saved)
    hs, cs, gates, reverse = residual
    step_gradients, dh = _output_gradients(xp, g, hs, reverse)
    dc = _gradient_or_zeros(xp, g[2], cs[0].shape, g)
    activations = _in_order(gates, reverse)
    da = xp.empty_like(gates)
    lstm_steps_backward(xp, w_hh, w_hr, activations, cs, step_gradients, _in_order(da, reverse), dh, dc)
    dx, *dws = _weights(xp, (needs[0], *needs[3:7]), da, da, x, hs, w_ih, reverse)
    dw_hr = None
    if needs[7]:
        states = xp.tanh(cs[1:]) * activations[..., 3 * cs.shape[2] :]
        dw_hr = product(xp, _rows(step_gradients).T, _rows(states))
    return _narrow(saved[0].dtype, dx, dh if needs[1] else None, dc if needs[2] else None, *dws, dw_hr)


lstm = Op(
    "lstm",
    _lstm,
    _lstm_backward,
    inputs=("x", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr"),
    saves=("x", "w_ih", "w_hh", "w_hr"),
    derived=True,
)


# a = w_ih@x_t + b_ih, e = w_hh@h_(t-1) + b_hh;  r, z = sigmoid(a_r + e_r, a_z + e_z), n = tanh(a_n + r*e_n);
# h_t = n + z*(h_(t-1) - n);
# da_n = dh_t*(1 - z)*(1 - n^2), da_z = dh_t*(h_(t-1) - n)*z*(1 - z), da_r = da_n*e_n*r*(1 - r),
# de = da, but de_n = da_n*r;  dh_(t-1) = g_(t-1) + dh_t*z + w_hh^T@de
def _gru(
    xp: Any,
    x: Array,
    h: Array,
    w_ih: Array,
    w_hh: Array,
    b_ih: Array | None,
    b_hh: Array | None,
    reverse: bool,
) -> tuple[Any, Any]:
    """x: (T, N, I), h: (N, H), w_ih: (3H, I), w_hh: (3H, H), biases: (3H,); returns (T, N, H), (N, H).

    Gates in the order r, z, n.
    """
    dtype = x.dtype
    x, h, w_ih, w_hh, b_ih, b_hh = map(upcast, (x, h, w_ih, w_hh, b_ih, b_hh))
    size = h.shape[1]
    hs = _states(xp, len(x), h)
    half = halves(xp, 3, size, x.dtype)
    bias = b_new = None
    if b_ih is not None:
        bias = b_ih.copy()
        b_new = b_hh[2 * size :]
        bias[: 2 * size] += b_hh[: 2 * size]
    gates = _projected(xp, x, w_ih, bias)
    gates *= half
    recurrent = xp.ascontiguousarray((w_hh * half[:, None]).T)
    turned = _in_order(gates, reverse)
    e_n = xp.empty_like(hs[1:])
    scratch = xp.empty_like(turned[0])
    for t in range(len(x)):
        a = turned[t]
        new = turned[t][:, 2 * size :]
        open_ = a[:, : 2 * size]
        e = e_n[t]
        product(xp, hs[t], recurrent, scratch)
        open_ += scratch[:, : 2 * size]
        xp.tanh(open_, out=open_)
        open_ *= 0.5
        open_ += 0.5
        xp.add(scratch[:, 2 * size :], 0 if b_new is None else b_new, out=e)
        new += xp.multiply(a[:, :size], e, out=hs[t + 1])
        xp.tanh(new, out=new)
        xp.subtract(hs[t], new, out=hs[t + 1])
        hs[t + 1] *= a[:, size : 2 * size]
        hs[t + 1] += new
    return _results(dtype, reverse, hs), (hs, gates, e_n, reverse)


def _gru_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, w_ih, w_hh = map(upcast, saved)
    hs, gates, e_n, reverse = residual
    size = hs.shape[2]
    step_gradients, dh = _output_gradients(xp, g, hs, reverse)
    activations = _in_order(gates, reverse)
    r, z, n = (activations[..., k * size : (k + 1) * size] for k in range(3))
    # The factors of da, for all steps. The loop multiplies the factor of r by da_n, the factors of z and n by dh.
    de = xp.empty_like(gates)
    turned = _in_order(de, reverse)
    at_r, at_z, at_n = (turned[..., k * size : (k + 1) * size] for k in range(3))
    xp.subtract(1, r, out=at_r)
    at_r *= r
    at_r *= e_n
    xp.subtract(1, z, out=at_z)
    xp.multiply(n, n, out=at_n)
    xp.subtract(1, at_n, out=at_n)
    at_n *= at_z
    at_z *= z
    at_z *= hs[:-1] - n
    da_n = xp.empty_like(hs[1:])
    new = _in_order(da_n, reverse)
    back = xp.ascontiguousarray(w_hh)
    scratch = xp.empty_like(dh)
    for t in reversed(range(len(x))):
        dh += step_gradients[t]
        xp.multiply(at_n[t], dh, out=new[t])
        at_z[t] *= dh
        at_r[t] *= new[t]
        xp.multiply(new[t], r[t], out=at_n[t])
        dh *= z[t]
        dh += product(xp, turned[t], back, scratch)
    _, _, dw_hh, _, db_hh = _weights(xp, (False, False, needs[3], False, needs[5]), de, de, x, hs, w_ih, reverse)
    de[..., 2 * size :] = da_n
    dx, dw_ih, _, db_ih, _ = _weights(xp, (needs[0], needs[2], False, needs[4], False), de, de, x, hs, w_ih, reverse)
    return _narrow(saved[0].dtype, dx, dh if needs[1] else None, dw_ih, dw_hh, db_ih, db_hh)


gru = Op(
    "gru",
    _gru,
    _gru_backward,
    inputs=("x", "h", "w_ih", "w_hh", "b_ih", "b_hh"),
    saves=("x", "w_ih", "w_hh"),
    derived=True,
)
