"""Normalisation over channels of images that lie with channels last: rows of pixels, whose neighbours are channels.

Statistics are taken in two stages. In the first, a block takes a share of the pixels; its threads stand in lines, each
line takes a pixel at a time, and neighbours in a line neighbouring channels, so that what they read lies side by side.
In the second a block joins what was found of a channel, and moves the running statistics. The third stage draws.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import THREADS, Source, flat, wide
from ddp.ops.formats import from_pixels, is_channels_last, pixels

# Of a channel of some pixels: their number, their mean, and the sum of the squares of what they differ from it. Each
# thread takes the first pixel it meets off all of its few, so that no digits are lost, wherever the mean lies.
SOURCE = Source(
    "channels",
    """
template <int V> struct alignas(V * sizeof(T)) Pack { T at[V]; };

template <int V> __device__ bool fits(const void* x, Index channels) {
    return channels % V == 0 && (size_t)x % (V * sizeof(T)) == 0;
}

struct Moments {
    A count, mean, squares;

    static __device__ Moments join(Moments a, Moments b) {
        A count = a.count + b.count;
        if (count == 0) return a;
        A far = b.mean - a.mean, part = b.count / count;
        return {count, a.mean + far * part, a.squares + b.squares + far * far * a.count * part};
    }
};

struct Pair {
    A one, two;

    static __device__ Pair join(Pair a, Pair b) { return {a.one + b.one, a.two + b.two}; }
};

// How the threads of a block stand before `groups` groups of channels: `lanes` side by side, in `lines`.
struct Stand {
    Index lanes, lines, lane, line, tiles, tile, chunk;

    __device__ Stand(Index groups, Index block) {
        lanes = groups < blockDim.x ? groups : blockDim.x;
        lines = blockDim.x / lanes;
        lane = threadIdx.x % lanes;
        line = threadIdx.x / lanes;
        tiles = (groups + lanes - 1) / lanes;
        tile = block % tiles;
        chunk = block / tiles;
    }
};

// The lines of a block meet: the first one holds what all found. Idle threads, behind the last line, come along.
template <class V> __device__ V meet_lines(V value, const Stand& at) {
    __shared__ V cells[1024];
    cells[threadIdx.x] = value;
    __syncthreads();
    for (Index left = at.lines; left > 1;) {
        Index half = (left + 1) / 2;
        if (at.line < left / 2) {
            cells[threadIdx.x] = V::join(cells[threadIdx.x], cells[threadIdx.x + half * at.lanes]);
        }
        left = half;
        __syncthreads();
    }
    V result = cells[threadIdx.x];
    __syncthreads();
    return result;
}

template <int V> __device__ void take_moments(
    const T* x, A* counts, A* means, A* squares, Index rows, Index channels, Index chunks
) {
    Index groups = channels / V, tiles = Stand(groups, 0).tiles;
    for (Index block = blockIdx.x; block < tiles * chunks; block += gridDim.x) {
        Stand at(groups, block);
        Index group = at.tile * at.lanes + at.lane, start = at.chunk * at.lines + at.line;
        bool mine = at.line < at.lines && group < groups;
        A shift[V], one[V], two[V], count = 0;
        for (int i = 0; i < V; i++) shift[i] = one[i] = two[i] = 0;
        if (mine) {
            for (Index row = start; row < rows; row += chunks * at.lines) {
                Pack<V> t = *(const Pack<V>*)(x + row * channels + group * V);
                for (int i = 0; i < V; i++) {
                    if (count == 0) shift[i] = A(t.at[i]);
                    A d = A(t.at[i]) - shift[i];
                    one[i] += d;
                    two[i] += d * d;
                }
                count += 1;
            }
        }
        for (int i = 0; i < V; i++) {
            A mean = count > 0 ? one[i] / count : A(0);
            Moments found = {count, shift[i] + mean, two[i] - one[i] * mean};
            found = meet_lines(found, at);
            if (mine && at.line == 0) {
                Index to = at.chunk * channels + group * V + i;
                counts[to] = found.count;
                means[to] = found.mean;
                squares[to] = found.squares;
            }
        }
    }
}

