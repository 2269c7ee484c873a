"""The updates of optimizers: one launch for all parameters of a group, which reads and writes each number once.

Compiled without fused multiply-add, and in the order of the formulas on the CPU: the numbers are the same. What a
formula takes besides arrays lies in device memory, where `advancing` has put it.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda import tables
from ddp.ops.cuda._source import FLOATING, Source
from ddp.ops.cuda.tables import Table

NUMBERS = 8  # of a row

SOURCE = Source(
    "updates",
    tables.TEXT
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


def update(xp: Any, rule: str, dtype: Any, table: Table, numbers: Array, found: Array | None) -> None:
    """One step of a rule for every row of a table. numbers: (rows, 8), of `advancing`; found: see there"""
    SOURCE.rows(xp, rule, dtype, table.count, *table.arguments, numbers, found)
