"""Layer norm and RMS norm: each way reads every number of a row once, and holds it in registers until it is written.

Backward is two launches. In the first, a team of threads goes through rows, and since a thread has the same columns of
each of them, it adds up what these give to weight and bias in registers, too; what all teams of a block have come to is
one line of a table, which the second adds up. The order follows from the sizes alone: every run gives the same digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._cuda.raw_kernel import PACKS, THREADS, KernelSource, either, slope, wide
from ddp.ops.normalization import kind_of
from ddp.ops.op import Array, Gradients, Needs, Saved, as_rows

# V: numbers of a pack; K: packs that a thread holds. What a row has beyond them is read anew in each pass, and what
# it gives to weight and bias is added up in the table, where each column of a line is one thread's. The variance is
# taken of what is left of the mean, in a second pass over registers: this costs a meeting of the threads and no memory,
# and loses no digits wherever the mean lies, as sums of squares do.
ROW_NORM = KernelSource(
    "rows",
    PACKS
    + """
#define HELD 16  // numbers that a thread holds of a row

// The threads that share a row: a part of a warp, a power of two; or the whole block, with `lanes` 0, and where a row
// does not fit into a part.
struct Team {
    int size, lane, number, count;
    bool whole;

    __device__ Team(Index lanes, Index n, int held) {
        size = (int)lanes;
        while (size > WARP || size > (int)blockDim.x) size /= 2;
        whole = size == 0 || (Index)size * held < n;
        if (whole) size = blockDim.x;
        lane = threadIdx.x % size;
        number = threadIdx.x / size;
        count = blockDim.x / size;
    }

    template <class V, class Join> __device__ V meet(V value, Join join) const {
        if (whole) return Block::meet(value, join);
        for (unsigned apart = size / 2; apart; apart /= 2) value = join(value, across(value, apart));
        return value;
    }
    __device__ A sum(A value) const {
        return meet(value, [](A a, A b) { return a + b; });
    }
};

template <int V> using Line = Pack<T, V>;

template <int V> __device__ Line<V> read(const T* row, Index pack) { return *(const Line<V>*)(row + pack * V); }

// f of each pack of a row that the thread has: those that it holds, and those that it reads again.
#define FOR_HELD(k) _Pragma("unroll") for (int k = 0; k < K; k++) if (team.lane + k * team.size < packs)
#define FOR_REST(j) _Pragma("unroll 1") for (Index j = team.lane + (Index)K * team.size; j < packs; j += team.size)

template <int V, int K> __device__ void normalize(
    const T* x, Weights w, Weights b, T* out, A* means, A* rstds, Index rows, Index n, Index lanes, A eps
) {
    Team team(lanes, n, V * K);
    for (Index base = (Index)blockIdx.x * team.count; base < rows; base += (Index)gridDim.x * team.count) {
        Index row = base + team.number, packs = team.number < team.count && row < rows ? n / V : 0;
        const T* t = x + row * n;
        Line<V> held[K];
        FOR_HELD(k) held[k] = read<V>(t, team.lane + k * team.size);
        A m = 0;
        if (means) {
            A added = 0;
            FOR_HELD(k) for (int v = 0; v < V; v++) added += A(held[k].at[v]);
            FOR_REST(j) for (int v = 0; v < V; v++) added += A(t[j * V + v]);
            m = team.sum(added) / A(n);
        }
        A squares = 0;
        FOR_HELD(k) for (int v = 0; v < V; v++) squares += (A(held[k].at[v]) - m) * (A(held[k].at[v]) - m);
        FOR_REST(j) for (int v = 0; v < V; v++) squares += (A(t[j * V + v]) - m) * (A(t[j * V + v]) - m);
        A r = 1 / sqrt(team.sum(squares) / A(n) + eps);
        auto write = [&](Index pack, Line<V> line) {
            A scale[V], shift[V];
            if (w.given()) w.load<V>(pack * V, scale);
            if (b.given()) b.load<V>(pack * V, shift);
            for (int v = 0; v < V; v++) {
                A h = (A(line.at[v]) - m) * r;
                line.at[v] = T((w.given() ? h * scale[v] : h) + (b.given() ? shift[v] : A(0)));
            }
            *(Line<V>*)(out + row * n + pack * V) = line;
        };
        FOR_HELD(k) write(team.lane + k * team.size, held[k]);
        FOR_REST(j) write(j, read<V>(t, j));
        if (packs && team.lane == 0) {
            if (means) means[row] = m;
            rstds[row] = r;
        }
    }
}

