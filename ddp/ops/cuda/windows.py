"""Windows over images: pooling, and the columns of convolutions. A thread makes one number, and none is added to twice.

Backward gathers: the thread of a pixel looks for windows that saw it, so that there is nothing to clear, no atomic
addition, and the same sums come out of every run.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source

WALK = ", ".join(f"Index {name}" for name in ("h", "w", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"))

SOURCE = Source(
    "windows",
    """
// x: (n, h, w, channels); with one channel, images whose planes lie one by one. `which`: the kernel's element that a
// maximum was seen at. A nan takes the place of whatever was there: the last one stays, and of equal maxima the first.
extern "C" __global__ void max_pool(const T* x, T* out, int* which, Index* index, Index n, Index channels, WALK) {
    FOR_EACH(k, n * oh * ow * channels) {
        Index c = k % channels, q = k / channels % ow * sw - pw, p = k / channels / ow % oh * sh - ph;
        const T* image = x + k / channels / ow / oh * h * w * channels + c;
        A top = LOWEST;
        int best = -1;
        Index at = 0;
        for (Index i = 0; i < kh; i++) {
            Index row = p + i * dh;
            if (row < 0 || row >= h) continue;
            for (Index j = 0; j < kw; j++) {
                Index column = q + j * dw;
                if (column < 0 || column >= w) continue;
                A v = A(image[(row * w + column) * channels]);
                if (v > top || v != v || best < 0) {
                    top = v;
                    best = int(i * kw + j);
                    at = row * w + column;
                }
            }
        }
        out[k] = T(top);
        which[k] = best;
        if (index) index[k] = at;
    }
}

extern "C" __global__ void max_pool_backward(const T* g, const int* which, T* dx, Index n, Index channels, WALK) {
    FOR_EACH(k, n * h * w * channels) {
        Index c = k % channels, column = k / channels % w + pw, row = k / channels / w % h + ph;
        Index image = k / channels / w / h * oh * ow;
        A added = 0;
        for (Index i = 0; i < kh; i++) {
            Index p = row - i * dh;
            if (p < 0 || p % sh || p / sh >= oh) continue;
            for (Index j = 0; j < kw; j++) {
                Index q = column - j * dw;
                if (q < 0 || q % sw || q / sw >= ow) continue;
                Index at = (image + p / sh * ow + q / sw) * channels + c;
                if (which[at] == i * kw + j) added += A(g[at]);
            }
        }
        dx[k] = T(added);
    }
}

// x: (n, groups * channels, h, w) to (n, groups, channels * kh * kw + ones, lines * ow), the lines of positions from
// `first` on; with `ones` the last row of each group is 1.
extern "C" __global__ void to_columns(
    const T* x, T* columns, Index n, Index groups, Index channels, Index ones, Index first, Index lines, WALK
) {
    Index length = channels * kh * kw + ones;
    FOR_EACH(k, n * groups * length * lines * ow) {
        Index q = k % ow, p = k / ow % lines + first, at = k / (lines * ow) % length;
        Index plane = k / (lines * ow * length) * channels + at / (kh * kw);
        Index row = p * sh - ph + at / kw % kh * dh, column = q * sw - pw + at % kw * dw;
        if (at == channels * kh * kw) columns[k] = T(1);
        else if (row < 0 || row >= h || column < 0 || column >= w) columns[k] = T(0);
        else columns[k] = x[(plane * h + row) * w + column];
    }
}

