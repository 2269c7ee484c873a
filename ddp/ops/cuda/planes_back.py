"""Backward of what `planes` normalises: sums of shares, joined to what gradients need, and lines over the planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source, wide
from ddp.ops.cuda.packs import PACKS, either, slope
from ddp.ops.cuda.planes_walk import FEW, PLANES, Planes, chunks

SOURCE = Source(
    "planes_back",
    PACKS
    + PLANES
    + """
struct Two {
    A one, two;

    static __device__ Two join(Two a, Two b) { return {a.one + b.one, a.two + b.two}; }
};

template <int V> __device__ Two slopes_of(
    const T* g, const T* x, A m, Index samples, Index channels, Index c, Index chunk, Index chunks, Index positions,
    Index length, Index parts
) {
    Stand<V> at(positions, length, parts);
    Two sums = {0, 0};
    each_part<V>(at, samples, channels, c, chunk, chunks, [&](Index first, Index packs) {
#pragma unroll 4
        for (Index k = at.lane; k < packs; k += at.lanes) {
            Pack<T, V> u = *(const Pack<T, V>*)(g + first + k * V), t = u;
            if (x) t = *(const Pack<T, V>*)(x + first + k * V);
            for (int v = 0; v < V; v++) {
                sums.one += A(u.at[v]);
                sums.two += A(u.at[v]) * (A(t.at[v]) - m);
            }
        }
    });
    return Block::meet(sums, Two::join);
}

// Of each share of a channel: the sums of g, and of g*(x - mean) where there is an x.
extern "C" __global__ void plane_slopes(
    const T* g, const T* x, const A* mean, A* along, A* across, Index samples, Index channels, Index members,
    Index positions, Index length, Index parts, Index chunks
) {
    constexpr int V = WIDEST;
    bool packed = positions % V == 0 && fits<T, V>(g) && fits<T, V>(x);
    FOR_ROWS(block, channels * chunks) {
        Index chunk = block / channels, c = block % channels;
        A m = x ? mean[members ? c / members : c] : A(0);
        Two found = packed
            ? slopes_of<V>(g, x, m, samples, channels, c, chunk, chunks, positions, length, parts)
            : slopes_of<1>(g, x, m, samples, channels, c, chunk, chunks, positions, length, parts);
        if (threadIdx.x == 0) {
            along[block] = found.one;
            if (across) across[block] = found.two;
        }
    }
}

// db and dw of each channel; behind them, of what has a statistic of `count` numbers: the mean of g*w, and what of
// x - mean is taken off. The tables are those of `samples` times all channels.
extern "C" __global__ void plane_slopes_joined(
    const A* along, const A* across, const A* rstd, const T* w, const A* w_wide, T* dw, A* dw_wide, Index onto_w, T* db,
    A* db_wide, Index onto_b, A* level, A* slope, Index samples, Index channels, Index members, Index chunks,
    Index count
) {
    Weights ws = {w, w_wide};
    Slope to_w = {dw, dw_wide, onto_w}, to_b = {db, db_wide, onto_b};
    Index planes = samples * channels, groups = channels / members;
    FOR_ROWS(row, channels + (level ? samples * groups : 0)) {
        Two found = {0, 0};
        bool ends = row < channels;
        if (ends && !to_w.wanted() && !to_b.wanted()) continue;
        unsigned many = ends ? (unsigned)samples : (unsigned)members;
        for (unsigned k = threadIdx.x; k < many * chunks; k += blockDim.x) {
            unsigned i = k % many;
            Index plane = ends ? i * channels + row : (row - channels) * members + i, from = k / many * planes + plane;
            A scale = ends ? rstd[plane / members] : ws.given() ? ws.at(plane % channels) : A(1);
            found.one += ends ? along[from] : along[from] * scale;
            if (across) found.two += across[from] * scale;
        }
        found = Block::meet(found, Two::join);
        if (threadIdx.x) continue;
        if (ends) {
            to_b.put(row, found.one);
            to_w.put(row, found.two);
        } else {
            Index which = row - channels;
            level[which] = found.one / A(count);
            slope[which] = found.two * rstd[which] * rstd[which] / A(count);
        }
    }
}

