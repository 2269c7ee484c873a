"""Attaches the native kernels of ops and of array functions. No other module attaches native kernels.

Native kernels are Python functions for NumPy arrays. Most of them call C kernels, which are functions of `kernels.c`.
For inputs that a native kernel does not support, it calls the array formula.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from collectives.native import address, astype
from ddp._native import cpu_convolution, library
from ddp._native.cpu_convolution import describe_window
from ddp.ops import (
    activation,
    arrays,
    attention,
    convolution,
    indexing,
    losses,
    normalization,
    pooling,
    recurrent,
    reduction,
    softmax_ops,
    special,
    update,
)
from ddp.ops.arrays import Array, as_rows
from ddp.ops.normalization import ChannelGroups
from ddp.ops.op import Gradients, Needs, Op, Saved

_TAGS = {"f": "f32", "d": "f64"}
_Kernel = Callable[..., None]
assert library is not None


def kernels(name: str, *arguments: Any, chars: str = "fd") -> dict[str, _Kernel]:
    """A dict from dtype characters to the C kernel `name` for arrays of that dtype."""
    functions = {char: getattr(library, f"{name}_{_TAGS[char]}") for char in chars}
    for function in functions.values():
        function.argtypes = arguments
        function.restype = None
    return functions


N = ctypes.c_ssize_t
P = ctypes.c_void_p
FLAG = ctypes.c_int
REAL = ctypes.c_double
_count_threads: Callable[[int], int] = library.count_threads
library.count_threads.argtypes = (N,)


def is_plain(x: Any, char: str | None = None) -> bool:
    """Whether x is an aligned, contiguous NumPy array. char: the character of its dtype; None: f or d"""
    if type(x) is not np.ndarray or (x.dtype.char not in _TAGS if char is None else x.dtype.char != char):
        return False
    flags = x.flags
    return flags.c_contiguous and flags.aligned


# --- activations


# How many elements an element-wise function computes at a time: its intermediate results stay in the cache.
TILE = 16384


def _in_tiles(function: Callable[..., Array], *arrays: Array) -> Array:
    """Computes an element-wise function of arrays in tiles, which are contiguous and have the dtype of the first array.

    arrays: of one shape. Returns: an array with the memory order of the arguments
    """
    # Any: NumPy's stubs allow only one list of flags, but each operand has its own.
    flags: Any = [["readonly", "contig", "aligned"]] * len(arrays) + [["writeonly", "allocate", "contig"]]
    dtypes = [arrays[0].dtype] * len(flags)
    options: Any = {"casting": "same_kind", "buffersize": TILE}
    with np.nditer([*arrays, None], ["external_loop", "buffered", "zerosize_ok"], flags, dtypes, **options) as tiles:
        for *parts, out in tiles:
            out[...] = function(*parts)
        result: Array = tiles.operands[-1]
        return result


def _attach_tiles(op: Op) -> None:
    """Makes an activation run its formulas in tiles, so that its intermediate results are smaller than x."""

    def forward(xp: Any, x: Array, **parameters: Any) -> tuple[Array, Any]:
        if x.size <= TILE:
            return op.reference.forward(xp, x, **parameters)
        return _in_tiles(lambda x: op.reference.forward(xp, x, **parameters)[0], x), parameters

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, parameters: Any) -> Gradients:
        if g.size <= TILE:
            return op.reference.backward(xp, g, needs, saved, parameters)
        return (_in_tiles(lambda x, g: op.reference.backward(xp, g, needs, (x,), parameters)[0], saved[0], g),)

    op.attach_native_kernel(forward, backward)


def _attach_curve(op: Op, kernel_of: Callable[..., dict[str, _Kernel]]) -> None:
    """Attaches C kernels to an activation. Arrays that are not contiguous or not aligned are computed in tiles.

    kernel_of: takes the parameters of the activation, and returns its C kernels by dtype. Other dtypes use the formula
    """

    def takes(x: Array, parameters: dict[str, Any]) -> bool:
        return type(x) is np.ndarray and x.dtype.char in kernel_of(**parameters)

    def run(x: Array, g: Array | None, parameters: dict[str, Any]) -> Array:
        out = np.empty_like(x)
        kernel_of(**parameters)[x.dtype.char](x.size, address(x), address(g), address(out))
        return out

    def forward(xp: Any, x: Array, **parameters: Any) -> tuple[Array, Any]:
        if not takes(x, parameters):
            return op.reference.forward(xp, x, **parameters)
        if is_plain(x):
            return run(x, None, parameters), parameters
        return _in_tiles(lambda x: run(x, None, parameters), x), parameters

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, parameters: Any) -> Gradients:
        x = saved[0]
        if not takes(x, parameters):
            return op.reference.backward(xp, g, needs, saved, parameters)
        if is_plain(x) and is_plain(g, x.dtype.char):
            return (run(x, g, parameters),)
        return (_in_tiles(lambda x, g: run(x, g, parameters), x, g),)

    op.attach_native_kernel(forward, backward)


def _elementwise(kernel: dict[str, _Kernel], x: Array) -> Array:
    out = np.empty_like(x)
    kernel[x.dtype.char](x.size, address(x), address(out))
    return out


def _sigmoid(xp: Any, x: Array) -> tuple[Array, Any]:
    if not is_plain(x):
        return activation.sigmoid.reference.forward(xp, x)
    return _elementwise(SIGMOID, x), None


def _attach_error_function(function: arrays.ArrayFunction[[Array], Array], kernel: dict[str, _Kernel]) -> None:
    def compute(xp: Any, x: Array) -> Array:
        return _elementwise(kernel, x) if is_plain(x) else function.__wrapped__(xp, x)

    function.attach_native_kernel(compute)


def _attach_clamp(op: Op) -> None:
    """Attaches the clamp kernels to hardtanh or relu. relu has no parameters: `low` is 0, and there is no `high`."""

    def bounds_of(parameters: dict[str, float]) -> tuple[float, float]:
        return parameters.get("low", 0.0), parameters.get("high", math.nan)

    def has_kernel(x: Array, parameters: dict[str, float]) -> bool:
        # For the kernels nan means no bound. For hardtanh a bound of nan makes every number nan.
        return is_plain(x) and not any(map(math.isnan, parameters.values()))

    def forward(xp: Any, x: Array, **parameters: float) -> tuple[Array, Any]:
        if not has_kernel(x, parameters):
            return op.reference.forward(xp, x, **parameters)
        out = np.empty_like(x)
        CLAMP[x.dtype.char](x.size, *bounds_of(parameters), address(x), address(out))
        return out, ([x.shape], parameters)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        out = saved[0]
        _, parameters = residual or ([], {})
        if not (has_kernel(out, parameters) and is_plain(g, out.dtype.char)):
            return op.reference.backward(xp, g, needs, saved, residual)
        dx = np.empty_like(out)
        CLAMP_BACKWARD[out.dtype.char](out.size, *bounds_of(parameters), address(g), address(out), address(dx))
        return (dx,)

    op.attach_native_kernel(forward, backward)


def _leaky_relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, slope: Any) -> Gradients:
    x = saved[0]
    if not (is_plain(x) and is_plain(g, x.dtype.char)):
        return activation.leaky_relu.reference.backward(xp, g, needs, saved, slope)
    dx = np.empty_like(x)
    LEAKY_RELU_BACKWARD[x.dtype.char](x.size, slope, address(g), address(x), address(dx))
    return (dx,)


# --- normalization over rows


def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    if not _takes(x, w, b):
        return normalization.layer_norm.reference.forward(xp, x, w, b, axes=axes, eps=eps)
    rows = as_rows(x, axes)
    out = np.empty_like(x)
    mean = np.empty(len(rows))
    rstd = np.empty(len(rows), x.dtype)
    _normalize(rows, w, b, eps, out, mean, rstd)
    return out, (axes, mean, rstd, normalization.weight_dtype_of(x, w, b))


def _layer_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, mean, rstd, _ = residual
    if x is None or not _takes(g, x, w):
        return normalization.layer_norm.reference.backward(xp, g, needs, saved, residual)
    return _normalize_backward(g, x, w, axes, mean, rstd, needs)


def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    if not _takes(x, w):
        return normalization.rms_norm.reference.forward(xp, x, w, axes=axes, eps=eps)
    rows = as_rows(x, axes)
    out = np.empty_like(x)
    rstd = np.empty(len(rows), x.dtype)
    _normalize(rows, w, None, eps, out, None, rstd)
    return out, (axes, rstd, normalization.weight_dtype_of(x, w))


def _rms_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, rstd, _ = residual
    if not _takes(g, x, w):
        return normalization.rms_norm.reference.backward(xp, g, needs, saved, residual)
    return _normalize_backward(g, x, w, axes, None, rstd, (*needs, False))[:2]


# Maximum number of blocks of rows, each of which is summed by itself. The blocks do not depend on the number of
# threads, so sums always have the same bits.
_ROW_BLOCKS = 16


def _takes(x: Array, *others: Array | None) -> bool:
    return is_plain(x) and x.size > 0 and all(array is None or is_plain(array, x.dtype.char) for array in others)


def _normalize(
    rows: Array, w: Array | None, b: Array | None, eps: float, out: Array, mean: Array | None, rstd: Array
) -> None:
    LAYER_NORM[rows.dtype.char](
        *rows.shape,
        address(rows),
        address(w),
        address(b),
        eps,
        mean is not None,
        address(out),
        address(mean),
        address(rstd),
    )


def _normalize_backward(
    g: Array, x: Array, w: Array | None, axes: int, mean: Array | None, rstd: Array, needs: Needs
) -> Gradients:
    rows = as_rows(x, axes)
    inner = x.shape[x.ndim - axes :]
    dx = np.empty_like(x) if needs[0] else None
    blocks = min(len(rows), _ROW_BLOCKS)
    sums = [np.zeros((blocks, *inner), x.dtype) if need else None for need in needs[1:]]
    LAYER_NORM_BACKWARD[x.dtype.char](
        *rows.shape,
        address(g),
        address(x),
        address(w),
        address(mean),
        address(rstd),
        mean is not None,
        address(dx),
        blocks,
        *map(address, sums),
    )
    return dx, *[None if rows is None else rows[0] for rows in sums]


# --- normalization over channels


def _moments(xp: Any, x: Array) -> tuple[Array, Array]:
    if not _takes(x) or x.shape[2] == 1:
        return reduction.moments.__wrapped__(xp, x)
    mean, var = np.zeros((2, x.shape[1]))
    CHANNEL_MOMENTS[x.dtype.char](*x.shape, address(x), address(mean), address(var))
    return mean, var


def _channel_norm(
    xp: Any, x: Array, layout: ChannelGroups, mean: Array, rstd: Array, w: Array | None, b: Array | None
) -> Array:
    if not _takes(x, w, b) or x.shape[2] == 1:
        return normalization.channel_norm.__wrapped__(xp, x, layout, mean, rstd, w, b)
    out = np.empty_like(x)
    samples, channels, n = x.shape
    CHANNEL_NORM[x.dtype.char](
        samples * channels, n, channels, layout.members, len(mean), *map(address, (x, mean, rstd, w, b, out))
    )
    return out


def _channel_sums(xp: Any, g: Array, x: Array, layout: ChannelGroups, mean: Array, rstd: Array) -> tuple[Array, Array]:
    if not _takes(x) or not is_plain(g, x.dtype.char) or x.shape[2] == 1:
        return normalization.channel_sums.__wrapped__(xp, g, x, layout, mean, rstd)
    samples, channels, n = x.shape
    along, across = np.empty((2, samples, channels))
    CHANNEL_SUMS[x.dtype.char](
        samples * channels, n, layout.members, len(mean), *map(address, (g, x, mean, rstd, along, across))
    )
    return along, across


def _channel_gradient(
    xp: Any,
    g: Array,
    x: Array,
    layout: ChannelGroups,
    mean: Array,
    rstd: Array,
    w: Array | None,
    along: Array,
    across: Array,
) -> Array:
    if not _takes(x, w) or not is_plain(g, x.dtype.char) or x.shape[2] == 1:
        return normalization.channel_gradient.__wrapped__(xp, g, x, layout, mean, rstd, w, along, across)
    dx = np.empty_like(x)
    samples, channels, n = x.shape
    CHANNEL_GRADIENT[x.dtype.char](
        samples * channels,
        n,
        channels,
        layout.members,
        len(mean),
        *map(address, (g, x, mean, rstd, w, along, across, dx)),
    )
    return dx


# --- softmax and cross-entropy


def _attach_softmax(op: Op, logarithm: bool) -> None:
    def takes(x: Array, dim: int) -> bool:
        return x.size > 0 and dim == x.ndim - 1 and is_plain(x)

    def forward(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
        if not takes(x, dim):
            return op.reference.forward(xp, x, dim=dim)
        out = np.empty_like(x)
        SOFTMAX[x.dtype.char](*_rows(x), logarithm, address(x), address(out))
        return out, dim

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
        z = saved[0]
        if not (takes(z, dim) and is_plain(g, z.dtype.char)):
            return op.reference.backward(xp, g, needs, saved, dim)
        dx = np.empty_like(z)
        SOFTMAX_BACKWARD[z.dtype.char](*_rows(z), logarithm, address(g), address(z), address(dx))
        return (dx,)

    op.attach_native_kernel(forward, backward)


def _rows(x: Array) -> tuple[int, int]:
    n = x.shape[-1]
    return x.size // n, n


class _CrossEntropyResidual(NamedTuple):
    target: Array
    keep: Array | None
    weight: Array | None
    smoothing: float
    sums: Array  # (2, N): the maximum of each row, and the sum of its e^(x - maximum)
    factor: float | None  # None: the losses were not reduced


def _mass(x: Array, weight: Array | None, smoothing: float) -> float:
    """The sum of the classes' weights, which are 1 by default. x: (N, C)

    Without smoothing the result is C: the kernel of backward then multiplies it by 0, and for an infinite sum 0*inf
    would be nan.
    """
    return float(weight.sum(dtype=np.float64)) if smoothing and weight is not None else float(x.shape[1])


def _cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
    float32_loss: bool = False,
) -> tuple[Array, Any]:
    if x.ndim != 2 or not x.size or not is_plain(x) or not target.flags.c_contiguous:
        reference = losses.cross_entropy.reference
        return reference.forward(xp, x, target, keep, weight, smoothing, reduction, float32_loss)
    if weight is not None:
        weight = np.ascontiguousarray(weight, x.dtype)
    sums = np.empty((2, len(x)), x.dtype)
    row_losses = np.empty(len(x))
    out = np.empty(2)
    CROSS_ENTROPY[x.dtype.char](
        *x.shape,
        *map(address, (x, target, keep, weight)),
        smoothing,
        _mass(x, weight, smoothing),
        reduction == "mean",
        *map(address, (*sums, row_losses, out)),
    )
    dtype = np.dtype("float32") if float32_loss else x.dtype
    z = np.array(row_losses if reduction == "none" else out[0], dtype)
    return z, _CrossEntropyResidual(target, keep, weight, smoothing, sums, None if reduction == "none" else out[1])


def _cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x = saved[0]
    if not isinstance(residual, _CrossEntropyResidual):
        return losses.cross_entropy.reference.backward(xp, g, needs, saved, residual)
    target, keep, weight, smoothing, sums, factor = residual
    dx = np.empty_like(x)
    row_gradients = np.ascontiguousarray(g, x.dtype) if factor is None else None
    CROSS_ENTROPY_BACKWARD[x.dtype.char](
        *x.shape,
        *map(address, (x, target, keep, weight)),
        smoothing,
        _mass(x, weight, smoothing),
        *map(address, (*sums, row_gradients)),
        1.0 if factor is None else factor * float(g),
        address(dx),
    )
    return (dx,)


def _add_rows_into(xp: Any, row_index: Array, g: Array, out: Array) -> None:
    if row_index.dtype == np.int64 and is_plain(g) and is_plain(out, g.dtype.char) and row_index.flags.c_contiguous:
        ADD_ROWS[g.dtype.char](*g.shape, address(row_index), address(g), address(out))
    else:
        indexing.add_rows_into.__wrapped__(xp, row_index, g, out)


# --- windows over images


def _im2col_lines(xp: Any, x: Array, window: convolution.Window, lines: slice) -> Array:
    if not is_plain(x):
        return convolution.im2col_lines.__wrapped__(xp, x, window, lines)
    shape = x.shape[1], window.elements, len(x), lines.stop - lines.start, window.out[1]
    columns = np.empty(shape, x.dtype)
    extents = len(x), x.shape[1], lines.start, lines.stop
    IM2COL[x.dtype.char](describe_window(window), *extents, False, address(x), address(columns))
    return columns


def _col2im_lines(xp: Any, columns: Array, window: convolution.Window, lines: slice, x: Array) -> None:
    if not (is_plain(x) and is_plain(columns, x.dtype.char)):
        convolution.col2im_lines.__wrapped__(xp, columns, window, lines, x)
        return
    extents = len(x), x.shape[1], lines.start, lines.stop
    IM2COL[x.dtype.char](describe_window(window), *extents, True, address(x), address(columns))


def _maxima(xp: Any, x: Array, window: convolution.Window) -> tuple[Array, Array]:
    if type(x) is not np.ndarray or x.dtype.char not in _TAGS:
        return pooling.maxima.__wrapped__(xp, x, window)
    x = np.require(x, requirements=["C", "A"])
    top = np.empty((*x.shape[:2], *window.out), x.dtype)
    indices = np.empty(top.shape, np.int32)
    # An image of width 1 has the same memory as one of height 1, for which the inner loops are long.
    turned = window.image[1] == window.kernel[1] == window.out[1] == 1 and not window.padding[1]
    description = describe_window(window, turned)
    MAX_POOL[x.dtype.char](description, len(x) * x.shape[1], address(x), address(top), address(indices))
    return top, indices


def _add_at_maxima(xp: Any, g: Array, indices: Array, window: convolution.Window) -> Array:
    if type(g) is not np.ndarray or g.dtype.char not in _TAGS:
        return pooling.add_at_maxima.__wrapped__(xp, g, indices, window)
    g = np.require(g, requirements=["C", "A"])
    dx = np.zeros((*g.shape[:2], *window.image), g.dtype)
    sizes = len(g) * g.shape[1], math.prod(window.out), math.prod(window.image)
    MAX_POOL_BACKWARD[g.dtype.char](*sizes, address(g), address(indices), address(dx))
    return dx


# --- updates

# The functions of a pass, in the order of the enum in kernels.c.
_FUNCTIONS = ("add", "subtract", "multiply", "divide", "maximum", "sqrt", "sign", "negative")
_REGISTERS = 16


@lru_cache(maxsize=64)
def _encode(program: update.Program) -> tuple[int, int | None, Array]:
    """Returns the number of passes, the address of their table, and the table itself: (passes, 4), int32."""
    rows = [(_FUNCTIONS.index(function), out, inputs[0], inputs[-1]) for function, inputs, out in program.passes]
    passes = np.array(rows, np.int32)
    return len(rows), address(passes), passes


def _run_program(xp: Any, program: update.Program, scalars: Array, rows: update.UpdateRows) -> None:
    kernel = RUN_PROGRAM.get(scalars.dtype.char)
    if kernel is None or program.registers > _REGISTERS:
        update.run_program.__wrapped__(xp, program, scalars, rows)
        return
    if rows.addresses is None:
        sizes = np.array([row[0].size for row in rows.arrays], np.int64)
        addresses = np.array([[address(array) for array in row] for row in rows.arrays], np.int64)
        rows.addresses = (*addresses.shape, address(sizes), address(addresses)), (sizes, addresses)
    kernel(*_encode(program)[:2], address(scalars), *rows.addresses[0])


# --- recurrent layers

# Columns of a block of weights: WIDE of convolution.c.
_BLOCK = 16


def _attach_steps(function: Any, kernel: _Kernel) -> None:
    def run_steps(xp: Any, w: Array, w_hr: Array | None, gates: Array, cs: Array, *others: Array) -> None:
        if w_hr is not None or gates.dtype.char != "f" or cs.shape[2] % _BLOCK or not gates.size:
            function.__wrapped__(xp, w, w_hr, gates, cs, *others)
            return
        blocks = np.ascontiguousarray(w.reshape(len(w), -1, _BLOCK).swapaxes(0, 1))
        step = gates.strides[0] // gates.itemsize  # negative in a reversed layer
        kernel(*gates.shape[:2], cs.shape[2], step, *[x.ctypes.data for x in (blocks, gates, cs, *others)])

    function.attach_native_kernel(run_steps)


# --- attention


_ARRAYS = 9  # q, k, v, z, g, dq, dk, dv, mask


class _Shape(ctypes.Structure):
    """The struct `attention_shape` of attention.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "length", "keys", "depth", "width", "causal", "masked", "column")
        ),
        ("row", ctypes.c_int64 * _ARRAYS),
        ("at", ctypes.c_void_p),
        ("scale", ctypes.c_double),
    )


