"""Normalisation over channels and groups of images that lie in the order of their axes: planes of one channel each.

Statistics are taken in two stages. In the first, a block takes a share of a channel's planes, or of a group's, which
are one long plane; in the second, a block joins what was found of one. Where one block takes all of a channel, the
first is the last. Then lines are drawn over the planes. Backward, in `planes_back`, goes the same way.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source, wide
from ddp.ops.cuda.packs import PACKS, either
from ddp.ops.cuda.planes_walk import FEW, PLANES, Planes, chunks, parts

# Each thread takes the first number it meets off all of its few, so that no digits are lost, wherever the mean lies.
SOURCE = Source(
    "planes",
    PACKS
    + PLANES
    + """
struct Moments {
    A count, mean, squares;

    static __device__ Moments join(Moments a, Moments b) {
        A count = a.count + b.count;
        if (count == 0) return a;
        A far = b.mean - a.mean, part = b.count / count;
        return {count, a.mean + far * part, a.squares + b.squares + far * far * a.count * part};
    }
};

__device__ inline void settle(
    Index c, Moments found, A* mean, A* var, A* rstd, A* running_mean, A* running_var, A eps, A momentum
) {
    A v = found.squares / found.count;
    mean[c] = found.mean;
    var[c] = v;
    rstd[c] = 1 / sqrt(v + eps);
    if (running_mean) running_mean[c] += momentum * (found.mean - running_mean[c]);
    if (running_var) {
        A whole = found.squares / (found.count > 1 ? found.count - 1 : A(1));
        running_var[c] += momentum * (whole - running_var[c]);
    }
}

template <int V> __device__ Moments moments_of(
    const T* x, Index samples, Index channels, Index c, Index chunk, Index chunks, Index positions, Index length,
    Index parts
) {
    Stand<V> at(positions, length, parts);
    A shift = 0, one = 0, two = 0, count = 0;
    each_part<V>(at, samples, channels, c, chunk, chunks, [&](Index first, Index packs) {
#pragma unroll 4
        for (Index k = at.lane; k < packs; k += at.lanes) {
            Pack<T, V> t = *(const Pack<T, V>*)(x + first + k * V);
            if (count == 0) shift = A(t.at[0]);
            for (int v = 0; v < V; v++) {
                A d = A(t.at[v]) - shift;
                one += d;
                two += d * d;
            }
            count += V;
        }
    });
    A mean = count > 0 ? one / count : A(0);
    return Block::meet(Moments{count, shift + mean, two - one * mean}, Moments::join);
}

// partial: three tables of a share's moments; not used where there is one share.
extern "C" __global__ void plane_moments(
    const T* x, A* partial, A* mean, A* var, A* rstd, A* running_mean, A* running_var, Index samples, Index channels,
    Index positions, Index length, Index parts, Index chunks, double eps, double momentum
) {
    constexpr int V = WIDEST;
    bool packed = positions % V == 0 && fits<T, V>(x);
    FOR_ROWS(block, channels * chunks) {
        Index chunk = block / channels, c = block % channels;
        Moments found = packed
            ? moments_of<V>(x, samples, channels, c, chunk, chunks, positions, length, parts)
            : moments_of<1>(x, samples, channels, c, chunk, chunks, positions, length, parts);
        if (threadIdx.x) continue;
        if (chunks == 1) {
            settle(c, found, mean, var, rstd, running_mean, running_var, A(eps), A(momentum));
        } else {
            Index table = chunks * channels;
            partial[block] = found.count;
            partial[table + block] = found.mean;
            partial[2 * table + block] = found.squares;
        }
    }
}

extern "C" __global__ void plane_moments_joined(
    const A* partial, A* mean, A* var, A* rstd, A* running_mean, A* running_var, Index channels, Index chunks,
    double eps, double momentum
) {
    Index table = chunks * channels;
    FOR_ROWS(c, channels) {
        Moments found = {0, 0, 0};
        for (Index k = threadIdx.x; k < chunks; k += blockDim.x) {
            Index from = k * channels + c;
            found = Moments::join(found, {partial[from], partial[table + from], partial[2 * table + from]});
        }
        found = Block::meet(found, Moments::join);
        if (threadIdx.x == 0) settle(c, found, mean, var, rstd, running_mean, running_var, A(eps), A(momentum));
    }
}

