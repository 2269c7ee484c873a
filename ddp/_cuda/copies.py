"""Copies between host and device, and between devices. A source is kept alive until its copy is done.

From pageable memory, the bytes are copied to a pinned staging buffer (by CuPy, or by the driver if the array is large)
before the call returns, and from there to the device on the current stream: the source may be written to at once.
Contiguous arrays in pinned memory are not staged: CuPy's `set` and `asarray` return before the bytes are read. A copy
to pageable memory waits for the current stream alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddp._cuda import device_checks, stream_order
from ddp._cuda.cuda_errors import translate
from ddp._device import capturing, device_of
from ddp.errors import CaptureError
from ddp.ops.memory_formats import inverse, order_of

Array = Any

# Maximum bytes of an array that CuPy stages: for a larger one it would pin a buffer of that size, and keep the buffer.
# The driver copies larger arrays in pieces.
_MAX_STAGED = 64 << 20


def empty_pinned(xp: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialized array in pinned memory from CuPy's pool; an empty array is in ordinary memory."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    memory = xp.cuda.alloc_pinned_memory(count * dtype.itemsize)
    # As bytes first: the buffer protocol does not know bfloat16.
    return np.frombuffer(memory, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)


def is_pinned(xp: Any, array: np.ndarray[Any, Any], by_cupy: bool = False) -> bool:
    """Whether the memory of `array` is pinned; False for an empty array.

    by_cupy: recognizes only CuPy's pinned memory, and does not ask CUDA
    """
    if not array.size:
        return False
    root: Any = array
    while isinstance(root, np.ndarray):
        root = root.base
    if isinstance(root, memoryview):
        root = root.obj
    if type(root).__name__ == "PinnedMemoryPointer":
        return True
    if by_cupy:
        return False
    try:
        attributes = xp.cuda.runtime.pointerGetAttributes(array.__array_interface__["data"][0])
    except Exception:  # old drivers raise for pageable memory
        return False
    return bool(attributes.type == xp.cuda.runtime.memoryTypeHost)


def h2d(xp: Any, array: np.ndarray[Any, Any], device: int | None, non_blocking: bool = False) -> Array:
    """Copies an array to a GPU, on that GPU's current stream.

    If the source has no gaps in memory, the result has the source's order of axes in memory.
    The source may be written to when this returns. Exception: with `non_blocking` and a pinned source without gaps,
    this returns before the copy is done. Until then the source is kept alive, and must not be written to.

    Raises: CaptureError within a capture.
    """
    if capturing.now is not None:
        # Every replay would read the source again, which may be freed by then.
        raise CaptureError(f"a copy of {array.dtype} {array.shape} from the CPU: make it an argument of the step")
    if not array.flags.c_contiguous:
        order = order_of(array)
        dense = array.transpose(order)
        if dense.flags.c_contiguous:  # CuPy preserves no other order than C and Fortran order
            return h2d(xp, dense, device, non_blocking).transpose(inverse(order))
    with xp.cuda.Device(device):
        pinned = is_pinned(xp, array)
        if pinned and array.flags.c_contiguous:
            stream = stream_order.current(xp)
            out = xp.empty(array.shape, array.dtype)
            out.set(array, stream=stream.cupy_stream)
            if non_blocking:
                stream_order.keep_alive(stream, array)
            else:
                stream.cupy_stream.synchronize()
            return out
        if array.nbytes > _MAX_STAGED and array.flags.c_contiguous:
            out = xp.empty(array.shape, array.dtype)
            out.set(array, stream=xp.cuda.get_current_stream())
            return out
        return xp.asarray(array)


def d2h(array: Array, non_blocking: bool = False) -> np.ndarray[Any, Any]:
    """Copies an array to the CPU. non_blocking: the result is valid once the current stream has done the copy

    Raises: CudaError for an error of the copy or of earlier work; without `non_blocking`, an error that a kernel has
    reported (see `device_checks`).
    """
    xp = device_of(array).xp
    with xp.cuda.Device(array.device.id):
        try:
            if not (non_blocking and array.size):
                # The array is made contiguous before `get`: if CuPy did that in `get`, it might leave another stream
                # current (see `StreamGuard`).
                out = (array if array.flags.c_contiguous else xp.ascontiguousarray(array)).get()
                device_checks.raise_pending()
                return out
            stream = stream_order.current(xp)
            out = empty_pinned(xp, array.shape, array.dtype)
            source = xp.ascontiguousarray(array).reshape(array.shape)
            source.get(stream=stream.cupy_stream, out=out, blocking=False)
            stream_order.keep_alive(stream, source, out)
            return out
        except Exception as error:
            raise translate(error, "copy to the CPU") from error


def p2p(array: Array, device: int) -> Array:
    """Copies an array to another GPU, on that GPU's current stream.

    The copy runs after earlier work and before later work on the current streams of both GPUs.
    """
    xp = device_of(array).xp
    source_stream = stream_order.current(xp, array.device.id)
    with xp.cuda.Device(source_stream.device):
        source = xp.ascontiguousarray(array).reshape(array.shape)
    with xp.cuda.Device(device):
        target_stream = stream_order.current(xp)
        out = xp.empty(array.shape, array.dtype)
        if array.size:
            target_stream.wait_for(source_stream)
            out.data.copy_from_device_async(source.data, array.nbytes, target_stream.cupy_stream)
            source_stream.wait_for(target_stream)  # before the next write to the source
            stream_order.keep_alive(target_stream, source)
    return out


def copy_into(target: Array, source: Array, non_blocking: bool) -> bool:
    """Copies between host and device memory without a staging buffer. Returns: False if that is not possible.

    It is possible if both arrays are C-contiguous, not empty, and of the same shape and dtype, and the host memory is
    pinned. Waits unless `non_blocking`.
    """
    to_device = isinstance(source, np.ndarray)
    on_host, on_device = (source, target) if to_device else (target, source)
    if on_host.shape != on_device.shape or on_host.dtype != on_device.dtype or not on_host.size:
        return False
    xp = device_of(on_device).xp
    if not (on_host.flags.c_contiguous and on_device.flags.c_contiguous and is_pinned(xp, on_host)):
        return False
    with xp.cuda.Device(on_device.device.id):
        stream = stream_order.current(xp)
        if to_device:
            on_device.set(on_host, stream=stream.cupy_stream)
        else:
            on_device.get(stream=stream.cupy_stream, out=on_host, blocking=False)
        if non_blocking:
            stream_order.keep_alive(stream, on_host, on_device)
        else:
            stream.cupy_stream.synchronize()
    return True
