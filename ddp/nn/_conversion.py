"""Parameters and buffers in another dtype, or on another device: each stays the same object."""

from __future__ import annotations

from typing import Any, TypeVar

from ddp._tensor.core import Tensor
from ddp._tensor.sharing import move
from ddp.nn._walking import Tree
from ddp.ops.formats import memory_format, preserve_format

T = TypeVar("T", bound="Convertible")


class Convertible(Tree):
    """The conversions of a module; the floating tensors change dtype, all change device."""

    def to(
        self: T,
        *target: Any,
        dtype: Any = None,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: memory_format = preserve_format,
    ) -> T:
        """In another dtype, on another device, or both: to("cuda"), to(ddp.float64), to(other_tensor).

        non_blocking: accepted; copies between host and device are ordered with what computes on them anyway.
        memory_format: accepted; parameters keep their order in memory, in which flat buckets and updates walk them. It
        is the images' that counts: a convolution of one with channels last lays its filters out so, which are small.

        Raises: DtypeError, DeviceError; GraphError if a parameter is watched, as under DataParallel. Then nothing has
        changed.
        """

        def converted(tensor: Tensor) -> Tensor | None:
            before = tensor.detach()
            after = before.to(*target, dtype=dtype, device=device)
            if after.dtype != before.dtype and not (before.is_floating_point() and after.is_floating_point()):
                after = before.to(device=after.device)
            return None if after._array is before._array else after

        tensors = (*self.parameters(), *self.buffers())
        for tensor in tensors:
            if tensor._end is not None and tensor._end.watcher is not None and converted(tensor) is not None:
                tensor._check_replaceable()
        for tensor in tensors:  # one at a time, so that no second copy of the whole model is held
            after = converted(tensor)
            if after is not None:
                tensor._replace(after._array, after._device)
        return self

    def share_memory(self: T) -> T:
        """Moves parameters and buffers to where other processes can map them: into one block of shared memory.

        Tied ones stay tied, and gradients private. Raises: SharingError if the system gives no memory.
        """
        move([*self.parameters(), *self.buffers()])
        return self

    def type(self: T, dst_type: Any) -> T:
        """Floating parameters and buffers in that dtype."""
        return self.to(dtype=dst_type)

    def half(self: T) -> T:
        """Floating parameters and buffers as float16."""
        return self.to(dtype="float16")

    def bfloat16(self: T) -> T:
        """Floating parameters and buffers as bfloat16."""
        return self.to(dtype="bfloat16")

    def float(self: T) -> T:
        """Floating parameters and buffers as float32."""
        return self.to(dtype="float32")

    def double(self: T) -> T:
        """Floating parameters and buffers as float64."""
        return self.to(dtype="float64")

    def cpu(self: T) -> T:
        """On the CPU."""
        return self.to(device="cpu")

    def cuda(self: T, device: Any = None) -> T:
        """On a CUDA device: the current one, or that index. Raises: DeviceError if there is none."""
        return self.to(device=f"cuda:{device}" if isinstance(device, int) else device or "cuda")
