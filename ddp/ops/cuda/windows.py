"""Windows over images: the columns of convolutions. A thread makes one number, and none is added to twice.

Backward gathers: the thread of a pixel looks for windows that saw it, so that there is nothing to clear, no atomic
addition, and the same sums come out of every run.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source

_WALK = ", ".join(f"Index {name}" for name in ("h", "w", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"))

SOURCE = Source(
    "windows",
    """
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
""".replace("WALK", _WALK),
)


def _numbers(walk: Any) -> tuple[int, ...]:
    """What `WALK` declares."""
    return (*walk.image, *walk.out, *walk.kernel, *walk.stride, *walk.padding, *walk.dilation)


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
    SOURCE.over(xp, "to_columns", x.dtype, out.size, *arrays, *_numbers(walk))
    return out


def from_columns(xp: Any, columns: Array, walk: Any, dx: Array, first: int = 0, lines: int | None = None) -> None:
    """Fills `dx` (n, channels, H, W), in one piece, with `columns` added up; adds to it what is not the first lines.

    columns: n * channels * KH * KW * lines * OW of them.
    """
    lines = walk.out[0] - first if lines is None else lines
    planes = dx.shape[0] * dx.shape[1]
    columns = xp.ascontiguousarray(columns)
    arrays = columns, dx, planes, first, lines, first > 0
    SOURCE.over(xp, "from_columns", dx.dtype, dx.size, *arrays, *_numbers(walk))