@lru_cache(maxsize=64)
def _describe(
    q: tuple[int, ...],
    k: tuple[int, ...],
    width: int,
    strides: tuple[tuple[int, ...] | None, ...],
    itemsizes: tuple[int, ...],
    scale: float,
    causal: bool,
    masked: int,
) -> tuple[_Shape, Array]:
    """Returns the struct that describes a call of an attention kernel, and the array of offsets that it points to.

    q, k: shapes; width: length of the rows of v; strides, itemsizes: of all arrays, in the order of the enum of
    attention.c; masked: 0 for no mask, 1 for a bool mask, 2 for a mask of numbers
    """
    lead = q[:-2]
    addresses = np.zeros((*lead, _ARRAYS), np.int64)
    rows = (ctypes.c_int64 * _ARRAYS)()
    column = 0
    for array, (steps, itemsize) in enumerate(zip(strides, itemsizes, strict=True)):
        if steps is not None:
            for axis, step in enumerate(steps[:-2]):
                addresses[..., array] += np.arange(lead[axis]).reshape(-1, *[1] * (len(lead) - 1 - axis)) * (
                    step // itemsize
                )
            rows[array] = steps[-2] // itemsize
            column = steps[-1] // itemsize
    sizes = addresses.size // _ARRAYS, q[-2], k[-2], q[-1], width
    return _Shape(*sizes, causal, masked, column, rows, addresses.ctypes.data, scale), addresses