// Lines of a table of what all teams of a block have found of V columns each.
template <int V> __device__ void meet_teams(const Team& team, const A* found, A* to, bool mine) {
    __shared__ A cells[V * 256];
    if (team.count > 1) {
        for (int v = 0; v < V; v++) cells[v * blockDim.x + threadIdx.x] = found[v];
        __syncthreads();
    }
    if (mine && team.number == 0) {
        for (int v = 0; v < V; v++) {
            A sum = found[v];
            for (int k = 1; k < team.count; k++) sum += cells[v * blockDim.x + k * team.size + team.lane];
            to[v] = sum;
        }
    }
    if (team.count > 1) __syncthreads();
}

struct Two {
    A one, two;
};

template <int V, int K> __device__ void back(
    const T* g, const T* x, Weights w, const A* means, const A* rstds, T* dx, A* dws, A* dbs, Index rows, Index n,
    Index lanes, Index chunks
) {
    Team team(lanes, n, V * K);
    for (Index chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        A of_w[K][V], of_b[K][V];
#pragma unroll
        for (int k = 0; k < K; k++) for (int v = 0; v < V; v++) of_w[k][v] = of_b[k][v] = 0;
        bool first = true;
        for (Index base = chunk * team.count; base < rows; base += chunks * team.count) {
            Index row = base + team.number, packs = team.number < team.count && row < rows ? n / V : 0;
            const T *u = g + row * n, *t = x ? x + row * n : u;
            A m = packs && means ? means[row] : A(0), r = packs && rstds ? rstds[row] : A(0);
            Line<V> us[K], ts[K];
            FOR_HELD(k) {
                us[k] = read<V>(u, team.lane + k * team.size);
                ts[k] = read<V>(t, team.lane + k * team.size);
            }
            Two sums = {0, 0};
            auto add = [&](Index pack, const Line<V>& gs, const Line<V>& xs, A* to_w, A* to_b, bool begin) {
                A scale[V];
                if (w.given()) w.load<V>(pack * V, scale);
                for (int v = 0; v < V; v++) {
                    A d = A(gs.at[v]), h = (A(xs.at[v]) - m) * r, gw = w.given() ? d * scale[v] : d;
                    sums.one += gw;
                    sums.two += gw * h;
                    if (to_w) to_w[v] = begin ? d * h : to_w[v] + d * h;
                    if (to_b) to_b[v] = begin ? d : to_b[v] + d;
                }
            };
            FOR_HELD(k) add(team.lane + k * team.size, us[k], ts[k], of_w[k], of_b[k], false);
            FOR_REST(j) {
                Index at = chunk * n + j * V;
                add(j, read<V>(u, j), read<V>(t, j), dws ? dws + at : nullptr, dbs ? dbs + at : nullptr, first);
            }
            first = false;
            if (!dx) continue;
            sums = team.meet(sums, [](Two a, Two b) { return Two{a.one + b.one, a.two + b.two}; });
            A along = means ? sums.one / A(n) : A(0), slope = sums.two / A(n);
            auto write = [&](Index pack, const Line<V>& gs, const Line<V>& xs) {
                A scale[V];
                Line<V> line;
                if (w.given()) w.load<V>(pack * V, scale);
                for (int v = 0; v < V; v++) {
                    A h = (A(xs.at[v]) - m) * r, gw = w.given() ? A(gs.at[v]) * scale[v] : A(gs.at[v]);
                    line.at[v] = T(r * (gw - along - h * slope));
                }
                *(Line<V>*)(dx + row * n + pack * V) = line;
            };
            FOR_HELD(k) write(team.lane + k * team.size, us[k], ts[k]);
            FOR_REST(j) write(j, read<V>(u, j), read<V>(t, j));
        }
        Index packs = n / V;
#pragma unroll
        for (int k = 0; k < K; k++) {
            Index pack = team.lane + k * team.size, to = chunk * n + pack * V;
            if (dws) meet_teams<V>(team, of_w[k], dws + to, pack < packs);
            if (dbs) meet_teams<V>(team, of_b[k], dbs + to, pack < packs);
        }
    }
}

