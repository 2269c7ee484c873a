"""The memory of CPU tensors as NumPy arrays.

The arrays are made from ctypes views of the memory. That takes 2 to 4 us, while `collectives.arrays.as_array`, which
reads a tensor by `np.from_dlpack`, takes 40 us. Both leave the storage resizable, which FSDP needs: after
`tensor.numpy()` a storage cannot be resized.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import ArgumentError, DtypeError
from collectives.native import BFLOAT16, Array

Tensors = Sequence[torch.Tensor]
_NAMES = (
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
DTYPES: dict[Any, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _NAMES}
DTYPES |= {torch.bool: np.dtype(np.bool_), torch.bfloat16: BFLOAT16}


@functools.lru_cache(maxsize=4096)
def _memory(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def as_numbers(tensor: torch.Tensor) -> Array:
    """An array of the tensor's shape that shares, and keeps alive, its memory.

    Raises: DtypeError if the tensor is not on the CPU, or NumPy cannot compute with its dtype; ArgumentError if it has
    no memory, or its memory holds the conjugate or the negative of its elements.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.is_cpu:
        raise _dtype_error(tensor)
    shape = tensor.shape
    length = tensor.numel()
    if length == 0:
        return np.empty(shape, dtype)
    address = tensor.data_ptr()
    if not address or tensor.is_neg() or tensor.is_conj():
        return as_numbers(_completed(tensor))
    strides = None
    if not tensor.is_contiguous():
        strides = [stride * dtype.itemsize for stride in tensor.stride()]
        length = 1 + sum(stride * (n - 1) for stride, n in zip(tensor.stride(), shape, strict=True))
    memory = _memory(length * dtype.itemsize).from_address(address)
    memory.tensor = tensor
    return np.ndarray(shape, dtype, memory, strides=strides)


def _completed(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a functional collective, and returns its result. Raises: ArgumentError for any other tensor."""
    trigger_wait = getattr(tensor, "trigger_wait", None)  # of an AsyncCollectiveTensor
    if trigger_wait is not None:
        return trigger_wait()
    if tensor.data_ptr():
        raise ArgumentError(
            "the memory of this tensor holds the conjugate or the negative of its elements: pass "
            "tensor.resolve_conj().resolve_neg()"
        )
    raise ArgumentError(f"this {type(tensor).__name__} has no memory; that of a DTensor is tensor.to_local()")


def as_data(tensor: torch.Tensor) -> Array:
    """Like `as_numbers`, but only for moving data: dtypes that NumPy lacks, such as 8-bit floats, become bytes."""
    if tensor.dtype in DTYPES or not tensor.is_cpu:
        return as_numbers(tensor)
    return as_numbers(tensor.view(torch.uint8))


def flat_input(tensor: torch.Tensor) -> Array:
    """The tensor's elements, (n,): a view of its memory if the tensor is contiguous, otherwise perhaps a copy."""
    return as_data(tensor).reshape(-1)


def flat_output(tensor: torch.Tensor) -> Array:
    """The tensor's memory, (n,). Raises: ArgumentError if the tensor is not contiguous; what `as_data` raises."""
    if not tensor.is_contiguous():
        strides = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise ArgumentError(f"what this call writes should be a contiguous tensor, is one of {strides}")
    return as_data(tensor).reshape(-1)


def joined(tensors: Tensors) -> Array:
    """A copy of the elements of all tensors, one tensor after the other, (n,)."""
    return np.concatenate([flat_input(tensor) for tensor in tensors])


def split_into(tensors: Tensors, whole: Array) -> None:
    """Copies the parts of `whole` into the tensors: the reverse of `joined`.

    Raises: TypeError if dtypes differ; ValueError if `whole` has too few elements.
    """
    start = 0
    for tensor in tensors:
        part = as_data(tensor)
        np.copyto(part, whole[start : start + part.size].reshape(part.shape), casting="no")
        start += part.size


def _dtype_error(tensor: torch.Tensor) -> DtypeError:
    if tensor.is_cpu:
        return DtypeError(f"{tensor.dtype} can be moved between ranks, but not reduced: convert the tensor first")
    return DtypeError(
        f'the backend "ddp" moves tensors of the CPU, this one is on {tensor.device}: move it by tensor.cpu(), or '
        'give its device a backend of its own, init_process_group("cpu:ddp,cuda:nccl")'
    )
