"""The updates of optimizers: one launch for all parameters of a group, which reads and writes each number once.

Compiled without fused multiply-add, and in the order of the formulas on the CPU: the numbers are the same. What a
formula takes besides arrays lies in device memory, where `advancing` has put it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._cuda import array_table
from ddp._cuda.array_table import ArrayTable
from ddp._cuda.raw_kernel import FLOATING, REAL, KernelSource
from ddp.ops.op import Array

NUMBERS = 8  # of a row

UPDATE = KernelSource(
    "updates",
    array_table.TABLE_SOURCE
    + """
enum { NUMBERS = 8 };

// d = grad + decay*p;  what is a number of 16 bits is computed with in float, and rounded when it is stored.
static __device__ A descent(A p, A g, A decay, A sign) {
    A d = g * sign;
    return decay != 0 ? p * decay + d : d;
}

// numbers: shrink, decay, sign, less, momentum, nesterov, lr, fresh
struct Momentum {
    A shrink, decay, sign, less, momentum, nesterov, lr, fresh;
    // v = momentum*v + less*d, at first d;  p -= lr*v, with nesterov lr*(d + momentum*v)
    __device__ void operator()(A& p, A g, A* s, bool first, bool, bool) const {
        A d = descent(p, g, decay, sign);
        if (first) {
            A v = fresh != 0 ? d : s[0] * momentum + (less == 1 ? d : d * less);
            s[0] = v;
            d = nesterov != 0 ? v * momentum + d : v;
        }
        p = p - d * lr;
    }
};

// numbers: shrink, decay, sign, 1 - beta1, beta2, 1 - beta2, rate, small
struct Adam {
    A shrink, decay, sign, one, beta2, two, rate, small;
    // m += (1 - beta1)*(d - m);  v = beta2*v + (1 - beta2)*d^2;  p -= rate * m / (sqrt v + small)
    __device__ void operator()(A& p, A g, A* s, bool, bool, bool top) const {
        if (shrink != 1) p = p * shrink;
        A d = descent(p, g, decay, sign), m = s[0] + (d - s[0]) * one, v = s[1] * beta2 + d * d * two;
        s[0] = m;
        s[1] = v;
        if (top) {
            v = v > s[2] || v != v ? v : s[2];
            s[2] = v;
        }
        p = p - m / (sqrt(v) + small) * rate;
    }
};

// numbers: shrink, -, sign, 1 - beta1, beta2, 1 - beta2, lr
struct Lion {
    A shrink, decay, sign, one, beta2, two, lr, unused;
    // p -= lr * sign(m + (1 - beta1)*(d - m));  m = beta2*m + (1 - beta2)*d
    __device__ void operator()(A& p, A g, A* s, bool, bool, bool) const {
        if (shrink != 1) p = p * shrink;
        A d = g * sign, c = (d - s[0]) * one + s[0];
        s[0] = s[0] * beta2 + d * two;
        p = p - (c > 0 ? A(1) : c < 0 ? A(-1) : c) * lr;
    }
};

// numbers: -, decay, sign, alpha, 1 - alpha, eps, momentum, lr
struct Rmsprop {
    A shrink, decay, sign, alpha, less, eps, momentum, lr;
    // v = alpha*v + (1 - alpha)*d^2;  u = d / (sqrt v + eps), centered: v - a^2;  b = momentum*b + u;  p -= lr*b
    __device__ void operator()(A& p, A g, A* s, bool, bool moved, bool centered) const {
        A d = descent(p, g, decay, sign), v = s[0] * alpha + d * d * less;
        s[0] = v;
        if (centered) {
            A a = s[2] + (d - s[2]) * less;
            s[2] = a;
            v = v - a * a;
        }
        A u = d / (sqrt(v) + eps);
        if (moved) {
            u = s[1] * momentum + u;
            s[1] = u;
        }
        p = p - u * lr;
    }
};

// numbers: -, decay, sign, eps, rate
struct Adagrad {
    A shrink, decay, sign, eps, rate, unused[3];
    // s += d^2;  p -= rate * d / (sqrt s + eps)
    __device__ void operator()(A& p, A g, A* s, bool, bool, bool) const {
        A d = descent(p, g, decay, sign);
        s[0] = s[0] + d * d;
        p = p - d / (sqrt(s[0]) + eps) * rate;
    }
};

