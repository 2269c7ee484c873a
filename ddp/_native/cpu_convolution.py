"""Convolution of float32 on the CPU, by kernels (`convolution.c`, `depthwise.c`) or as products of whole images.

Other convolutions use the formulas of `ddp.ops.convolution`: cases that the kernels do not take, and cases in which the
formulas are at least as fast. `way` chooses; `benchmarks/zoo.py` measures models that use each of its ways.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from collectives.native import address
from ddp._native import library
from ddp.ops import convolution
from ddp.ops.arrays import Array
from ddp.ops.convolution import Shape, Window

MAX_STRIDE = 4  # MOST_STRIDE of convolution.c
MIN_CHANNELS = 16  # with fewer, Winograd's transforms take longer than the multiplications that they save
WINOGRAD_WINDOWS = (((3, 3), (1, 1)), ((2, 2), (1, 1)), ((4, 4), (2, 2)))  # kernel, stride
WIDE = 16  # as in convolution.c
# Maximum of filters * channels for `convolve_filters`. Above it, a product of columns is faster.
MAX_FILTERS = 1024
# A result with fewer positions is faster as one product for several images than as one product per image.
MIN_POSITIONS = 64
# A depthwise result with more positions, or an image with more than 4 times as many, is faster by `convolve`.
MAX_POSITIONS = 64
# Without groups, a narrower result is faster by a product of columns than by `convolve`.
MIN_WIDTH = 8
IMAGE, FILTER, RESULT = range(3)  # as in depthwise.c
assert library is not None
_N = ctypes.c_ssize_t
_P = ctypes.c_void_p
_FLAG = ctypes.c_int


def _kernel(name: str, *arguments: Any) -> Any:
    function = getattr(library, f"{name}_f32")
    function.argtypes = (_P, *arguments)
    function.restype = _FLAG
    return function


CONVOLVE = _kernel("convolve", *[_N] * 4, _FLAG, *[_P] * 4)
CONVOLVE_FILTERS = _kernel("convolve_filters", *[_N] * 4, *[_P] * 3)
DEPTHWISE = _kernel("depthwise", *[_N] * 2, _FLAG, *[_P] * 4)
WINOGRAD = _kernel("winograd", *[_N] * 3, _FLAG, *[_P] * 4)
WINOGRAD_FILTERS = _kernel("winograd_filters", *[_N] * 3, *[_P] * 3)


def describe_window(window: Window, turned: bool = False) -> Any:
    """The struct `window` of kernels.c. turned: whether to swap the two axes"""
    pairs = window.image, window.kernel, window.stride, window.padding, window.dilation, window.out
    return (ctypes.c_int64 * 12)(*[n for pair in pairs for n in (pair[::-1] if turned else pair)])


def way(shape: Shape) -> str:
    """The way to compute a convolution: "winograd", "direct", "depthwise", "product", "whole" or "columns"."""
    window = shape.window
    if shape.groups == 1 and window.kernel == window.image and window.out == (1, 1) and window.padding == (0, 0):
        return "whole"
    if window.elements == 1:
        positions = window.out[0] * window.out[1]
        return "product" if window.is_identity and shape.groups == 1 and positions >= MIN_POSITIONS else "columns"
    channels = shape.channels, shape.filters
    are_wide = window.stride == (1, 1) or all(count % WIDE == 0 for count in channels)
    is_tiled = (window.kernel, window.stride) in WINOGRAD_WINDOWS and max(window.padding) <= 2 and all(window.image)
    if is_tiled and are_wide and window.dilation == (1, 1) and shape.groups == 1 and min(channels) >= MIN_CHANNELS:
        return "winograd"
    is_depthwise = shape.groups > 1 and shape.channels == shape.filters == 1
    if is_depthwise and math.prod(window.out) <= MAX_POSITIONS and math.prod(window.image) <= 4 * MAX_POSITIONS:
        return "depthwise"
    # Vectors hold positions along W: in short rows they are mostly empty.
    is_long = shape.groups > 1 or window.out[1] >= MIN_WIDTH
    return "direct" if is_long and max(window.stride) <= MAX_STRIDE else "columns"


def _takes(*arrays: Array | None) -> bool:
    return all(x is None or (type(x) is np.ndarray and x.dtype.char == "f" and x.size) for x in arrays)


def _plain(*arrays: Array | None) -> list[Array | None]:
    """The arrays, made C-contiguous and aligned."""
    return [None if x is None else np.require(x, requirements=["C", "A"]) for x in arrays]


def _convolve(shape: Shape, back: bool, x: Array, w: Array, b: Array | None) -> Array | None:
    """The convolution of x. With `back`, x is the gradient of the result, and the gradient of the images is returned.

    Returns None if the formula is to be used.
    """
    n, groups, channels, filters, window = shape
    chosen = way(shape)
    if chosen == "columns" or not _takes(x, w, b):
        return None
    out = np.empty((n, groups * (channels if back else filters), *(window.image if back else window.out)), np.float32)
    if chosen in ("product", "whole"):
        kernel = w.reshape(filters, -1)
        if chosen == "whole":
            np.matmul(x.reshape(n, -1), kernel if back else kernel.T, out.reshape(n, -1))
        else:
            np.matmul(kernel.T if back else kernel, x.reshape(n, x.shape[1], -1), out.reshape(n, out.shape[1], -1))
        if b is not None:
            out += b[:, None, None]
        return out
    arrays = _plain(x, w, b)
    addresses = [*map(address, arrays), address(out)]
    if chosen == "depthwise":
        of_roles = [addresses[3], *addresses[1:3], addresses[0]] if back else addresses
        done = DEPTHWISE(describe_window(window), n, groups, IMAGE if back else RESULT, *of_roles)
    elif chosen == "winograd":
        done = WINOGRAD(describe_window(window), n, channels, filters, back, *addresses)
    else:
        done = CONVOLVE(describe_window(window), n, groups, channels, filters, back, *addresses)
    return out if done else None


def _filter_gradient(shape: Shape, g: Array, x: Array) -> Array | None:
    """The gradient of the filters; None if the formula is to be used."""
    n, groups, channels, filters, window = shape
    chosen = way(shape)
    too_many_filters = chosen == "direct" and channels * filters > MAX_FILTERS
    if chosen == "columns" or too_many_filters or not _takes(g, x):
        return None
    dw = np.zeros((groups * filters, channels, *window.kernel), np.float32)
    if chosen == "whole":
        np.matmul(g.reshape(n, filters).T, x.reshape(n, -1), dw.reshape(filters, -1))
        return dw
    if chosen == "product":
        for z, image in zip(g.reshape(n, filters, -1), x.reshape(n, channels, -1), strict=True):
            dw += (z @ image.T)[:, :, None, None]
        return dw
    arrays = _plain(x, g)
    addresses = [*map(address, arrays), address(dw)]
    if chosen == "depthwise":
        done = DEPTHWISE(describe_window(window), n, groups, FILTER, addresses[0], addresses[2], None, addresses[1])
    elif chosen == "winograd":
        done = WINOGRAD_FILTERS(describe_window(window), n, channels, filters, *addresses)
    else:
        done = CONVOLVE_FILTERS(describe_window(window), n, groups, channels, filters, *addresses)
    return dw if done else None


def correlate(xp: Any, x: Array, w: Array, b: Array | None, shape: Shape) -> Array:
    out = _convolve(shape, False, x, w, b)
    return convolution.correlate.__wrapped__(xp, x, w, b, shape) if out is None else out


def adjoint(xp: Any, g: Array, w: Array | None, x: Array | None, shape: Shape) -> tuple[Array | None, Array | None]:
    dx = None if w is None else _convolve(shape, True, g, w, None)
    dw = None if x is None else _filter_gradient(shape, g, x)
    if (dx is None and w is not None) or (dw is None and x is not None):
        gradients = convolution.adjoint.__wrapped__(xp, g, w if dx is None else None, x if dw is None else None, shape)
        dx = gradients[0] if dx is None else dx
        dw = gradients[1] if dw is None else dw
    return dx, dw
