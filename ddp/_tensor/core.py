"""`Tensor`: an array with its place in the graph. Its methods are in mixins, one family per file."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

from ddp import _device
from ddp._engine import Node
from ddp._tensor import base
from ddp._tensor.creation import Creation, construct
from ddp._tensor.dtypes import Dtype, Number, get_default_dtype
from ddp._tensor.elementwise import Elementwise
from ddp._tensor.gradients import GradFn, Gradients
from ddp._tensor.indexing import Indexing
from ddp._tensor.interop import Interop
from ddp._tensor.linear_algebra import LinearAlgebra
from ddp._tensor.operands import numpy_names, parse_int
from ddp._tensor.printing import text_of
from ddp._tensor.reductions import Reductions
from ddp._tensor.results import Size
from ddp._tensor.sampling import Sampling
from ddp._tensor.shapes import Shapes
from ddp._tensor.storage import Conversion, Storage
from ddp.errors import ArgumentError, DtypeError, RangeError
from ddp.ops.memory_formats import channels_last, contiguous_format, is_channels_last, memory_format


class Tensor(
    Gradients,
    Elementwise,
    Reductions,
    LinearAlgebra,
    Shapes,
    Indexing,
    Creation,
    Sampling,
    Interop,
    Conversion,
    Storage,
):
    """A multi-dimensional array with a gradient. Made by `ddp.tensor` and the other creation functions.

    shape: the sizes. dtype: float16, bfloat16, float32, float64, an integer or bool. device: where the memory is.

    Attributes of your own may be set: `x.tag = 1`. Copies and pickles keep them, results of ops do not, as in PyTorch.

    Tensor(2, 3), with sizes, is uninitialized memory of the default dtype. Tensor(data) copies a sequence or an array,
    but shares the memory of a tensor. New memory is on the CPU unless `device` is given, as in PyTorch.
    """

    __slots__ = ()

    # Not in __new__, which would run for every result of an op.
    def __init__(self, *given: Any, device: Any = None) -> None:
        data = construct("Tensor", get_default_dtype(), given, "cpu" if device is None else device)
        self.array = data.array
        self._device = data._device
        self.version = data.version
        self._epoch = data._epoch
        self.edge = self.accumulate_grad = self.grad_view = None

    @property
    def shape(self) -> Size:
        """The sizes of the dimensions."""
        return Size(self.array.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of dimension `dim`.

        Raises: RangeError if there is no such dimension; DtypeError if `dim` is not an integer.
        """
        if dim is None:
            return Size(self.array.shape)
        try:
            return self.array.shape[parse_int(dim, "size", "a dimension")]
        except IndexError:
            raise RangeError(f"size: dimension {dim} of shape {self.array.shape}") from None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.array.ndim

    def dim(self) -> int:
        """The number of dimensions."""
        return self.array.ndim

    ndimension = dim

    def numel(self) -> int:
        """The number of elements."""
        return self.array.size

    nelement = numel

    @property
    def dtype(self) -> Dtype:
        """The type of the elements."""
        return self.array.dtype

    # Kinds of tensors that PyTorch has and we do not: always False.
    is_meta = is_mps = is_quantized = is_sparse = is_xpu = False

    @property
    def is_cuda(self) -> bool:
        """Whether the memory is on a GPU."""
        return self._device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        """Whether the memory is the CPU's."""
        return self._device.type == "cpu"

    def get_device(self) -> int:
        """The index of the GPU; -1 on the CPU."""
        return -1 if self._device.type == "cpu" else self.array.device.id

    @property
    def grad_fn(self) -> GradFn | None:
        """The op that made this tensor; None for a leaf."""
        return GradFn(self.edge) if isinstance(self.edge, Node) else None

    @property
    def mH(self) -> Tensor:
        """This tensor with the last two dimensions exchanged: the same as mT, because no dtype is complex."""
        return self.mT

    @property
    def H(self) -> Tensor:
        """The transpose of this matrix; `mH` also takes batches of matrices."""
        return self.t()

    def adjoint(self) -> Tensor:
        """The same as mH."""
        return self.mT

    def is_contiguous(self, memory_format: memory_format = contiguous_format) -> bool:
        """Whether memory has the elements in the order of their indices; for ddp.channels_last, in order N, H, W, C."""
        if memory_format is channels_last:
            return is_channels_last(self.array)
        return bool(self.array.flags.c_contiguous)

    def contiguous(self, memory_format: memory_format = contiguous_format) -> Tensor:
        """Returns this tensor if it is contiguous in that format, otherwise a contiguous copy.

        Raises: ShapeError for ddp.channels_last of anything but (N, C, H, W).
        """
        return self._formatted(memory_format)

    def is_complex(self) -> bool:
        """Always False: there are no complex dtypes."""
        return False

    def is_signed(self) -> bool:
        """Whether the dtype has negative numbers."""
        return self.array.dtype.kind not in "bu"

    def __contains__(self, element: Any) -> bool:
        if not isinstance(element, Tensor | Number):
            raise DtypeError(f"in: expected a tensor or a number, got {type(element).__name__}")
        return bool((self == element).array.any())

    def __reversed__(self) -> Tensor:
        return self.flip(0) if self.array.ndim else self

    def __bool__(self) -> bool:
        if self.array.size != 1:
            raise ArgumentError(f"the truth of shape {self.array.shape} is not one value; use all() or any()")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec) if self.array.ndim else format(self.item(), spec)

    def __repr__(self) -> str:
        return text_of(self)


base._plain.append(Tensor)
for _mixin in Tensor.__mro__[1:-1]:
    for _function in filter(inspect.isfunction, vars(_mixin).values()):
        if _function.__qualname__ == f"{_mixin.__name__}.{_function.__name__}":  # error messages show this name
            _function.__module__ = Tensor.__module__
            _function.__qualname__ = f"Tensor.{_function.__name__}"

_WITH_NUMPY_NAMES = (  # methods whose dim and keepdim may also be named axis and keepdims
    "all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum log_softmax logsumexp "
    "max mean median min nanmean nansum prod softmax sort squeeze std sum topk unsqueeze var"
)
for _name in _WITH_NUMPY_NAMES.split():
    setattr(Tensor, _name, numpy_names(getattr(Tensor, _name)))

# Methods that compute on the device without `apply`.
_LAUNCHING = (
    "__contains__ __deepcopy__ __getitem__ __invert__ __setitem__ all allclose any argmax argmin argsort "
    "bernoulli bernoulli_ bincount bitwise_not copy_ count_nonzero cummax cummin equal exponential_ fill_ "
    "fill_diagonal_ gather histc index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put "
    "index_put_ index_select isclose isfinite isinf isnan item kthvalue logical_not masked_fill masked_fill_ "
    "masked_scatter masked_scatter_ masked_select max median min multinomial nanmean nonzero normal_ random_ "
    "repeat_interleave scatter scatter_ scatter_add scatter_add_ sort take take_along_dim tensor_split tolist topk "
    "uniform_ unique unique_consecutive"
)
_device.on_first_use.append(functools.partial(base.guard_methods, Tensor, _LAUNCHING))
