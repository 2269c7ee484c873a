"""Pooling of images that lie with channels last: neighbouring threads take neighbouring channels of one window.

Backward gathers, as in `windows`: the thread of an element looks for the windows that saw it.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda import windows
from ddp.ops.cuda._source import Source
from ddp.ops.cuda.windows import WALK, numbers
from ddp.ops.formats import from_pixels, pixels
from ddp.ops.windows import Pair, Walk

# A mean is taken over `divisor` elements, or where that is 0 over those of its window: with the padding that it sees
# where `padded`. Windows that are `spread` evenly over the image, of nearly one size, are given by the sizes alone.
SOURCE = Source(
    "pooling",
    """
struct Span {
    Index start, stop, seen;  // within the image; how many the window counts

    __device__ Span(Index at, Index n, Index out, Index k, Index s, Index p, Index spread, Index padded) {
        if (spread) {
            start = at * n / out;
            stop = ((at + 1) * n + out - 1) / out;
            seen = stop - start;
            return;
        }
        Index first = at * s - p, last = first + k;
        start = first < 0 ? 0 : first;
        stop = last < n ? last : n;
        seen = padded ? (last < n + p ? last : n + p) - first : stop - start;
    }
};

extern "C" __global__ void avg_pool_last(
    const T* x, T* out, Index n, Index channels, Index spread, Index padded, Index divisor, WALK
) {
    FOR_EACH(k, n * oh * ow * channels) {
        Index c = k % channels;
        Span columns(k / channels % ow, w, ow, kw, sw, pw, spread, padded);
        Span rows(k / channels / ow % oh, h, oh, kh, sh, ph, spread, padded);
        const T* image = x + k / channels / ow / oh * h * w * channels + c;
        A sum = 0;
        for (Index i = rows.start; i < rows.stop; i++) {
            for (Index j = columns.start; j < columns.stop; j++) sum += A(image[(i * w + j) * channels]);
        }
        out[k] = T(sum / A(divisor ? divisor : rows.seen * columns.seen));
    }
}

// The first and the last window along an axis that may see element i.
struct Seen {
    Index first, last;

    __device__ Seen(Index i, Index n, Index out, Index k, Index s, Index p, Index spread) {
        if (spread) {
            first = i * out / n;
            last = ((i + 1) * out + n - 1) / n - 1;
            return;
        }
        Index low = i + p - k + 1;
        first = low <= 0 ? 0 : (low + s - 1) / s;
        last = (i + p) / s < out - 1 ? (i + p) / s : out - 1;
    }
};

extern "C" __global__ void avg_pool_last_backward(
    const T* g, T* dx, Index n, Index channels, Index spread, Index padded, Index divisor, WALK
) {
    FOR_EACH(k, n * h * w * channels) {
        Index c = k % channels, column = k / channels % w, row = k / channels / w % h;
        const T* image = g + k / channels / w / h * oh * ow * channels + c;
        Seen across(column, w, ow, kw, sw, pw, spread), down(row, h, oh, kh, sh, ph, spread);
        A added = 0;
        for (Index p = down.first; p <= down.last; p++) {
            Span rows(p, h, oh, kh, sh, ph, spread, padded);
            for (Index q = across.first; q <= across.last; q++) {
                Span columns(q, w, ow, kw, sw, pw, spread, padded);
                A g_here = A(image[(p * ow + q) * channels]);
                added += g_here / A(divisor ? divisor : rows.seen * columns.seen);
            }
        }
        dx[k] = T(added);
    }
}
""".replace("WALK", WALK),
)


def _rows(xp: Any, n: int, size: Pair, channels: int, dtype: Any) -> Array:
    return xp.empty((n * size[0] * size[1], channels), dtype)


def max_pool(xp: Any, x: Array, walk: Walk, index: bool) -> tuple[Array, Array, Array | None]:
    """The maxima, the kernel's element that each was seen at (rows of pixels), and where in (H, W) that is.

    x: (N, C, H, W) with channels last; the first and the last result lie so, too.
    """
    n, channels = x.shape[:2]
    out, which, where = windows.maxima(xp, pixels(x), n, channels, walk, index)
    shape = (n, channels, *walk.out)
    return from_pixels(out, shape), which, None if where is None else from_pixels(where, shape)


def max_pool_backward(xp: Any, g: Array, which: Array, walk: Walk) -> Array:
    """The gradient of x, with channels last as g has them."""
    n, channels = g.shape[:2]
    return from_pixels(windows.maxima_backward(xp, pixels(g), which, n, channels, walk), (n, channels, *walk.image))


def avg_pool(xp: Any, x: Array, walk: Walk, padded: bool, divisor: int | None) -> Array:
    """The means. x: (N, C, H, W) with channels last; so lies the result."""
    return _avg(xp, "avg_pool_last", x, walk.out, (False, padded, divisor or 0, *numbers(walk)))


def avg_pool_backward(xp: Any, g: Array, walk: Walk, padded: bool, divisor: int | None) -> Array:
    """The gradient of x, with channels last as g has them."""
    return _avg(xp, "avg_pool_last_backward", g, walk.image, (False, padded, divisor or 0, *numbers(walk)))


def adaptive_avg_pool(xp: Any, x: Array, size: Pair) -> Array:
    """Means over windows spread evenly. x: (N, C, H, W) with channels last; so lies the result."""
    return _avg(xp, "avg_pool_last", x, size, (True, False, 0, *x.shape[2:], *size, *(0,) * 8))


def adaptive_avg_pool_backward(xp: Any, g: Array, image: Pair) -> Array:
    """The gradient of x, with channels last as g has them."""
    return _avg(xp, "avg_pool_last_backward", g, image, (True, False, 0, *image, *g.shape[2:], *(0,) * 8))


def _avg(xp: Any, entry: str, x: Array, size: Pair, numbers: tuple[int, ...]) -> Array:
    n, channels = x.shape[:2]
    out = _rows(xp, n, size, channels, x.dtype)
    SOURCE.over(xp, entry, x.dtype, out.size, pixels(x), out, n, channels, *numbers)
    return from_pixels(out, (n, channels, *size))
