"""Questions about tensors and dtypes, as functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._tensor.base import TensorBase
from ddp._tensor.dtypes import bool_, of_number, promote, promote_scalar
from ddp._tensor.interop import Interop
from ddp.errors import DtypeError


def is_tensor(obj: Any) -> bool:
    """Whether `obj` is a Tensor."""
    return isinstance(obj, TensorBase)


def is_floating_point(input: Interop) -> bool:
    """Whether the dtype of `input` is floating."""
    return input.is_floating_point()


def numel(input: TensorBase) -> int:
    """The number of elements of `input`."""
    return input.array.size


def result_type(tensor1: Any, tensor2: Any) -> np.dtype[Any]:
    """The dtype of an operation on two tensors or Python numbers. Raises: DtypeError for anything else."""
    if isinstance(tensor1, TensorBase) and isinstance(tensor2, TensorBase):
        a, b = tensor1.array, tensor2.array
        return promote(a.dtype, a.ndim, b.dtype, b.ndim)
    for x, y in ((tensor1, tensor2), (tensor2, tensor1)):
        if not isinstance(y, bool | int | float):
            continue
        if isinstance(x, TensorBase):
            return promote_scalar(x.array.dtype, y)
        if isinstance(x, bool | int | float):
            return promote_scalar(of_number(x), y) if of_number(x) != bool_ else of_number(y)
    raise DtypeError(
        f"result_type: expected tensors or numbers, got {type(tensor1).__name__} and {type(tensor2).__name__}"
    )