// numbers: -, decay, sign, rho, 1 - rho, eps, lr
struct Adadelta {
    A shrink, decay, sign, rho, less, eps, lr, unused;
    // v = rho*v + (1 - rho)*d^2;  u = d * sqrt(a + eps)/sqrt(v + eps);  a = rho*a + (1 - rho)*u^2;  p -= lr*u
    __device__ void operator()(A& p, A g, A* s, bool, bool, bool) const {
        A d = descent(p, g, decay, sign), v = s[0] * rho + d * d * less;
        A u = d / sqrt(v + eps) * sqrt(s[1] + eps);
        s[0] = v;
        s[1] = s[1] * rho + u * u * less;
        p = p - u * lr;
    }
};

// A step of a rule that has `states` states at most. found: the step is left out where it is not zero
template <int states, class Rule> static __device__ void update(
    const Index* rows, const Index* chunks, Index count, Index chunk, const A* numbers, const float* found
) {
    if (found && *found != 0) return;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        const A* mine = numbers + chunks[c] * NUMBERS;
        Rule rule;
        for (int k = 0; k < NUMBERS; k++) ((A*)&rule)[k] = mine[k];
        Part part(row, c, chunk);
        T* p = (T*)row[PARAM];
        T* s[3];
        for (int j = 0; j < 3; j++) s[j] = j < states ? (T*)row[STATE + j] : nullptr;
        for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
            Four ps = *(const Four*)(p + i), gs = *(const Four*)((const T*)row[GRAD] + i), ss[3];
            for (int j = 0; j < states; j++) {
                if (s[j]) ss[j] = *(const Four*)(s[j] + i);
            }
            for (int k = 0; k < 4; k++) {
                A x = A(ps.x[k]), own[3];
                for (int j = 0; j < states; j++) own[j] = s[j] ? A(ss[j].x[k]) : A(0);
                rule(x, A(gs.x[k]), own, s[0] != nullptr, s[1] != nullptr, s[2] != nullptr);
                ps.x[k] = T(x);
                for (int j = 0; j < states; j++) {
                    if (s[j]) ss[j].x[k] = T(own[j]);
                }
            }
            *(Four*)(p + i) = ps;
            for (int j = 0; j < states; j++) {
                if (s[j]) *(Four*)(s[j] + i) = ss[j];
            }
        }
        for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) {
            A x = A(p[i]), own[3];
            for (int j = 0; j < states; j++) own[j] = s[j] ? A(s[j][i]) : A(0);
            rule(x, element(row[GRAD], row[HOW] & KIND, i), own, s[0] != nullptr, s[1] != nullptr, s[2] != nullptr);
            p[i] = T(x);
            for (int j = 0; j < states; j++) {
                if (s[j]) s[j][i] = T(own[j]);
            }
        }
    }
}

#define UPDATE(name, states, Rule) \\
    extern "C" __global__ void name( \\
        const Index* rows, const Index* chunks, Index count, Index chunk, const A* numbers, const float* found \\
    ) { \\
        update<states, Rule>(rows, chunks, count, chunk, numbers, found); \\
    }
UPDATE(momentum, 1, Momentum)
UPDATE(adam, 3, Adam)
UPDATE(lion, 1, Lion)
UPDATE(rmsprop, 3, Rmsprop)
UPDATE(adagrad, 1, Adagrad)
UPDATE(adadelta, 2, Adadelta)
""",
    FLOATING,
    ("-fmad=false",),
)


def update(xp: Any, rule: str, dtype: Any, table: ArrayTable, numbers: Array, found: Array | None) -> None:
    """One step of a rule for every row of a table. numbers: (rows, 8), of `advancing`; found: see there"""
    UPDATE.rows(xp, rule, dtype, table.count, *table.arguments, numbers, found)


# Counts of steps on the device, and the numbers that an update takes: from the age of a parameter, and the settings.
#
# One small launch before that of the update, so that the host neither counts nor reads: a step that is left out,
# because a gradient is not finite, does not count. Settings come by value, or from device memory, where a graph finds
# them.

SETTINGS = 8  # of a group, at most

# In double, as Python computes them: a few numbers a parameter.
STEP_COUNT = KernelSource(
    "advancing",
    array_table.ROW_FIELDS
    + """
struct Settings { double x[8]; };

extern "C" __global__ void store(
    double* held, double a, double b, double c, double d, double e, double f, double g, double h
) {
    Settings all = {{a, b, c, d, e, f, g, h}};
    if (blockIdx.x == 0 && threadIdx.x == 0) *(Settings*)held = all;
}

// settings: lr, momentum, dampening, decay, nesterov, maximize
struct Momentum {
    static __device__ void numbers(double age, const double* x, double* y) {
        y[1] = x[3];
        y[2] = x[5] != 0 ? -1 : 1;
        y[3] = 1 - x[2];
        y[4] = x[1];
        y[5] = x[4];
        y[6] = x[0];
        y[7] = age == 1;
    }
};