extern "C" __global__ void moments(
    const T* x, A* counts, A* means, A* squares, Index rows, Index channels, Index chunks
) {
    if (fits<4>(x, channels)) take_moments<4>(x, counts, means, squares, rows, channels, chunks);
    else take_moments<1>(x, counts, means, squares, rows, channels, chunks);
}

// mean, var (biased), rstd of each channel; running statistics move where they are given.
extern "C" __global__ void join_moments(
    const A* counts, const A* means, const A* squares, A* mean, A* var, A* rstd, A* running_mean, A* running_var,
    Index channels, Index chunks, double eps, double momentum
) {
    FOR_ROWS(c, channels) {
        Moments found = {0, 0, 0};
        for (Index k = threadIdx.x; k < chunks; k += blockDim.x) {
            Index from = k * channels + c;
            found = Moments::join(found, {counts[from], means[from], squares[from]});
        }
        found = Block::meet(found, Moments::join);
        if (threadIdx.x == 0) {
            A v = found.squares / found.count;
            mean[c] = found.mean;
            var[c] = v;
            rstd[c] = 1 / sqrt(v + A(eps));
            if (running_mean) running_mean[c] += A(momentum) * (found.mean - running_mean[c]);
            if (running_var) {
                A whole = found.squares / (found.count > 1 ? found.count - 1 : A(1));
                running_var[c] += A(momentum) * (whole - running_var[c]);
            }
        }
    }
}

template <int V> __device__ void draw(
    const T* x, const A* mean, const A* rstd, const A* w, const A* b, T* out, Index rows, Index channels
) {
    Index groups = channels / V;
    FOR_EACH(k, rows * groups) {
        Index c = k % groups * V;
        Pack<V> t = *(const Pack<V>*)(x + k * V), z;
        for (int i = 0; i < V; i++) {
            A scale = rstd[c + i] * (w ? w[c + i] : A(1));
            z.at[i] = T((A(t.at[i]) - mean[c + i]) * scale + (b ? b[c + i] : A(0)));
        }
        *(Pack<V>*)(out + k * V) = z;
    }
}

extern "C" __global__ void draw_channels(
    const T* x, const A* mean, const A* rstd, const A* w, const A* b, T* out, Index rows, Index channels
) {
    if (fits<4>(x, channels) && fits<4>(out, channels)) draw<4>(x, mean, rstd, w, b, out, rows, channels);
    else draw<1>(x, mean, rstd, w, b, out, rows, channels);
}

template <int V> __device__ void take_sums(
    const T* g, const T* x, const A* mean, A* along, A* across, Index rows, Index channels, Index chunks
) {
    Index groups = channels / V, tiles = Stand(groups, 0).tiles;
    for (Index block = blockIdx.x; block < tiles * chunks; block += gridDim.x) {
        Stand at(groups, block);
        Index group = at.tile * at.lanes + at.lane, start = at.chunk * at.lines + at.line;
        bool mine = at.line < at.lines && group < groups;
        A one[V], two[V], middle[V];
        for (int i = 0; i < V; i++) {
            one[i] = two[i] = 0;
            middle[i] = mine && x ? mean[group * V + i] : A(0);
        }
        if (mine) {
            for (Index row = start; row < rows; row += chunks * at.lines) {
                Index from = row * channels + group * V;
                Pack<V> u = *(const Pack<V>*)(g + from), t = x ? *(const Pack<V>*)(x + from) : u;
                for (int i = 0; i < V; i++) {
                    one[i] += A(u.at[i]);
                    two[i] += A(u.at[i]) * (A(t.at[i]) - middle[i]);
                }
            }
        }
        for (int i = 0; i < V; i++) {
            Pair found = {one[i], two[i]};
            found = meet_lines(found, at);
            if (mine && at.line == 0) {
                Index to = at.chunk * channels + group * V + i;
                along[to] = found.one;
                if (x) across[to] = found.two;
            }
        }
    }
}

