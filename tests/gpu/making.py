"""New arrays: from shapes, from the host, from other libraries; and what copies or joins them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.arrays import Array, Capsule
from tests.gpu.working import Working


class Making(Working):
    """The part of the stand-in that makes arrays."""

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Any:
        return self.ndarray(shape, dtype, order=order)

    def empty_like(
        self, prototype: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
    ) -> Any:
        host = prototype._host
        kind = host.dtype if dtype is None else np.dtype(dtype)
        return self._like(np.empty_like(host, kind, order=order, shape=shape))

    def array(
        self,
        obj: Any,
        dtype: Any = None,
        copy: bool = True,
        order: str = "K",
        *,
        blocking: bool = False,
    ) -> Any:
        return self._array(obj, dtype, copy, "C" if order is None else order, blocking)

    def asarray(self, a: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False) -> Any:
        return self._array(a, dtype, False, order or "K", blocking)

    def ascontiguousarray(self, a: Any, dtype: Any = None) -> Any:
        array = self._array(a, dtype, False, "C", False)
        return array if array.ndim else array.reshape(1)

    def _array(self, obj: Any, dtype: Any, copy: bool, order: str, blocking: bool) -> Any:
        kind = None if dtype is None else np.dtype(dtype)
        if isinstance(obj, Array):
            flags = obj._host.flags
            fits = order in "KA" or (flags.c_contiguous if order == "C" else flags.f_contiguous)
            if not copy and fits and kind in (None, obj.dtype):
                return obj
            return self._compute("copy", lambda x: np.array(x, kind, order=order), (obj,))
        if hasattr(obj, "__cuda_array_interface__"):
            return self._array(self._from_interface(obj), dtype, copy, order, blocking)
        if isinstance(obj, np.ndarray) and order in "KA":
            order = "F" if obj.flags.fnc else "C"  # CuPy keeps no other
        host = np.array(obj, kind, order=order)
        as_it_lies = isinstance(obj, np.ndarray) and (host.dtype, host.strides) == (obj.dtype, obj.strides)
        if as_it_lies and obj.ndim and obj.size and obj.__array_interface__["data"][0] in self.pinned:
            host = obj  # CuPy asks CUDA whether it is pinned, and then reads it when the stream comes to it
        self._known(host.dtype)
        array = self._like(host)
        target = array._host
        self.refuse_capture("an array from the host's numbers")
        self.record.copies_up += 1
        self.record.launches["copy up"] += 1
        # CuPy copies into pinned memory before it returns, and does not wait for the device.
        self.put(self.current().ptr, "copy up", lambda: np.copyto(target, host))
        if blocking:
            self.wait("asarray(blocking=True)")
        return array

    def _from_interface(self, obj: Any) -> Any:
        told = obj.__cuda_array_interface__
        stream = told.get("stream")
        if stream is not None:
            self.refuse_capture("__cuda_array_interface__")
            self.record.wait("__cuda_array_interface__")
            if self.handle(stream) in self.machine.queues:
                self.finish(stream)
        dtype = np.dtype(told["typestr"])
        nbytes = int(np.prod(told["shape"], dtype=object)) * dtype.itemsize
        if told.get("strides") and nbytes:
            nbytes = (
                sum((n - 1) * step for n, step in zip(told["shape"], told["strides"], strict=True)) + dtype.itemsize
            )
        piece = self.cuda.UnownedMemory(told["data"][0] or 0, nbytes, obj, self.local.device)
        return self.ndarray(told["shape"], dtype, self.cuda.MemoryPointer(piece, 0), told.get("strides"))

    def from_dlpack(self, x: Any, *, device: Any = None, copy: Any = None) -> Any:
        kind, _ = x.__dlpack_device__()
        if kind != 2:
            raise TypeError(
                "CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))`."
            )
        capsule = x.__dlpack__(stream=self.current().ptr)
        assert isinstance(capsule, Capsule), "the stand-in reads DLPack capsules of its own only"
        return capsule.array._view(capsule.array._host)

    def may_share_memory(self, a: Any, b: Any, max_work: Any = None) -> bool:
        # As CuPy: two imports of one piece of another library's memory share nothing.
        return a._memptr.mem.ptr == b._memptr.mem.ptr and np.may_share_memory(a._host, b._host)

    shares_memory = may_share_memory

    def broadcast_arrays(self, *args: Any) -> list[Any]:
        shape = np.broadcast_shapes(*[arg.shape for arg in args])
        return [self.broadcast_to(arg, shape) for arg in args]

    def copyto(self, dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
        held: list[Any] = []
        target, source = self._host_of(dst, held), self._host_of(src, held)
        mask = True if where is None else self._host_of(where, held)
        self._launch("copyto", lambda: np.copyto(target, source, casting, mask), held)

    def repeat(self, a: Any, repeats: Any, axis: Any = None) -> Any:
        if not isinstance(repeats, int | list | tuple | np.integer):
            raise ValueError("`repeats` should be int or sequence of ints: the stand-in's CuPy takes no array")
        return self._compute("repeat", lambda x: np.repeat(x, repeats, axis), (a,))

    def put_along_axis(self, arr: Any, indices: Any, values: Any, axis: Any) -> None:
        held: list[Any] = []
        hosts = self._host_of((arr, indices, values), held)
        self._launch("put_along_axis", lambda: np.put_along_axis(*hosts, axis), held)

    def get_default_memory_pool(self) -> Any:
        return self.pool
