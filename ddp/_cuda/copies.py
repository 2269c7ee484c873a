"""Copies between the CPU and GPUs, and between GPUs: who waits for whom, and what lives until they are done.

From pageable memory CuPy stages: the bytes are in pinned memory of its own when the call returns, and the rest runs in
the order of the current stream, so that the source may be written to at once. From pinned memory, whoever pinned it,
nothing is staged: every copy of CuPy's, `set` and `asarray` too, returns before the bytes are read.
Into pageable memory the current stream, and nothing else, is waited for.
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

# Above this CuPy would pin as much memory again, and keep it: the driver stages large copies as well, in pieces.
_STAGED = 64 << 20  # bytes


def empty_pinned(xp: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An array in page-locked memory, from CuPy's pool."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    memory = xp.cuda.alloc_pinned_memory(count * dtype.itemsize)
    # As bytes first: the buffer protocol knows no bfloat16.
    return np.frombuffer(memory, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)


def is_pinned(xp: Any, array: np.ndarray[Any, Any], ours: bool = False) -> bool:
    """Whether the memory of `array` is page-locked; with `ours`, by CuPy: CUDA is not asked about what others did."""
    if not array.size:
        return False
    root: Any = array
    while isinstance(root, np.ndarray):
        root = root.base
    if isinstance(root, memoryview):
        root = root.obj
    if type(root).__name__ == "PinnedMemoryPointer":
        return True
    if ours:
        return False
    try:
        found = xp.cuda.runtime.pointerGetAttributes(array.__array_interface__["data"][0])
    except Exception:  # old drivers refuse to speak of memory that they do not know
        return False
    return bool(found.type == xp.cuda.runtime.memoryTypeHost)


def up(xp: Any, array: np.ndarray[Any, Any], device: int | None, non_blocking: bool = False) -> Array:
    """A new array on a GPU, filled in the order of its current stream, whose axes lie in memory as the source's do.

    The source may be written to when this returns, unless it is pinned and `non_blocking`: then when the stream is past
    the copy, until which it is kept alive. Raises: CaptureError within a capture.
    """
    if capturing.now is not None:
        # CuPy refuses it, and every replay would read memory that may be somebody else's by then.
        raise CaptureError(f"a copy of {array.dtype} {array.shape} from the CPU: make it an argument of the step")
    if not array.flags.c_contiguous:
        order = order_of(array)
        dense = array.transpose(order)
        if dense.flags.c_contiguous:  # CuPy would keep C's and Fortran's order alone
            return up(xp, dense, device, non_blocking).transpose(inverse(order))
    with xp.cuda.Device(device):
        pinned = is_pinned(xp, array)
        if pinned and array.flags.c_contiguous:
            lane = stream_order.current(xp)
            made = xp.empty(array.shape, array.dtype)
            made.set(array, stream=lane.stream)
            if non_blocking:
                stream_order.hold(lane, array)
            else:
                lane.stream.synchronize()
            return made
        if array.nbytes > _STAGED and array.flags.c_contiguous:
            made = xp.empty(array.shape, array.dtype)
            made.set(array, stream=xp.cuda.get_current_stream())
            return made
        return xp.asarray(array)


def down(array: Array, non_blocking: bool = False) -> np.ndarray[Any, Any]:
    """A new array on the CPU. It is there when this returns; with `non_blocking`, when the current stream is past it.

    Raises: CudaError for what this or earlier work met.
    """
    xp = device_of(array).xp
    with xp.cuda.Device(array.device.id):
        try:
            if not (non_blocking and array.size):
                # CuPy copies what does not lie in one piece under a context of its own, which may leave another stream.
                found = (array if array.flags.c_contiguous else xp.ascontiguousarray(array)).get()
                device_checks.raise_pending()
                return found
            lane = stream_order.current(xp)
            made = empty_pinned(xp, array.shape, array.dtype)
            source = xp.ascontiguousarray(array).reshape(array.shape)
            source.get(stream=lane.stream, out=made, blocking=False)
            stream_order.hold(lane, source, made)
            return made
        except Exception as error:
            raise translate(error, "copy to the CPU") from error


def across(array: Array, device: int) -> Array:
    """A new array on another GPU, in the order of the current streams of both."""
    xp = device_of(array).xp
    here = stream_order.current(xp, array.device.id)
    with xp.cuda.Device(here.device):
        source = xp.ascontiguousarray(array).reshape(array.shape)
    with xp.cuda.Device(device):
        there = stream_order.current(xp)
        made = xp.empty(array.shape, array.dtype)
        if array.size:
            there.after(here)
            made.data.copy_from_device_async(source.data, array.nbytes, there.stream)
            here.after(there)  # whoever writes to the source next waits
            stream_order.hold(there, source)
    return made


def straight(target: Array, source: Array, non_blocking: bool) -> bool:
    """Copies between the CPU's memory and a GPU's without memory in between; False where that cannot be.

    Both are contiguous, of one shape and dtype, and what is on the CPU is pinned: then nobody waits if `non_blocking`.
    """
    up_there = isinstance(source, np.ndarray)
    here, there = (source, target) if up_there else (target, source)
    if here.shape != there.shape or here.dtype != there.dtype or not here.size:
        return False
    xp = device_of(there).xp
    if not (here.flags.c_contiguous and there.flags.c_contiguous and is_pinned(xp, here)):
        return False
    with xp.cuda.Device(there.device.id):
        lane = stream_order.current(xp)
        if up_there:
            there.set(here, stream=lane.stream)
        else:
            there.get(stream=lane.stream, out=here, blocking=False)
        if non_blocking:
            stream_order.hold(lane, here, there)
        else:
            lane.stream.synchronize()
    return True