// Of each channel of a share of pixels: the sums of g, and of g*(x - mean) where there is an x.
extern "C" __global__ void slope_sums(
    const T* g, const T* x, const A* mean, A* along, A* across, Index rows, Index channels, Index chunks
) {
    if (fits<4>(g, channels) && fits<4>(x, channels)) {
        take_sums<4>(g, x, mean, along, across, rows, channels, chunks);
    } else {
        take_sums<1>(g, x, mean, along, across, rows, channels, chunks);
    }
}

// db and dw; and, of all `rows` pixels, the mean of g, and what of x - mean is taken off.
extern "C" __global__ void join_slopes(
    const A* along, const A* across, const A* rstd, A* dw, A* db, A* level, A* slope, Index rows, Index channels,
    Index chunks
) {
    FOR_ROWS(c, channels) {
        Pair found = {0, 0};
        for (Index k = threadIdx.x; k < chunks; k += blockDim.x) {
            Index from = k * channels + c;
            found = Pair::join(found, {along[from], across ? across[from] : A(0)});
        }
        found = Block::meet(found, Pair::join);
        if (threadIdx.x == 0) {
            if (db) db[c] = found.one;
            if (dw) dw[c] = found.two * rstd[c];
            if (level) {
                level[c] = found.one / A(rows);
                slope[c] = found.two * rstd[c] * rstd[c] / A(rows);
            }
        }
    }
}

template <int V> __device__ void draw_back(
    const T* g, const T* x, const A* mean, const A* rstd, const A* w, const A* level, const A* slope, T* dx, Index rows,
    Index channels
) {
    Index groups = channels / V;
    FOR_EACH(k, rows * groups) {
        Index c = k % groups * V;
        Pack<V> u = *(const Pack<V>*)(g + k * V), t = level ? *(const Pack<V>*)(x + k * V) : u, z;
        for (int i = 0; i < V; i++) {
            A d = A(u.at[i]);
            if (level) d -= level[c + i] + (A(t.at[i]) - mean[c + i]) * slope[c + i];
            z.at[i] = T(d * rstd[c + i] * (w ? w[c + i] : A(1)));
        }
        *(Pack<V>*)(dx + k * V) = z;
    }
}

// Without `level`, the statistics were given, and x is not read.
extern "C" __global__ void draw_slopes(
    const T* g, const T* x, const A* mean, const A* rstd, const A* w, const A* level, const A* slope, T* dx, Index rows,
    Index channels
) {
    if (fits<4>(g, channels) && fits<4>(x, channels) && fits<4>(dx, channels)) {
        draw_back<4>(g, x, mean, rstd, w, level, slope, dx, rows, channels);
    } else {
        draw_back<1>(g, x, mean, rstd, w, level, slope, dx, rows, channels);
    }
}

