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
from ddp._tensor.results import Size
from ddp.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


def construct(name: str, dtype: np.dtype[Any], given: tuple[Any, ...], device: Where) -> Tensor:
    """An uninitialised tensor of the sizes given, or a copy of the data; a tensor's memory is shared.

    Raises: DtypeError for a tensor of another dtype; ArgumentError for several arguments that are no sizes.
    """
    if len(given) == 1 and isinstance(given[0], TensorBase):
        x = given[0]
        if x.array.dtype != dtype:
            raise DtypeError(f"{name}: a tensor of {dtype} was expected, not {x.array.dtype}; use to()")
        return wrap(x.array, x._device, x)
    if len(given) == 1 and isinstance(given[0], Size):
        return empty(given[0], dtype=dtype, device=device)
    if all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in given):
        return empty([operator.index(n) for n in given] or (0,), dtype=dtype, device=device)
    if len(given) > 1:
        raise ArgumentError(f"{name}: expected sizes, or one sequence of data, got {len(given)} arguments")
    return tensor(given[0], dtype=dtype, device=device)


class TypedTensor(type):
    """The type of `ddp.LongTensor` and its kin: tensors of one dtype on one kind of device.

    Calling one makes tensors: of sizes, uninitialised; of data, a copy. An instance is any tensor of that dtype there,
    as in `isinstance(x, ddp.LongTensor)`; `ddp.LongTensor | None` is an annotation. x.type() takes them, too.

    Raises: DtypeError for a tensor of another dtype; ArgumentError for several arguments that are no sizes.
    """

    dtype: np.dtype[Any]  # by which NumPy, and so parse(), takes the type for its dtype
    device_type: str

    def __call__(cls, *given: Any, device: Where = None) -> Tensor:
        where = cls.device_type if device is None and cls.device_type != "cpu" else device
        return construct(cls.__name__, cls.dtype, given, where)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, TensorBase) and x.array.dtype == cls.dtype and x._device.type == cls.device_type

    def __repr__(cls) -> str:
        return f"{cls.__module__}.{cls.__name__}"


def _typed(module: str, name: str, dtype: np.dtype[Any], device_type: str) -> TypedTensor:
    doc = f"Tensors of {dtype} on {device_type}; called with sizes or data, it makes one."
    return TypedTensor(name, (), {"__module__": module, "__doc__": doc, "dtype": dtype, "device_type": device_type})


if TYPE_CHECKING:
    BFloat16Tensor = BoolTensor = ByteTensor = CharTensor = DoubleTensor = Tensor
    FloatTensor = HalfTensor = IntTensor = LongTensor = ShortTensor = Tensor
else:
    globals().update({name: _typed("ddp", name, dtype, "cpu") for name, dtype in dtypes.TYPES.items()})
    __all__ = list(dtypes.TYPES)
ON_CUDA = {name: _typed("ddp.cuda", name, dtype, "cuda") for name, dtype in dtypes.TYPES.items()}
