"""The updates of optimizers, each one kernel over flat memory: every number is read and written once.

Compiled without fused multiply-add, and in the order of the formulas on the CPU: the numbers are the same.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import REAL, Source

SOURCE = Source(
    "updates",
    """
// v = momentum*v + less*d, at first d;  delta = lr*v, with nesterov lr*(d + momentum*v)
extern "C" __global__ void momentum(
    const A* ds, A* vs, A* deltas, Index n, Index fresh, Index nesterov, double momentum, double less, double lr
) {
    FOR_EACH(i, n) {
        A d = ds[i], v = fresh ? d : vs[i] * A(momentum) + (less == 1 ? d : d * A(less));
        vs[i] = v;
        deltas[i] = (nesterov ? v * A(momentum) + d : v) * A(lr);
    }
}

// m += (1 - beta1)*(d - m);  v = beta2*v + (1 - beta2)*d^2;  delta = rate * m / (sqrt v + small)
extern "C" __global__ void adam(
    const A* ds, A* ms, A* vs, A* tops, A* deltas, Index n, double one, double beta2, double two, double rate,
    double small
) {
    FOR_EACH(i, n) {
        A d = ds[i], m = ms[i] + (d - ms[i]) * A(one), v = vs[i] * A(beta2) + d * d * A(two);
        ms[i] = m;
        vs[i] = v;
        if (tops) {
            v = v > tops[i] || v != v ? v : tops[i];
            tops[i] = v;
        }
        deltas[i] = m / (sqrt(v) + A(small)) * A(rate);
    }
}

// delta = lr * sign(m + (1 - beta1)*(d - m));  m = beta2*m + (1 - beta2)*d
extern "C" __global__ void lion(
    const A* ds, A* ms, A* deltas, Index n, double one, double beta2, double two, double lr
) {
    FOR_EACH(i, n) {
        A d = ds[i], c = (d - ms[i]) * A(one) + ms[i];
        ms[i] = ms[i] * A(beta2) + d * A(two);
        deltas[i] = (c > 0 ? A(1) : c < 0 ? A(-1) : c) * A(lr);
    }
}
""",
    REAL,
    ("-fmad=false",),
)


def momentum(
    xp: Any,
    d: Array,
    v: Array,
    delta: Array,
    spare: Array,
    fresh: bool,
    nesterov: bool,
    momentum: float,
    less: float,
    lr: float,
) -> None:
    """One step of SGD: writes v and delta. less: 1 - dampening; fresh: v does not count yet; spare: not needed."""
    arrays = d, v, delta, d.size, fresh, nesterov
    SOURCE.over(xp, "momentum", d.dtype, d.size, *arrays, float(momentum), float(less), float(lr))


def adam(
    xp: Any,
    d: Array,
    m: Array,
    v: Array,
    top: Array | None,
    delta: Array,
    spare: Array,
    beta1: float,
    beta2: float,
    rate: float,
    small: float,
) -> None:
    """One step of Adam: writes m, v, with amsgrad top, and delta. spare: not needed."""
    numbers = 1 - beta1, beta2, 1 - beta2, rate, small
    SOURCE.over(xp, "adam", d.dtype, d.size, d, m, v, top, delta, d.size, *map(float, numbers))


def lion(xp: Any, d: Array, m: Array, delta: Array, spare: Array, beta1: float, beta2: float, lr: float) -> None:
    """One step of Lion: writes m and delta. spare: not needed."""
    numbers = 1 - beta1, beta2, 1 - beta2, lr
    SOURCE.over(xp, "lion", d.dtype, d.size, d, m, delta, d.size, *map(float, numbers))