// Statistics that were given.
extern "C" __global__ void given_moments(
    const T* mean, const A* mean_wide, const T* var, const A* var_wide, A* m, A* rstd, Index channels, double eps
) {
    Weights means = {mean, mean_wide}, vars = {var, var_wide};
    FOR_EACH(c, channels) {
        m[c] = means.at(c);
        rstd[c] = 1 / sqrt(vars.at(c) + A(eps));
    }
}

template <int V> __device__ void draw(
    const T* x, const A* mean, const A* rstd, Weights w, Weights b, T* out, Index planes, Index channels,
    Index members, Index positions, Index length, Index parts
) {
    Stand<V> at(positions, length, parts);
    if (at.line >= at.lines) return;
    Index step = (Index)gridDim.x * at.lines;
    for (Index item = (Index)blockIdx.x * at.lines + at.line; item < planes * parts; item += step) {
        Index plane = at.plane(item), begin = at.begin(item, plane), first = plane * positions + begin;
        Index c = plane % channels, which = members ? plane / members : c, packs = at.packs(begin);
        A m = mean[which], scale = w.given() ? rstd[which] * w.at(c) : rstd[which], shift = b.given() ? b.at(c) : A(0);
#pragma unroll 4
        for (Index k = at.lane; k < packs; k += at.lanes) {
            Pack<T, V> t = *(const Pack<T, V>*)(x + first + k * V);
            for (int v = 0; v < V; v++) t.at[v] = T((A(t.at[v]) - m) * scale + shift);
            *(Pack<T, V>*)(out + first + k * V) = t;
        }
    }
}

extern "C" __global__ void draw_planes(
    const T* x, const A* mean, const A* rstd, const T* w, const A* w_wide, const T* b, const A* b_wide, T* out,
    Index planes, Index channels, Index members, Index positions, Index length, Index parts
) {
    constexpr int V = WIDEST;
    Weights ws = {w, w_wide}, bs = {b, b_wide};
    if (positions % V == 0 && fits<T, V>(x) && fits<T, V>(out)) {
        draw<V>(x, mean, rstd, ws, bs, out, planes, channels, members, positions, length, parts);
    } else {
        draw<1>(x, mean, rstd, ws, bs, out, planes, channels, members, positions, length, parts);
    }
}

""",
)


def statistics(
    xp: Any,
    x: Array,
    at: Planes,
    eps: float,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Means, biased variances, and 1/sqrt(var + eps): (C,), or of groups (N * groups,). x: in one piece.

    running_mean, running_var: (C,) in the dtype that is computed in; moved where they are given
    """
    kind, samples, channels, positions = wide(x.dtype), at.samples, at.channels, at.positions
    if at.members:  # a group of a sample is one long plane
        samples, channels, positions = 1, at.planes // at.members, positions * at.members
    length, many = parts(positions)
    shares = chunks(x, samples, channels, positions, length, many)
    mean, var, rstd = xp.empty((3, channels), kind)
    partial = xp.empty((3, shares, channels), kind) if shares > 1 else None
    results = mean, var, rstd, running_mean, running_var
    numbers = samples, channels, positions, length, many, shares, float(eps), float(momentum)
    SOURCE.rows(xp, "plane_moments", x.dtype, channels * shares, x, partial, *results, *numbers)
    if shares > 1:
        few = channels, shares, float(eps), float(momentum)
        SOURCE.rows(xp, "plane_moments_joined", x.dtype, channels, partial, *results, *few, threads=FEW)
    return mean, var, rstd


def given(xp: Any, dtype: Any, mean: Array, var: Array, eps: float) -> tuple[Array, Array]:
    """The means and 1/sqrt(var + eps) of images in `dtype`, in the dtype that is computed in: copies."""
    kind, channels = wide(dtype), len(mean)
    means, rstd = xp.empty((2, channels), kind)
    arrays = *either(xp, mean, dtype, kind), *either(xp, var, dtype, kind), means, rstd
    SOURCE.over(xp, "given_moments", dtype, channels, *arrays, channels, float(eps))
    return means, rstd


def normalized(xp: Any, x: Array, at: Planes, mean: Array, rstd: Array, w: Array | None, b: Array | None) -> Array:
    """(x - mean)*rstd*w + b. x: in one piece; w, b: (C,)."""
    kind, out = wide(x.dtype), xp.empty(x.shape, x.dtype)
    arrays = x, mean, rstd, *either(xp, w, x.dtype, kind), *either(xp, b, x.dtype, kind), out
    SOURCE.rows(xp, "draw_planes", x.dtype, at.blocks, *arrays, *at.drawn())
    return out
