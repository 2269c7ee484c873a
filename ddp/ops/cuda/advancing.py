"""Counts of steps on the device, and the numbers that an update takes: from the age of a parameter, and the settings.

One small launch before that of the update, so that the host neither counts nor reads: a step that is left out, because
a gradient is not finite, does not count. Settings come by value, or from device memory, where a graph finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.ops._op import Array
from ddp.ops.cuda import tables
from ddp.ops.cuda._source import REAL, Source
from ddp.ops.cuda.tables import Table

SETTINGS = 8  # of a group, at most

# In double, as Python computes them: a few numbers a parameter.
SOURCE = Source(
    "advancing",
    tables.FIELDS
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
    table: Table,
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
    SOURCE.over(xp, f"advance_{rule}", numbers.dtype, table.length, *arrays, *_eight(settings))


def store(xp: Any, held: Array, settings: Sequence[float]) -> None:
    """Writes settings to device memory, by a launch: no memory of the host has to outlive it."""
    SOURCE.rows(xp, "store", np.dtype(np.float64), 1, held, *_eight(settings))


def _eight(settings: Sequence[float]) -> list[float]:
    return [*map(float, settings), *[0.0] * (SETTINGS - len(settings))]