extern "C" __global__ void RESIDENT(512, 2) normalize_rows(
    const T* x, const T* w, const A* w_wide, const T* b, const A* b_wide, T* out, A* means, A* rstds, Index rows,
    Index n, Index lanes, double eps
) {
    constexpr int V = WIDEST;
    Weights ws = {w, w_wide}, bs = {b, b_wide};
    if (n % V == 0 && fits<T, V>(x) && fits<T, V>(out) && ws.packed<V>() && bs.packed<V>()) {
        normalize<V, HELD / V>(x, ws, bs, out, means, rstds, rows, n, lanes, A(eps));
    } else {
        normalize<1, HELD / 2>(x, ws, bs, out, means, rstds, rows, n, lanes, A(eps));
    }
}

extern "C" __global__ void RESIDENT(512, 1) normalize_rows_backward(
    const T* g, const T* x, const T* w, const A* w_wide, const A* means, const A* rstds, T* dx, A* dws, A* dbs,
    Index rows, Index n, Index lanes, Index chunks
) {
    constexpr int V = WIDEST;
    Weights ws = {w, w_wide};
    if (n % V == 0 && fits<T, V>(g) && fits<T, V>(x) && fits<T, V>(dx) && ws.packed<V>()) {
        back<V, HELD / V>(g, x, ws, means, rstds, dx, dws, dbs, rows, n, lanes, chunks);
    } else {
        back<1, HELD / 2>(g, x, ws, means, rstds, dx, dws, dbs, rows, n, lanes, chunks);
    }
}

