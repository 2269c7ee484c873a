"""The updates of optimizers: one launch for all parameters of a group, which reads and writes each number once.

The kernel is made of the formula that the CPU computes too, and compiled without fused multiply-add: the numbers are
the same. A small launch before it counts the steps and computes the formula's scalars, so that the host neither counts
nor reads: a step that is left out, because a gradient is not finite, does not count. Settings come by value, or from
device memory, where a graph finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ddp._cuda import array_table
from ddp._cuda.array_table import ArrayTable
from ddp._cuda.raw_kernel import FLOATING, KernelSource
from ddp.ops.arrays import Array

SETTINGS = 8  # of a group, at most

_SOURCE = """
enum { SCALARS = %(scalars)d, STATES = %(states)d };

// Templates, since not every formula uses them. A nan stays, as it does for NumPy.
template <class V> __device__ V maximum(V a, V b) { return a > b || a != a ? a : b; }
template <class V> __device__ V sign(V x) { return x > 0 ? V(1) : x < 0 ? V(-1) : x; }

static __device__ void rule(A& p, const A grad, A* s, const A* n) {
    %(lines)s
}

// numbers: the scalars of each row; found: the step is left out where it is not zero
extern "C" __global__ void update(
    const Index* rows, const Index* chunks, Index count, Index chunk, const A* numbers, const float* found
) {
    if (found && *found != 0) return;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        A n[SCALARS];
        for (int k = 0; k < SCALARS; k++) n[k] = numbers[chunks[c] * SCALARS + k];
        Part part(row, c, chunk);
        T* p = (T*)row[PARAM];
        T* s[STATES + 1];
        for (int j = 0; j < STATES; j++) s[j] = (T*)row[STATE + j];
        for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
            Four ps = *(const Four*)(p + i), gs = *(const Four*)((const T*)row[GRAD] + i), ss[STATES + 1];
            for (int j = 0; j < STATES; j++) ss[j] = *(const Four*)(s[j] + i);
            for (int k = 0; k < 4; k++) {
                A x = A(ps.x[k]), own[STATES + 1];
                for (int j = 0; j < STATES; j++) own[j] = A(ss[j].x[k]);
                rule(x, A(gs.x[k]), own, n);
                ps.x[k] = T(x);
                for (int j = 0; j < STATES; j++) ss[j].x[k] = T(own[j]);
            }
            *(Four*)(p + i) = ps;
            for (int j = 0; j < STATES; j++) *(Four*)(s[j] + i) = ss[j];
        }
        for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) {
            A x = A(p[i]), own[STATES + 1];
            for (int j = 0; j < STATES; j++) own[j] = A(s[j][i]);
            rule(x, A(((const T*)row[GRAD])[i]), own, n);
            p[i] = T(x);
            for (int j = 0; j < STATES; j++) s[j][i] = T(own[j]);
        }
    }
}

// ddp.optim.formula has the same in Python.
template <class V> __device__ V rectification(V step, V beta2) {
    V limit = 2 / (1 - beta2) - 1, power = pow(beta2, step);
    V rho = limit - 2 * step * power / (1 - power);
    return rho <= 5 ? 0 : sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho));
}

// In double, as Python computes them: a few numbers a parameter. held: settings that count instead of the values
extern "C" __global__ void count_steps(
    const Index* rows, Index length, float* steps, A* numbers, const float* found, const double* held, double a,
    double b, double c, double d, double e, double f, double g, double h
) {
    if (found && *found != 0) return;
    const double values[8] = {a, b, c, d, e, f, g, h}, *x = held ? held : values;
    FOR_EACH(i, length) {
        float* counts = steps + 2 * rows[i * ROW + STEP];
        double step = counts[0] += 1;
        A* y = numbers + SCALARS * i;
        (void)step, (void)x;
        %(settings)s
        double mu_product = counts[1] *= float(%(factor)s);
        (void)mu_product;
        %(numbers)s
    }
}
"""


@functools.cache
def kernels(
    lines: tuple[str, ...],
    scalars: tuple[str, ...],
    settings: tuple[str, ...],
    states: tuple[str, ...],
    factor: str = "1",
) -> KernelSource:
    """The kernels of a formula. The arguments are its C lines and scalars, and the names it reads."""
    body = [f"A& {name} = s[{j}];" for j, name in enumerate(states)] + list(lines)
    source = _SOURCE % {
        "scalars": len(scalars),
        "states": len(states),
        "factor": factor,
        "lines": "\n    ".join(body),
        "settings": " ".join(f"double {name} = x[{i}];" for i, name in enumerate(settings)),
        "numbers": "\n        ".join(f"y[{k}] = A({text});" for k, text in enumerate(scalars)),
    }
    return KernelSource(None, array_table.TABLE_SOURCE + source, FLOATING, ("-fmad=false",))


def update(
    xp: Any,
    source: KernelSource,
    dtype: Any,
    table: ArrayTable,
    steps: Array,
    numbers: Array,
    found: Array | None,
    held: Array | None,
    settings: Sequence[float],
) -> None:
    """Counts one step of every row of a table, and updates it.

    steps: (n, 2) float32, counted up and multiplied at each row's place; numbers: (rows, scalars) in A, written
    found: one float32, or None: nothing happens where it is not zero; held: (8,) float64, or None
    settings: those of the formula, in its order
    """
    arrays = table.rows, table.length, steps, numbers, found, held
    source.over(xp, "count_steps", dtype, table.length, *arrays, *_eight(settings))
    source.rows(xp, "update", dtype, table.count, *table.arguments, numbers, found)


def _eight(settings: Sequence[float]) -> list[float]:
    return [*map(float, settings), *[0.0] * (SETTINGS - len(settings))]
