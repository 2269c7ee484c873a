"""Convolution of float32 on the CPU by the kernels of `convolution.c`, or by a product an image where the kernel is 1x1.

What they do not take, or take no faster, goes to the formulas. `benchmarks/zoo.py` measures models of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from collectives.native import address
from ddp._native import library
from ddp.ops import convolution
from ddp.ops.convolution import Shape, Window
from ddp.ops.op import Array

_MOST_STRIDE = 4  # of convolution.c
_MIN_CHANNELS = 16  # from which on Winograd's products are worth their transforms
_MIN_POSITIONS = 64  # from which on a product an image is no slower than one of several images
assert library is not None
_N, _P, _FLAG = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int


def _kernel(name: str, *arguments: Any) -> Any:
    function = getattr(library, f"{name}_f32")
    function.argtypes, function.restype = (_P, *arguments), _FLAG
    return function


_CONVOLVE = _kernel("convolve", *[_N] * 4, _FLAG, *[_P] * 4)
_CONVOLVE_FILTERS = _kernel("convolve_filters", *[_N] * 4, *[_P] * 3)
_WINOGRAD = _kernel("winograd", *[_N] * 3, _FLAG, *[_P] * 4)
_WINOGRAD_FILTERS = _kernel("winograd_filters", *[_N] * 3, *[_P] * 3)


def describe_window(window: Window, turned: bool = False) -> Any:
    """`window` of kernels.c. turned: with the axes in the other order"""
    pairs = window.image, window.kernel, window.stride, window.padding, window.dilation, window.out
    return (ctypes.c_int64 * 12)(*[n for pair in pairs for n in (pair[::-1] if turned else pair)])


def _is_winograd(shape: Shape) -> bool:
    window = shape.window
    return (
        shape.groups == 1
        and min(shape.channels, shape.filters) >= _MIN_CHANNELS
        and tuple(window.kernel) == (3, 3)
        and tuple(window.stride) == tuple(window.dilation) == (1, 1)
        and max(window.padding) <= 2
    )


def _is_direct(shape: Shape) -> bool:
    return max(shape.window.stride) <= _MOST_STRIDE and not shape.window.is_identity


def _takes(*arrays: Array | None) -> bool:
    return all(x is None or (type(x) is np.ndarray and x.dtype.char == "f" and x.size) for x in arrays)


def _plain(x: Array | None) -> Array | None:
    return None if x is None else np.require(x, requirements=["C", "A"])


def _run(shape: Shape, back: bool, x: Array, w: Array, b: Array | None, out: Array) -> bool:
    """Writes to out the convolution of x, or, back, its adjoint; False if no kernel takes it."""
    n, groups, channels, filters, window = shape
    arrays = [_plain(each) for each in (x, w, b)]
    where = *map(address, arrays), address(out)
    if _is_winograd(shape):
        return bool(_WINOGRAD(describe_window(window), n, channels, filters, back, *where))
    return _is_direct(shape) and bool(_CONVOLVE(describe_window(window), n, groups, channels, filters, back, *where))


def correlate(xp: Any, x: Array, w: Array, b: Array | None, shape: Shape) -> Array:
    if _takes(x, w, b):
        out = np.empty((len(x), shape.groups * shape.filters, *shape.window.out), np.float32)
        if _run(shape, False, x, w, b, out):
            return out
    return convolution.correlate.__wrapped__(xp, x, w, b, shape)


def adjoint(xp: Any, g: Array, w: Array | None, x: Array | None, shape: Shape) -> tuple[Array | None, Array | None]:
    dx: Any = None
    dw: Any = None
    if _takes(g, w, x):
        n, groups, channels, filters, window = shape
        if w is not None:
            dx = np.empty((n, groups * channels, *window.image), np.float32)
            if not _run(shape, True, g, w, None, dx):
                dx = None
        if x is not None:
            dw = np.empty((groups * filters, channels, *window.kernel), np.float32)
            arrays = [_plain(each) for each in (x, g)]
            where = *map(address, arrays), address(dw)
            if _is_winograd(shape):
                done = _WINOGRAD_FILTERS(describe_window(window), n, channels, filters, *where)
            else:
                done = _is_direct(shape) and _CONVOLVE_FILTERS(describe_window(window), n, groups, channels, filters, *where)
            if not done:
                dw = None
    w, x = (None if dx is not None else w), (None if dw is not None else x)
    rest = convolution.adjoint.__wrapped__(xp, g, w, x, shape)
    return rest[0] if dx is None else dx, rest[1] if dw is None else dw