// columns: (n, channels, kh * kw, lines * ow) added up where they were seen; to what dx holds where `more`.
extern "C" __global__ void from_columns(
    const T* columns, T* dx, Index planes, Index first, Index lines, Index more, WALK
) {
    FOR_EACH(k, planes * h * w) {
        Index column = k % w + pw, row = k / w % h + ph, plane = k / (h * w);
        A added = more ? A(dx[k]) : A(0);
        for (Index i = 0; i < kh; i++) {
            Index p = row - i * dh;
            if (p < 0 || p % sh || p / sh < first || p / sh >= first + lines) continue;
            for (Index j = 0; j < kw; j++) {
                Index q = column - j * dw;
                if (q < 0 || q % sw || q / sw >= ow) continue;
                added += A(columns[((plane * kh * kw + i * kw + j) * lines + p / sh - first) * ow + q / sw]);
            }
        }
        dx[k] = T(added);
    }
}
""".replace("WALK", WALK),
)


def numbers(walk: Any) -> tuple[int, ...]:
    """What `WALK` declares."""
    return (*walk.image, *walk.out, *walk.kernel, *walk.stride, *walk.padding, *walk.dilation)


def maxima(xp: Any, x: Array, n: int, channels: int, walk: Any, index: bool) -> tuple[Array, Array, Array | None]:
    """(n * OH * OW, channels): maxima, the kernel's element that each was seen at, and where in (H, W) that is.

    x: memory of (n, H, W, channels)
    """
    shape = n * walk.out[0] * walk.out[1], channels
    out, which = xp.empty(shape, x.dtype), xp.empty(shape, "int32")
    where = xp.empty(shape, "int64") if index else None
    SOURCE.over(xp, "max_pool", x.dtype, out.size, x, out, which, where, n, channels, *numbers(walk))
    return out, which, where


def maxima_backward(xp: Any, g: Array, which: Array, n: int, channels: int, walk: Any) -> Array:
    """(n * H * W, channels): the gradient of x."""
    dx = xp.empty((n * walk.image[0] * walk.image[1], channels), g.dtype)
    SOURCE.over(xp, "max_pool_backward", g.dtype, dx.size, g, which, dx, n, channels, *numbers(walk))
    return dx


def max_pool(xp: Any, x: Array, walk: Any, index: bool) -> tuple[Array, Array, Array | None]:
    """The maxima, the kernel's element that each was seen at, and where in (H, W) that is. x: (N, C, H, W)."""
    shape = (*x.shape[:2], *walk.out)
    out, which, where = maxima(xp, xp.ascontiguousarray(x), x.shape[0] * x.shape[1], 1, walk, index)
    return out.reshape(shape), which, None if where is None else where.reshape(shape)


def max_pool_backward(xp: Any, g: Array, which: Array, walk: Any) -> Array:
    """The gradient of x."""
    dx = maxima_backward(xp, xp.ascontiguousarray(g), which, g.shape[0] * g.shape[1], 1, walk)
    return dx.reshape(*g.shape[:2], *walk.image)


def to_columns(
    xp: Any, x: Array, walk: Any, groups: int = 1, ones: bool = False, first: int = 0, lines: int | None = None
) -> Array:
    """(n, groups, channels * KH * KW + ones, lines * OW): what each position sees, in `lines` lines from `first` on.

    x: (n, groups * channels, H, W).
    """
    n, channels = x.shape[0], x.shape[1] // groups
    lines = walk.out[0] - first if lines is None else lines
    out = xp.empty((n, groups, channels * walk.elements + ones, lines * walk.out[1]), x.dtype)
    arrays = xp.ascontiguousarray(x), out, n, groups, channels, ones, first, lines
    SOURCE.over(xp, "to_columns", x.dtype, out.size, *arrays, *numbers(walk))
    return out


def from_columns(xp: Any, columns: Array, walk: Any, dx: Array, first: int = 0, lines: int | None = None) -> None:
    """Fills `dx` (n, channels, H, W), in one piece, with `columns` added up; adds to it what is not the first lines.

    columns: n * channels * KH * KW * lines * OW of them.
    """
    lines = walk.out[0] - first if lines is None else lines
    planes = dx.shape[0] * dx.shape[1]
    columns = xp.ascontiguousarray(columns)
    arrays = columns, dx, planes, first, lines, first > 0
    SOURCE.over(xp, "from_columns", dx.dtype, dx.size, *arrays, *numbers(walk))