// Of images (n, channels, positions) in the order of their axes: the sums of each channel.
extern "C" __global__ void plane_sums(const T* g, A* out, Index n, Index channels, Index positions) {
    FOR_ROWS(c, channels) {
        A sum = 0;
        for (Index k = threadIdx.x; k < n * positions; k += blockDim.x) {
            sum += A(g[(k / positions * channels + c) * positions + k % positions]);
        }
        sum = Block::sum(sum);
        if (threadIdx.x == 0) out[c] = sum;
    }
}
""",
)

BLOCKS = 1024  # at most that share the pixels: some for each multiprocessor, and few enough to be joined by a block
FEWEST = 8  # pixels of a thread: with fewer, what is found of shares would be as much as the image


def shares(rows: int, channels: int) -> tuple[int, int]:
    """How many shares the pixels are cut into, and how many blocks take them."""
    groups = -(-channels // 4)
    lanes = max(1, min(groups, THREADS))
    tiles = -(-groups // lanes)
    chunks = max(1, min(BLOCKS // tiles, -(-rows // (FEWEST * (THREADS // lanes)))))
    # Where memory is not aligned to four channels, a group is one channel, and blocks take several of these tiles.
    return chunks, chunks * tiles


def statistics(
    xp: Any,
    x: Array,
    eps: float,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.0,
) -> tuple[Array, Array, Array]:
    """The means of channels, their biased variances, and 1/sqrt(var + eps). x: (N, C, H, W) with channels last.

    running_mean, running_var: (C,) in the dtype that is computed in; moved where they are given
    """
    rows, channels = pixels(x).shape
    kind, (chunks, blocks) = wide(x.dtype), shares(rows, channels)
    counts, means, squares = xp.empty((3, chunks, channels), kind)
    mean, var, rstd = xp.empty((3, channels), kind)
    SOURCE.rows(xp, "moments", x.dtype, blocks, pixels(x), counts, means, squares, rows, channels, chunks)
    arrays = counts, means, squares, mean, var, rstd, running_mean, running_var
    SOURCE.rows(xp, "join_moments", x.dtype, channels, *arrays, channels, chunks, float(eps), float(momentum))
    return mean, var, rstd


def normalized(xp: Any, x: Array, mean: Array, rstd: Array, w: Array | None, b: Array | None) -> Array:
    """(x - mean)*rstd*w + b. x: (N, C, H, W) with channels last, and so is the result; the others: (C,)."""
    rows, kind = pixels(x), wide(x.dtype)
    out = xp.empty(rows.shape, x.dtype)
    arrays = rows, mean, rstd, flat(xp, w, kind), flat(xp, b, kind), out
    SOURCE.over(xp, "draw_channels", x.dtype, -(-rows.size // 4), *arrays, *rows.shape)
    return from_pixels(out, x.shape)


def gradients(
    xp: Any,
    g: Array,
    x: Array | None,
    mean: Array,
    rstd: Array,
    w: Array | None,
    needs: tuple[bool, ...],
    fixed: bool,
) -> tuple[Array | None, Array | None, Array | None]:
    """dx as g lies, dw and db in the dtype that is computed in. fixed: the statistics were given.

    x: None where nothing that is needed reads it
    """
    slopes, kind = pixels(g), wide(g.dtype)
    rows, channels = slopes.shape
    images = None if x is None else pixels(x)
    level = slope = dw = db = None
    if needs[1] or needs[2] or not fixed:
        chunks, blocks = shares(rows, channels)
        along, across = xp.empty((2, chunks, channels), kind)
        read = images is not None
        args = slopes, images, mean, along, across if read else None, rows, channels, chunks
        SOURCE.rows(xp, "slope_sums", g.dtype, blocks, *args)
        dw = xp.empty(channels, kind) if needs[1] else None
        db = xp.empty(channels, kind) if needs[2] else None
        if needs[0] and not fixed:
            level, slope = xp.empty((2, channels), kind)
        made = along, across if read else None, rstd, dw, db, level, slope
        SOURCE.rows(xp, "join_slopes", g.dtype, channels, *made, rows, channels, chunks)
    if not needs[0]:
        return None, dw, db
    dx = xp.empty(slopes.shape, g.dtype)
    arrays = slopes, images, mean, rstd, flat(xp, w, kind), level, slope, dx
    SOURCE.over(xp, "draw_slopes", g.dtype, -(-slopes.size // 4), *arrays, rows, channels)
    return from_pixels(dx, g.shape), dw, db


def channel_sums(xp: Any, g: Array) -> Array:
    """The sums of channels, in the dtype that is computed in. g: (N, C, H, W), however it lies."""
    kind, (n, channels, h, w) = wide(g.dtype), g.shape
    out = xp.zeros(channels, kind)
    if not g.size:
        return out
    if not is_channels_last(g):
        SOURCE.rows(xp, "plane_sums", g.dtype, channels, xp.ascontiguousarray(g), out, n, channels, h * w)
        return out
    rows, (chunks, blocks) = pixels(g), shares(n * h * w, channels)
    along = xp.empty((chunks, channels), kind)
    SOURCE.rows(xp, "slope_sums", g.dtype, blocks, rows, None, None, along, None, n * h * w, channels, chunks)
    nothing = (None,) * 2
    arrays = along, None, out, None, out, *nothing
    SOURCE.rows(xp, "join_slopes", g.dtype, channels, *arrays, n * h * w, channels, chunks)
    return out
