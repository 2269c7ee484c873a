"""Kernels of optimizers: one launch updates all parameters of a group that have the same dtype, in one pass.

The kernel is generated from the formula that the CPU computes, and compiled without fused multiply-add, so that GPU and
CPU give the same bits, except that scalars with `pow` may differ in the last bits. Before the update, a small launch
counts the steps and computes the scalars of the formula on the device. So a step that is skipped because a gradient is
not finite is not counted, and the host need not wait to find out. Settings are usually arguments of the launch.
For a CUDA graph, or if the learning rate is a tensor on the GPU, they are in device memory instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ddp._cuda import array_table
from ddp._cuda.array_table import ArrayTable
from ddp._cuda.raw_kernel import FLOATING, KernelSource
from ddp.ops.arrays import Array

# Maximum number of settings that a formula may read.
SETTINGS = 8

_SOURCE = """
enum { SCALARS = %(scalars)d, STATES = %(states)d };

// Templates, because the compiler would warn about functions that a formula does not use. maximum: nan if one is, as in
// NumPy
template <class V> __device__ V maximum(V a, V b) { return a > b || a != a ? a : b; }
template <class V> __device__ V sign(V x) { return x > 0 ? V(1) : x < 0 ? V(-1) : x; }

// The formula. s: its states, n: its scalars
static __device__ void formula(A& p, const A grad, A* s, const A* n) {
    %(lines)s
}

// scalars: of each row; found_inf: null, or the step is skipped if it is not zero
extern "C" __global__ void update(
    const Index* rows, const Index* chunks, Index count, Index chunk, const A* scalars, const float* found_inf
) {
    if (found_inf && *found_inf != 0) return;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        A n[SCALARS];
        for (int k = 0; k < SCALARS; k++) n[k] = scalars[chunks[c] * SCALARS + k];
        Part part(row, c, chunk);
        T* p = (T*)row[PARAM];
        T* s[STATES + 1];
        for (int j = 0; j < STATES; j++) s[j] = (T*)row[STATE + j];
        for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
            Four ps = *(const Four*)(p + i), gs = *(const Four*)((const T*)row[GRAD] + i), ss[STATES + 1];
            for (int j = 0; j < STATES; j++) ss[j] = *(const Four*)(s[j] + i);
            for (int k = 0; k < 4; k++) {
                A x = A(ps.x[k]), state[STATES + 1];
                for (int j = 0; j < STATES; j++) state[j] = A(ss[j].x[k]);
                formula(x, A(gs.x[k]), state, n);
                ps.x[k] = T(x);
                for (int j = 0; j < STATES; j++) ss[j].x[k] = T(state[j]);
            }
            *(Four*)(p + i) = ps;
            for (int j = 0; j < STATES; j++) *(Four*)(s[j] + i) = ss[j];
        }
        for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) {
            A x = A(p[i]), state[STATES + 1];
            for (int j = 0; j < STATES; j++) state[j] = A(s[j][i]);
            formula(x, A(((const T*)row[GRAD])[i]), state, n);
            p[i] = T(x);
            for (int j = 0; j < STATES; j++) s[j][i] = T(state[j]);
        }
    }
}

// The same as ddp.optim.formula.rectification in Python.
template <class V> __device__ V rectification(V step, V beta2) {
    V limit = 2 / (1 - beta2) - 1, power = pow(beta2, step);
    V rho = limit - 2 * step * power / (1 - power);
    return rho <= 5 ? 0 : sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho));
}

// Counts a step of each row, and computes its scalars in double, as Python does.
// device_settings: null, or settings that are used instead of the arguments a to h
extern "C" __global__ void count_steps(
    const Index* rows, Index length, float* steps, A* scalars, const float* found_inf, const double* device_settings,
    double a, double b, double c, double d, double e, double f, double g, double h
) {
    if (found_inf && *found_inf != 0) return;
    const double values[8] = {a, b, c, d, e, f, g, h}, *x = device_settings ? device_settings : values;
    FOR_EACH(i, length) {
        float* counts = steps + 2 * rows[i * ROW + STEP];
        double step = counts[0] += 1;
        A* y = scalars + SCALARS * i;
        (void)step, (void)x;
        %(settings)s
        double mu_product = counts[1] *= float(%(factor)s);
        (void)mu_product;
        %(scalar_lines)s
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
    """Returns the kernels of a formula.

    lines: statements in C; scalars, factor: expressions in C; settings, states: the names that this C code uses
    """
    body = [f"A& {name} = s[{j}];" for j, name in enumerate(states)] + list(lines)
    source = _SOURCE % {
        "scalars": len(scalars),
        "states": len(states),
        "factor": factor,
        "lines": "\n    ".join(body),
        "settings": " ".join(f"double {name} = x[{i}];" for i, name in enumerate(settings)),
        "scalar_lines": "\n        ".join(f"y[{k}] = A({text});" for k, text in enumerate(scalars)),
    }
    return KernelSource(None, array_table.TABLE_SOURCE + source, FLOATING, ("-fmad=false",))


def update(
    xp: Any,
    source: KernelSource,
    dtype: Any,
    table: ArrayTable,
    steps: Array,
    scalars: Array,
    found_inf: Array | None,
    device_settings: Array | None,
    settings: Sequence[float],
) -> None:
    """Counts a step of every parameter in a table, and updates the parameters.

    steps: (n, 2) float32: for each parameter its count of steps, and the product of `factor` over these steps
    scalars: (rows * number of scalars,), memory for the scalars of each row, in the dtype to compute in
    found_inf: one float32: if it is not zero, the step is skipped; None: no step is skipped
    device_settings: (8,) float64 on the device, used instead of `settings`; or None
    settings: in the order of the names that were passed to `kernels`
    """
    padding = [0.0] * (SETTINGS - len(settings))
    arguments = (table.rows, table.length, steps, scalars, found_inf, device_settings, *map(float, settings), *padding)
    source.launch(xp, "count_steps", dtype, table.length, *arguments)
    source.launch_rows(xp, "update", dtype, table.count, *table.arguments, scalars, found_inf)