// settings: lr, beta1, beta2, eps, decay, decoupled, maximize
struct Adam {
    // lr * m/c1 / (sqrt(v/c2) + eps) = lr*sqrt(c2)/c1 * m / (sqrt(v) + eps*sqrt(c2))
    static __device__ void numbers(double age, const double* x, double* y) {
        double root = sqrt(1 - pow(x[2], age));
        y[0] = x[5] != 0 ? 1 - x[0] * x[4] : 1;
        y[1] = x[5] != 0 ? 0 : x[4];
        y[2] = x[6] != 0 ? -1 : 1;
        y[3] = 1 - x[1];
        y[4] = x[2];
        y[5] = 1 - x[2];
        y[6] = x[0] * root / (1 - pow(x[1], age));
        y[7] = x[3] * root;
    }
};

// settings: lr, beta1, beta2, decay, maximize
struct Lion {
    static __device__ void numbers(double, const double* x, double* y) {
        y[0] = 1 - x[0] * x[3];
        y[2] = x[4] != 0 ? -1 : 1;
        y[3] = 1 - x[1];
        y[4] = x[2];
        y[5] = 1 - x[2];
        y[6] = x[0];
    }
};

// settings: lr, alpha, eps, decay, momentum, maximize
struct Rmsprop {
    static __device__ void numbers(double, const double* x, double* y) {
        y[1] = x[3];
        y[2] = x[5] != 0 ? -1 : 1;
        y[3] = x[1];
        y[4] = 1 - x[1];
        y[5] = x[2];
        y[6] = x[4];
        y[7] = x[0];
    }
};

// settings: lr, lr_decay, eps, decay, maximize
struct Adagrad {
    static __device__ void numbers(double age, const double* x, double* y) {
        y[1] = x[3];
        y[2] = x[4] != 0 ? -1 : 1;
        y[3] = x[2];
        y[4] = x[0] / (1 + (age - 1) * x[1]);
    }
};

// settings: lr, rho, eps, decay, maximize
struct Adadelta {
    static __device__ void numbers(double, const double* x, double* y) {
        y[1] = x[3];
        y[2] = x[4] != 0 ? -1 : 1;
        y[3] = x[1];
        y[4] = 1 - x[1];
        y[5] = x[2];
        y[6] = x[0];
    }
};

// held: settings in device memory, which count instead of the values; found: nothing counts where it is not zero
template <class Rule> static __device__ void advance(
    const Index* rows, Index length, float* steps, A* numbers, const float* found, const double* held, Settings given
) {
    if (found && *found != 0) return;
    FOR_EACH(i, length) {
        float* step = steps + rows[i * ROW + STEP];
        *step += 1;
        double y[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        Rule::numbers(*step, held ? held : given.x, y);
        for (int k = 0; k < 8; k++) numbers[8 * i + k] = A(y[k]);
    }
}

#define ADVANCE(name, Rule) \\
    extern "C" __global__ void advance_##name( \\
        const Index* rows, Index length, float* steps, A* numbers, const float* found, const double* held, double a, \\
        double b, double c, double d, double e, double f, double g, double h \\
    ) { \\
        advance<Rule>(rows, length, steps, numbers, found, held, Settings{{a, b, c, d, e, f, g, h}}); \\
    }
ADVANCE(momentum, Momentum)
ADVANCE(adam, Adam)
ADVANCE(lion, Lion)
ADVANCE(rmsprop, Rmsprop)
ADVANCE(adagrad, Adagrad)
ADVANCE(adadelta, Adadelta)
""",
    REAL,
    ("-fmad=false",),
)


def advance(
    xp: Any,
    rule: str,
    table: ArrayTable,
    steps: Array,
    numbers: Array,
    found: Array | None,
    held: Array | None,
    settings: Sequence[float],
) -> None:
    """Counts one step of every row, and writes what its update takes.

    steps: (n,) float32, counted up at each row's place; numbers: (rows, 8), float32 or float64
    found: one float32, or None: nothing happens where it is not zero; held: (8,) float64, or None
    settings: those of the rule, in its order
    """
    arrays = table.rows, table.length, steps, numbers, found, held
    STEP_COUNT.over(xp, f"advance_{rule}", numbers.dtype, table.length, *arrays, *_eight(settings))


def store_settings(xp: Any, held: Array, settings: Sequence[float]) -> None:
    """Writes settings to device memory, by a launch: no memory of the host has to outlive it."""
    STEP_COUNT.rows(xp, "store", np.dtype(np.float64), 1, held, *_eight(settings))


def _eight(settings: Sequence[float]) -> list[float]:
    return [*map(float, settings), *[0.0] * (SETTINGS - len(settings))]