template <int V> __device__ void draw_back(
    const T* g, const T* x, const A* mean, const A* rstd, Weights w, const A* level, const A* slope, T* dx,
    Index planes, Index channels, Index members, Index positions, Index length, Index parts
) {
    Stand<V> at(positions, length, parts);
    if (at.line >= at.lines) return;
    Index step = (Index)gridDim.x * at.lines;
    for (Index item = (Index)blockIdx.x * at.lines + at.line; item < planes * parts; item += step) {
        Index plane = at.plane(item), begin = at.begin(item, plane), first = plane * positions + begin;
        Index c = plane % channels, which = members ? plane / members : c, packs = at.packs(begin);
        A r = rstd[which], scale = w.given() ? r * w.at(c) : r, m = 0, steep = 0, flat = 0;
        if (level) {
            m = mean[which];
            steep = r * slope[which];
            flat = r * level[which];
        }
#pragma unroll 4
        for (Index k = at.lane; k < packs; k += at.lanes) {
            Pack<T, V> u = *(const Pack<T, V>*)(g + first + k * V), t = u;
            if (level) t = *(const Pack<T, V>*)(x + first + k * V);
            for (int v = 0; v < V; v++) {
                A d = A(u.at[v]) * scale;
                u.at[v] = T(level ? d - flat - (A(t.at[v]) - m) * steep : d);
            }
            *(Pack<T, V>*)(dx + first + k * V) = u;
        }
    }
}

// Without `level`, the statistics were given, and x is not read.
extern "C" __global__ void draw_planes_back(
    const T* g, const T* x, const A* mean, const A* rstd, const T* w, const A* w_wide, const A* level, const A* slope,
    T* dx, Index planes, Index channels, Index members, Index positions, Index length, Index parts
) {
    constexpr int V = WIDEST;
    Weights ws = {w, w_wide};
    if (positions % V == 0 && fits<T, V>(g) && fits<T, V>(x) && fits<T, V>(dx)) {
        draw_back<V>(g, x, mean, rstd, ws, level, slope, dx, planes, channels, members, positions, length, parts);
    } else {
        draw_back<1>(g, x, mean, rstd, ws, level, slope, dx, planes, channels, members, positions, length, parts);
    }
}
""",
)


def gradients(
    xp: Any,
    g: Array,
    x: Array | None,
    at: Planes,
    mean: Array,
    rstd: Array,
    w: Array | None,
    needs: tuple[bool, ...],
    fixed: bool,
    to: Any,
    outs: Sequence[Any],
) -> tuple[Array | None, Array | None, Array | None]:
    """dx, and dw and db in dtype `to`. g, x: in one piece. fixed: the statistics were given.

    x: None where nothing that is needed reads it; outs: as of an op that takes `into`
    """
    dtype, kind = g.dtype, wide(g.dtype)
    level = flat = None
    dw, to_w = slope(xp, needs[1], (at.channels,), to, outs[1], dtype, kind)
    db, to_b = slope(xp, needs[2], (at.channels,), to, outs[2], dtype, kind)
    weight = either(xp, w, dtype, kind)
    met = needs[0] and not fixed
    if needs[1] or needs[2] or met:
        # Of groups, each plane is added up by itself: its sums go to its channel, and to its group.
        samples, channels = (1, at.planes) if at.members else (at.samples, at.channels)
        shares = chunks(g, samples, channels, at.positions, at.length, at.parts)
        along, across = xp.empty((2, shares, channels), kind)
        if x is None:
            across = None
        numbers: tuple[int, ...] = samples, channels, at.members, at.positions, at.length, at.parts, shares
        SOURCE.rows(xp, "plane_slopes", dtype, channels * shares, g, x, mean, along, across, *numbers)
        if met:
            level, flat = xp.empty((2, len(rstd)), kind)
        arrays = along, across, rstd, *weight, *to_w, *to_b, level, flat
        numbers = (at.samples if at.members else 1), at.channels, max(at.members, 1), shares, at.count
        rows = at.channels + (len(rstd) if met else 0)
        SOURCE.rows(xp, "plane_slopes_joined", dtype, rows, *arrays, *numbers, threads=FEW)
    if not needs[0]:
        return None, dw, db
    dx = xp.empty(g.shape, dtype)
    drawn = g, x, mean, rstd, *weight, level, flat, dx
    SOURCE.rows(xp, "draw_planes_back", dtype, at.blocks, *drawn, *at.drawn())
    return dx, dw, db
