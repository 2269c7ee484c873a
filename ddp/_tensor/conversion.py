"""Tensors in another dtype or on another device; gradients pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddp import _engine
from ddp._device import CPU, device, device_of, found_cupy, place
from ddp._engine import Node
from ddp._tensor import dtypes
from ddp._tensor.base import TensorBase, apply, record, wrap
from ddp._tensor.dtypes import TYPES, parse
from ddp._tensor.operands import as_method, convert
from ddp.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ddp.ops import elementwise
from ddp.ops.memory_formats import channels_last, is_channels_last, memory_format, preserve_format

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Flag = bool  # the names, where a method `bool` or a parameter `device` hides them
_Device = device

_NAMES = {dtype: name for name, dtype in TYPES.items()}


def _as(dtype: Any) -> Callable[[Any], Tensor]:
    """The method that converts to `dtype`, under PyTorch's name for it: that of the type of tensors, such as "Long"."""
    name = _NAMES[dtype].removesuffix("Tensor").lower()
    return as_method(lambda self: convert(self, dtype), name, f"As {dtype.name}.")


class Conversion(TensorBase):
    """`to` and its short forms. Each returns the tensor itself where there is nothing to do."""

    __slots__ = ()

    def to(
        self,
        *target: Any,
        dtype: Any = None,
        device: Any = None,
        non_blocking: Flag = False,
        copy: Flag = False,
        memory_format: memory_format = preserve_format,
    ) -> Tensor:
        """In another dtype, on another device, or both: to("cuda:0"), to(ddp.float64), to(other_tensor).

        memory_format: ddp.channels_last for images whose channels lie side by side, which GPUs convolve faster.
        copy: a copy even if nothing changes. non_blocking: a copy from pinned memory to a GPU, or from a GPU into
        pinned memory that is made for it, does not wait; what comes from a GPU is there when the current stream is past
        it (`ddp.cuda.synchronize()`, or an event). Both may follow by position, in that order.
        Raises: DtypeError, DeviceError, CudaError; ShapeError for ddp.channels_last of anything but (N, C, H, W).
        """
        flags = [each for each in target if isinstance(each, bool)]
        for each in target:
            if isinstance(each, TensorBase):
                dtype, device = each.array.dtype, each._device
            elif isinstance(each, bool) or each is None:
                continue
            elif isinstance(each, _Device | int) or (isinstance(each, str) and each[:4] in ("cpu", "cpu:", "cuda")):
                device = each
            else:
                dtype = _named(each) if isinstance(each, str) else each
        x: Any = self
        if dtype is not None:
            x = convert(x, parse(dtype))
        if device is not None:
            where = _Device(device)
            if where is not x._device and not (where.index is None and where.type == x._device.type):
                x = transfer(x, where, non_blocking or flags[:1] == [True])
        if memory_format is not preserve_format:
            x = x._formatted(memory_format)
        return apply(elementwise.clone, (x,)) if x is self and (copy or flags[1:] == [True]) else x

    def _formatted(self, wanted: memory_format) -> Any:
        """This tensor if it lies in that format, else a copy that does. Raises: ShapeError."""
        array = self.array
        if wanted is not channels_last:
            return self if array.flags.c_contiguous else apply(elementwise.clone, (self,))
        if array.ndim != 4:
            raise ShapeError(f"channels_last: expected (N, C, H, W), got shape {array.shape}")
        return self if is_channels_last(array) else apply(elementwise.clone, (self,), last=True)

    def cpu(self) -> Tensor:
        """On the CPU. Waits for the current stream, if it was on a GPU."""
        return self.to(device=CPU)

    def cuda(self, device: Any = None, non_blocking: Flag = False) -> Tensor:
        """On a CUDA device, by its number or name; the current one. Raises: DeviceError if there is none."""
        where = _Device("cuda") if device is None else _Device(device)
        if where.type != "cuda":
            raise DeviceError(f"cuda: expected a CUDA device, got {where}")
        if where.index is None:
            where = _Device("cuda", where.xp.cuda.runtime.getDevice())
        return self.to(device=where, non_blocking=non_blocking)

    def pin_memory(self, device: Any = None) -> Tensor:
        """This tensor's numbers in page-locked memory, from which a copy to a GPU does not wait; itself if they are.

        Without a GPU there is nothing to pin for: it returns itself. Raises: DeviceError for a tensor on a GPU.
        """
        if self._device is not CPU:
            raise DeviceError(f"pin_memory: only memory of the CPU can be pinned, and this tensor is on {self._device}")
        xp = found_cupy()
        if xp is None or not self.array.size or self.is_pinned():
            return self.to()
        from ddp._cuda import copies

        array = copies.empty_pinned(xp, self.array.shape, self.array.dtype)
        array[...] = self.array
        return wrap(array, CPU)

    def is_pinned(self, device: Any = None) -> Flag:
        """Whether the memory is page-locked."""
        if self._device is not CPU or (xp := found_cupy()) is None:
            return False
        from ddp._cuda import copies

        return copies.is_pinned(xp, self.array)

    def record_stream(self, stream: Any) -> None:
        """Says that work on `stream` (a `ddp.cuda.Stream`) uses this tensor, which another stream's work made.

        When the tensor dies, its memory is kept until what `stream` was given by then is done. Without it the memory is
        given to later work of the stream that made it. Raises: DeviceError for a tensor on the CPU.
        """
        if self._device is CPU:
            raise DeviceError("record_stream: this tensor is on the CPU, whose work no stream runs")
        lane = getattr(stream, "_lane", None)
        if lane is None:
            raise ArgumentError(f"record_stream: expected a ddp.cuda.Stream, got {type(stream).__name__}")
        from ddp._cuda import stream_order

        stream_order.record(self.array, lane)

    def type(self, dtype: Any = None, non_blocking: Flag = False) -> Any:
        """In another dtype; without one, the name of the type: "ddp.FloatTensor"."""
        place_ = "ddp." if self._device is CPU else "ddp.cuda."
        if dtype is None:
            return place_ + _NAMES[self.array.dtype]
        if isinstance(dtype, str) and dtype.endswith("Tensor"):
            name = dtype.rpartition(".")[2]
            if name not in TYPES:
                raise DtypeError(f"type: {dtype!r}: expected one of {', '.join(TYPES)}")
            return self.to(device="cuda" if ".cuda." in dtype else CPU, dtype=TYPES[name])
        if hasattr(dtype, "device_type"):  # ddp.FloatTensor, ddp.cuda.FloatTensor
            return self.to(device=dtype.device_type, dtype=dtype.dtype)
        return self.to(dtype=dtype)

    def type_as(self, other: TensorBase) -> Tensor:
        """In the dtype and on the device of `other`."""
        return self.to(other)

    half, bfloat16, float = _as(dtypes.float16), _as(dtypes.bfloat16), _as(dtypes.float32)
    double, byte, char = _as(dtypes.float64), _as(dtypes.uint8), _as(dtypes.int8)
    short, int, long = _as(dtypes.int16), _as(dtypes.int32), _as(dtypes.int64)
    bool = _as(dtypes.bool_)


def _named(text: str) -> Any:
    """A dtype by its name. Raises: DtypeError for what names no device either."""
    try:
        return parse(text)
    except DtypeError as error:
        raise DtypeError(f"to({text!r}): no device ('cpu', 'cuda', 'cuda:1'), and no {error}") from None


def transfer(x: TensorBase, where: device, non_blocking: Flag = False) -> Tensor:
    """`x` on `where`; its gradient travels back."""
    result = wrap(place(x.array, where, non_blocking), where)
    result._device = device_of(result.array)
    if where.type == x._device.type == "cuda":  # between two GPUs
        _engine.stream_sync.enable()
    if x.edge is not None and _engine.is_grad_enabled():
        record(Node(elementwise.transfer, where.xp, (x.edge,), (True,), (), (), x._device), [result])
    return result