// The lines of both tables added up: neighbours in a warp have neighbouring columns.
extern "C" __global__ void join_lines(
    const A* dws, const A* dbs, T* dw, A* dw_wide, Index onto_w, T* db, A* db_wide, Index onto_b, Index n, Index chunks
) {
    __shared__ Two cells[256];
    Slope to_w = {dw, dw_wide, onto_w}, to_b = {db, db_wide, onto_b};
    int lanes = blockDim.x < WARP ? 1 : WARP, lines = blockDim.x / lanes;
    int lane = threadIdx.x % lanes, line = threadIdx.x / lanes;
    for (Index tile = blockIdx.x; tile * lanes < n; tile += gridDim.x) {
        Index i = tile * lanes + lane;
        Two found = {0, 0};
        if (i < n && line < lines) {
#pragma unroll 4
            for (Index k = line; k < chunks; k += lines) {
                if (dws) found.one += dws[k * n + i];
                if (dbs) found.two += dbs[k * n + i];
            }
        }
        cells[threadIdx.x] = found;
        __syncthreads();
        if (i < n && line == 0) {
            for (int k = 1; k < lines; k++) {
                found.one += cells[k * lanes + lane].one;
                found.two += cells[k * lanes + lane].two;
            }
            to_w.put(i, found.one);
            to_b.put(i, found.two);
        }
        __syncthreads();
    }
}
""",
)

HELD = 16  # as in the source
_WARP, _MOST = 32, 512  # threads of a warp, and of a block at most
_STANDING = 1 << 16  # threads that add up what is for weight and bias: about as many as a GPU has room for


def _shared(rows: int, n: int) -> tuple[int, int, int]:
    """Threads of a block, how many of them share a row (0: all), and how many blocks that makes."""
    if n <= HELD * _WARP:
        lanes = 1 << max(0, -(-n // HELD) - 1).bit_length()
        return THREADS, lanes, -(-rows // (THREADS // lanes)) if n else 0
    return min(_MOST, 1 << (-(-n // HELD) - 1).bit_length()), 0, rows


def norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, eps: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """(x - m)*r*w + b, m, r of every row; without `centered`, m is 0 and stays None. x: (rows, n), w, b: of n."""
    (rows, n), kind, dtype = x.shape, wide(x.dtype), x.dtype
    threads, lanes, blocks = _shared(rows, n)
    out, rstd = xp.ndarray((rows, n), dtype), xp.ndarray(rows, kind)
    mean = xp.ndarray(rows, kind) if centered else None
    arrays = xp.ascontiguousarray(x), *either(xp, w, dtype, kind), *either(xp, b, dtype, kind), out, mean, rstd
    numbers = rows, n, lanes, float(eps)
    ROW_NORM.rows(xp, "normalize_rows", dtype, blocks, *arrays, *numbers, threads=threads)
    return out, mean, rstd


def norm_backward(
    xp: Any,
    g: Array,
    x: Array | None,
    w: Array | None,
    mean: Array | None,
    rstd: Array,
    needs: tuple[bool, ...],
    inner: tuple[int, ...],
    to: Any,
    outs: Sequence[Any],
) -> tuple[Array | None, Array | None, Array | None]:
    """dx (rows, n), and dw and db of shape `inner` in dtype `to`. outs: as of an op that takes `into`.

    mean: None where rows were not centered; x: None where nothing that is needed reads it
    """
    (rows, n), kind, dtype = g.shape, rstd.dtype, g.dtype
    threads, lanes, blocks = _shared(rows, n)
    dx = xp.ndarray((rows, n), dtype) if needs[0] else None
    dw, to_w = slope(xp, needs[1], inner, to, outs[1], dtype, kind)
    db, to_b = slope(xp, needs[2], inner, to, outs[2], dtype, kind)
    lines = min(blocks, _STANDING // threads) if needs[1] or needs[2] else blocks
    dws, dbs = (xp.ndarray((lines, n), kind) if need else None for need in needs[1:])
    arrays = (
        *(xp.ascontiguousarray(g), None if x is None else xp.ascontiguousarray(x), *either(xp, w, dtype, kind)),
        *(mean, rstd, dx, dws, dbs),
    )
    numbers = rows, n, lanes, lines
    ROW_NORM.rows(xp, "normalize_rows_backward", dtype, lines, *arrays, *numbers, threads=threads)
    if needs[1] or needs[2]:
        ROW_NORM.rows(xp, "join_lines", dtype, -(-n // _WARP), dws, dbs, *to_w, *to_b, n, lines)
    return dx, dw, db


def _normalized(
    xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float, centered: bool
) -> tuple[Array, Any]:
    out, mean, rstd = norm(xp, as_rows(x, axes), w, b, eps, centered)
    return out.reshape(x.shape), (axes, mean, rstd, kind_of(x, w, b))


def layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, b, axes, eps, True)


def layer_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None, None)
) -> Gradients:
    w, x = saved
    axes, mean, rstd, kind = residual
    x = None if x is None else as_rows(x, axes)
    inner = g.shape[g.ndim - axes :]
    dx, dw, db = norm_backward(xp, as_rows(g, axes), x, w, mean, rstd, needs, inner, kind, outs)
    return None if dx is None else dx.reshape(g.shape), dw, db


def rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, None, axes, eps, False)


def rms_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None)
) -> Gradients:
    return layer_norm_backward(xp, g, (*needs, False), saved, residual, (*outs, None))[:2]