def _shape_of(arrays: tuple[Array | None, ...], mask: Array | None, scale: float, causal: bool) -> _Shape:
    """The struct that describes a call of an attention kernel. arrays: q, k, v, z, and in backward g, dq, dk, dv"""
    q, k, v = arrays[:3]
    assert q is not None
    assert k is not None
    assert v is not None
    everything = (*arrays, *[None] * (_ARRAYS - 1 - len(arrays)), mask)
    strides = tuple([None if x is None else x.strides for x in everything])
    itemsizes = tuple([1 if x is None else x.itemsize for x in everything])
    masked = 0
    if mask is not None:
        masked = 1 if mask.dtype == bool else 2
    return _describe(q.shape, k.shape, v.shape[-1], strides, itemsizes, float(scale), bool(causal), masked)[0]


def _scratch(q: Array, k: Array, rows: int) -> Array:
    """Scratch memory (threads, n): per thread, `rows` rows of one number per key, rounded up to whole vectors."""
    threads = min(_count_threads(math.prod(q.shape[:-1]) * k.shape[-2]), math.prod(q.shape[:-2]))
    return np.empty((threads, rows * (-(-k.shape[-2] // 16) * 16)), q.dtype)


def _has_rows(x: Array, char: str) -> bool:
    """Whether x is an aligned NumPy array of dtype `char` with contiguous rows, a whole number of elements apart."""
    return (
        type(x) is np.ndarray and x.dtype.char == char and x.flags.aligned and x.strides[-1] == x.itemsize
    ) and not any(step % x.itemsize for step in x.strides)


def _takes_heads(q: Array, k: Array, v: Array) -> bool:
    return (
        q.dtype.char in _TAGS
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and 0 not in (*q.shape, *k.shape, *v.shape)
        and all(_has_rows(x, q.dtype.char) for x in (q, k, v))
    )


def _attention_mask(q: Array, k: Array, mask: Array | None) -> Array | None:
    """The mask, broadcast to all heads: (..., L, S), bool or of q's dtype."""
    if mask is None:
        return None
    if mask.dtype != bool and (mask.dtype != q.dtype or any(step % mask.itemsize for step in mask.strides)):
        mask = np.array(mask, q.dtype)
    return np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))


def _attention(
    xp: Any, q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool, p: float, seed: int
) -> tuple[Array, Any]:
    if p or not _takes_heads(q, k, v):
        return attention.attention.reference.forward(xp, q, k, v, mask, scale=scale, causal=causal, p=p, seed=seed)
    z = np.empty_like(q, shape=(*q.shape[:-1], v.shape[-1]))  # in the memory order of q
    mask = _attention_mask(q, k, mask)
    shape = _shape_of((q, k, v, z), mask, scale, causal)
    sums = np.empty(q.shape[:-1], q.dtype)
    scratch = _scratch(q, k, q.shape[-1] + 64)
    ATTENTION[q.dtype.char](ctypes.byref(shape), *map(address, (q, k, v, mask, z, sums, scratch)), len(scratch))
    return z, (sums, scale, causal, p, seed)


def _attention_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    q, k, v, mask, z = saved
    sums, scale, causal, p, _ = residual
    if p or needs[3] or not _takes_heads(q, k, v):
        return attention.attention.reference.backward(xp, g, needs, saved, residual)
    if not _has_rows(g, q.dtype.char):
        g = np.ascontiguousarray(g, q.dtype)
    dq, dk, dv = (np.empty_like(x) for x in (q, k, v))
    mask = _attention_mask(q, k, mask)
    shape = _shape_of((q, k, v, z, g, dq, dk, dv), mask, scale, causal)
    scratch = _scratch(q, k, q.shape[-1] + v.shape[-1] + 128)
    ATTENTION_BACKWARD[q.dtype.char](
        ctypes.byref(shape), *map(address, (q, k, v, mask, z, g, sums, dq, dk, dv, scratch)), len(scratch)
    )
    return [dx if need else None for dx, need in zip((dq, dk, dv, None), needs, strict=True)]


SIGMOID, ERF, ERFC = (kernels(name, N, P, P) for name in ("sigmoid", "erf", "erfc"))
GELU = kernels("gelu", N, P, P, P, chars="f")
GELU_TANH, SILU = (kernels(name, N, P, P, P) for name in ("gelu_tanh", "silu"))
LEAKY_RELU_BACKWARD = kernels("leaky_relu_backward", N, REAL, P, P, P)
CLAMP = kernels("clamp", N, REAL, REAL, P, P)
CLAMP_BACKWARD = kernels("clamp_backward", N, REAL, REAL, P, P, P)
LAYER_NORM = kernels("layer_norm", N, N, P, P, P, REAL, FLAG, P, P, P)
LAYER_NORM_BACKWARD = kernels("layer_norm_backward", N, N, P, P, P, P, P, FLAG, P, N, P, P)
CHANNEL_MOMENTS = kernels("channel_moments", *[N] * 3, *[P] * 3)
CHANNEL_NORM = kernels("channel_norm", *[N] * 5, *[P] * 6)
CHANNEL_SUMS = kernels("channel_sums", *[N] * 4, *[P] * 6)
CHANNEL_GRADIENT = kernels("channel_gradient", *[N] * 5, *[P] * 8)
SOFTMAX = kernels("softmax", N, N, FLAG, P, P)
SOFTMAX_BACKWARD = kernels("softmax_backward", N, N, FLAG, P, P, P)
CROSS_ENTROPY = kernels("cross_entropy", N, N, P, P, P, P, REAL, REAL, FLAG, P, P, P, P)
CROSS_ENTROPY_BACKWARD = kernels("cross_entropy_backward", N, N, P, P, P, P, REAL, REAL, P, P, P, REAL, P)
ADD_ROWS = kernels("add_rows", N, N, P, P, P)
ATTENTION = kernels("attention", *[P] * 8, FLAG)
ATTENTION_BACKWARD = kernels("attention_backward", *[P] * 12, FLAG)
IM2COL = kernels("im2col", P, N, N, N, N, FLAG, P, P)
MAX_POOL = kernels("max_pool", P, N, P, P, P)
MAX_POOL_BACKWARD = kernels("max_pool_backward", N, N, N, P, P, P)
LSTM = kernels("lstm", *[N] * 4, *[P] * 4, chars="f")
LSTM_BACKWARD = kernels("lstm_backward", *[N] * 4, *[P] * 7, chars="f")
RUN_PROGRAM = kernels("run_program", N, P, P, N, N, P, P)

arrays.astype.attach_native_kernel(lambda xp, x, dtype: astype(x, dtype))
activation.sigmoid.attach_native_kernel(_sigmoid)
_attach_curve(activation.gelu, lambda tanh: GELU_TANH if tanh else GELU)
_attach_curve(activation.silu, lambda: SILU)
for _op in (activation.elu, activation.logsigmoid, activation.mish, activation.softplus):
    _attach_tiles(_op)
_attach_error_function(special.compute_erf, ERF)
_attach_error_function(special.compute_erfc, ERFC)
_attach_clamp(activation.relu)
_attach_clamp(activation.hardtanh)
activation.leaky_relu.attach_native_kernel(activation.leaky_relu.reference.forward, _leaky_relu_backward)
normalization.layer_norm.attach_native_kernel(_layer_norm, _layer_norm_backward)
normalization.rms_norm.attach_native_kernel(_rms_norm, _rms_norm_backward)
reduction.moments.attach_native_kernel(_moments)
normalization.channel_norm.attach_native_kernel(_channel_norm)
normalization.channel_sums.attach_native_kernel(_channel_sums)
normalization.channel_gradient.attach_native_kernel(_channel_gradient)
_attach_softmax(softmax_ops.softmax, False)
_attach_softmax(softmax_ops.log_softmax, True)
losses.cross_entropy.attach_native_kernel(_cross_entropy, _cross_entropy_backward)
indexing.add_rows_into.attach_native_kernel(_add_rows_into)
convolution.correlate.attach_native_kernel(cpu_convolution.correlate)
convolution.adjoint.attach_native_kernel(cpu_convolution.adjoint)
convolution.im2col_lines.attach_native_kernel(_im2col_lines)
convolution.col2im_lines.attach_native_kernel(_col2im_lines)
pooling.maxima.attach_native_kernel(_maxima)
pooling.add_at_maxima.attach_native_kernel(_add_at_maxima)
_attach_steps(recurrent.lstm_steps, LSTM["f"])
_attach_steps(recurrent.lstm_steps_backward, LSTM_BACKWARD["f"])
update.run_program.attach_native_kernel(_run_program)
attention.attention.attach_native_kernel(_attention, _attention_backward)
