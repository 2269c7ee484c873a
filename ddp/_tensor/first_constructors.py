"""Tensors as PyTorch made them first: `Tensor(2, 3)` is memory as it comes, `LongTensor([1, 2])` a copy of data.

`tensor`, `empty` and `dtype=` say the same more clearly; older models have these.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor import dtypes
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.creation import Where, empty
from ddp._tensor.interop import tensor
from ddp._tensor.sizes import Size
from ddp.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


def constructed(name: str, dtype: np.dtype[Any], given: tuple[Any, ...], device: Where) -> Tensor:
    """An uninitialised tensor of the sizes given, or a copy of the data; a tensor's memory is shared.

    Raises: DtypeError for a tensor of another dtype; ArgumentError for several arguments that are no sizes.
    """
    if len(given) == 1 and isinstance(given[0], TensorBase):
        x = given[0]
        if x._array.dtype != dtype:
            raise DtypeError(f"{name}: a tensor of {dtype} was expected, not {x._array.dtype}; use to()")
        return wrap(x._array, x._device, x)
    if len(given) == 1 and isinstance(given[0], Size):
        return empty(given[0], dtype=dtype, device=device)
    if all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in given):
        return empty([operator.index(n) for n in given] or (0,), dtype=dtype, device=device)
    if len(given) > 1:
        raise ArgumentError(f"{name}: expected sizes, or one sequence of data, got {len(given)} arguments")
    return tensor(given[0], dtype=dtype, device=device)


class FirstConstructor:
    """Makes tensors of one dtype: of sizes, uninitialised; of data, a copy. What x.type() takes, too.

    Raises: DtypeError for a tensor of another dtype; ArgumentError for several arguments that are no sizes.
    """

    __slots__ = ("__name__", "dtype")

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self.__name__ = name
        self.dtype = dtype  # by which NumPy, and so parse(), takes this for its dtype

    def __call__(self, *given: Any, device: Where = None) -> Tensor:
        return constructed(self.__name__, self.dtype, given, device)

    def __repr__(self) -> str:
        return f"ddp.{self.__name__}"


BoolTensor = FirstConstructor("BoolTensor", dtypes.bool_)
ByteTensor = FirstConstructor("ByteTensor", dtypes.uint8)
DoubleTensor = FirstConstructor("DoubleTensor", dtypes.float64)
FloatTensor = FirstConstructor("FloatTensor", dtypes.float32)
HalfTensor = FirstConstructor("HalfTensor", dtypes.float16)
IntTensor = FirstConstructor("IntTensor", dtypes.int32)
LongTensor = FirstConstructor("LongTensor", dtypes.int64)
