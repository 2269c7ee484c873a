"""A window that walks over images: where it stands, and what it sees. Convolution, pooling and patches share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.ops._op import Array

Pair = tuple[int, int]

# Bytes to work on at a time: most of a 1 MiB L2 cache, what is made of them takes the rest. A GPU wants few launches.
TILES = {"numpy": 640 << 10, "cupy": 1 << 28}


def samples(xp: Any, n: int, nbytes: int) -> Iterator[slice]:
    """n samples of `nbytes` each, as many at a time as a tile holds."""
    step = max(1, TILES[xp.__name__] // max(nbytes, 1))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def output_size(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False) -> int:
    """How many positions a window of `kernel` takes along an axis of length `n`; not positive if it does not fit.

    ceil: the last one may reach beyond the frame, if it starts within the image or the padding before it.
    """
    rest = n + 2 * padding - dilation * (kernel - 1) - 1
    out = (rest + stride - 1 if ceil else rest) // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= n + padding else out


class Walk:
    """How a window of `kernel` walks over an image in a frame; every pair is (along H, along W).

    out: how many positions it takes; as many as fit unless given. framed: the size of the image with its padding, and
    with what the window needs beyond it. inside: where the image lies in there. elements: of the kernel. still: whether
    the window sees exactly the image, one element at a time. apart: whether no element is seen from two positions.
    even: whether each is seen from one.
    """

    __slots__ = (
        "apart",
        "dilation",
        "elements",
        "even",
        "framed",
        "image",
        "inside",
        "kernel",
        "out",
        "padding",
        "still",
        "stride",
    )

    def __init__(
        self, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Pair | None = None
    ) -> None:
        self.image, self.kernel, self.stride, self.padding, self.dilation = image, kernel, stride, padding, dilation
        (h, w), (kh, kw), (sh, sw), (ph, pw), (dh, dw) = image, kernel, stride, padding, dilation
        self.out = oh, ow = out or (output_size(h, kh, sh, ph, dh), output_size(w, kw, sw, pw, dw))
        self.framed = (
            max(h + 2 * ph, (oh - 1) * sh + dh * (kh - 1) + 1),
            max(w + 2 * pw, (ow - 1) * sw + dw * (kw - 1) + 1),
        )
        self.inside = slice(ph, ph + h), slice(pw, pw + w)
        self.elements = kh * kw
        self.apart = sh > dh * (kh - 1) and sw > dw * (kw - 1)
        self.even = kernel == stride and dilation == (1, 1) and self.framed == (oh * kh, ow * kw)
        self.still = kernel == (1, 1) and stride == (1, 1) and padding == (0, 0)

    def shifts(self, lines: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """For each kernel element, in reading order, what it sees of the frame; of some lines of positions only."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        start, stop = (0, oh) if lines is None else (lines.start, lines.stop)
        for i in range(self.kernel[0]):
            rows = slice(i * dh + start * sh, i * dh + (stop - 1) * sh + 1, sh)
            for j in range(self.kernel[1]):
                yield rows, slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)

    def view(self, xp: Any, framed: Array, axis: int, lines: slice | None = None) -> Array:
        """`framed` with axes `axis` and `axis + 1`, (H, W), as (OH, OW, KH, KW): what each position sees. A view."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        if lines is not None:
            framed = framed[(slice(None),) * axis + (slice(lines.start * sh, None),)]
            oh = lines.stop - lines.start
        lead, (h, w), rest = framed.strides[:axis], framed.strides[axis : axis + 2], framed.strides[axis + 2 :]
        return xp.lib.stride_tricks.as_strided(
            framed,
            (*framed.shape[:axis], oh, ow, *self.kernel, *framed.shape[axis + 2 :]),
            (*lead, h * sh, w * sw, h * dh, w * dw, *rest),
        )


def frame(xp: Any, x: Array, walk: Walk, value: float) -> Array:
    """x: (N, C, H, W) in a frame of `value`; x itself if the walk needs none."""
    if walk.framed == walk.image:
        return x
    framed = xp.full((*x.shape[:2], *walk.framed), value, x.dtype)
    framed[..., walk.inside[0], walk.inside[1]] = x
    return framed
