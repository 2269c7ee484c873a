"""Tensors, autograd, layers and optimizers on NumPy and CuPy arrays, under PyTorch's names.

One model trains on many devices through `DataParallel`; a world of one needs nothing but NumPy and ml_dtypes.
"""

from math import e as e
from math import inf as inf
from math import nan as nan
from math import pi as pi
from typing import TYPE_CHECKING, Any

from numpy import dtype as dtype
from numpy import newaxis as newaxis

from collectives.version import __version__ as __version__
from ddp import _aliases, _cuda, _heap
from ddp import errors as errors
from ddp._device import device as device
from ddp._device import initial_seed as initial_seed
from ddp._device import manual_seed as manual_seed
from ddp._engine import enable_grad as enable_grad
from ddp._engine import inference_mode as inference_mode
from ddp._engine import is_grad_enabled as is_grad_enabled
from ddp._engine import is_inference_mode_enabled as is_inference_mode_enabled
from ddp._engine import no_grad as no_grad
from ddp._engine import set_grad_enabled as set_grad_enabled
from ddp._tensor.core import Tensor as Tensor
from ddp._tensor.creation import arange as arange
from ddp._tensor.creation import empty as empty
from ddp._tensor.creation import empty_like as empty_like
from ddp._tensor.creation import eye as eye
from ddp._tensor.creation import full as full
from ddp._tensor.creation import full_like as full_like
from ddp._tensor.creation import get_default_device as get_default_device
from ddp._tensor.creation import linspace as linspace
from ddp._tensor.creation import logspace as logspace
from ddp._tensor.creation import ones as ones
from ddp._tensor.creation import ones_like as ones_like
from ddp._tensor.creation import set_default_device as set_default_device
from ddp._tensor.creation import zeros as zeros
from ddp._tensor.creation import zeros_like as zeros_like
from ddp._tensor.dtypes import bfloat16 as bfloat16
from ddp._tensor.dtypes import bool_ as bool  # noqa: F401
from ddp._tensor.dtypes import can_cast as can_cast
from ddp._tensor.dtypes import finfo as finfo
from ddp._tensor.dtypes import float16 as float16
from ddp._tensor.dtypes import float16 as half  # noqa: F401
from ddp._tensor.dtypes import float32 as float  # noqa: F401
from ddp._tensor.dtypes import float32 as float32
from ddp._tensor.dtypes import float64 as double  # noqa: F401
from ddp._tensor.dtypes import float64 as float64
from ddp._tensor.dtypes import get_default_dtype as get_default_dtype
from ddp._tensor.dtypes import iinfo as iinfo
from ddp._tensor.dtypes import int8 as int8
from ddp._tensor.dtypes import int16 as int16
from ddp._tensor.dtypes import int16 as short  # noqa: F401
from ddp._tensor.dtypes import int32 as int  # noqa: F401
from ddp._tensor.dtypes import int32 as int32
from ddp._tensor.dtypes import int64 as int64
from ddp._tensor.dtypes import int64 as long  # noqa: F401
from ddp._tensor.dtypes import promote_types as promote_types
from ddp._tensor.dtypes import set_default_dtype as set_default_dtype
from ddp._tensor.dtypes import uint8 as uint8
from ddp._tensor.functions import *  # noqa: F403  # every name there is public
from ddp._tensor.interop import as_tensor as as_tensor
from ddp._tensor.interop import asarray as asarray
from ddp._tensor.interop import from_dlpack as from_dlpack
from ddp._tensor.interop import from_numpy as from_numpy
from ddp._tensor.interop import frombuffer as frombuffer
from ddp._tensor.interop import scalar_tensor as scalar_tensor
from ddp._tensor.interop import tensor as tensor
from ddp._tensor.joining import atleast_1d as atleast_1d
from ddp._tensor.joining import atleast_2d as atleast_2d
from ddp._tensor.joining import atleast_3d as atleast_3d
from ddp._tensor.joining import broadcast_shapes as broadcast_shapes
from ddp._tensor.joining import broadcast_tensors as broadcast_tensors
from ddp._tensor.joining import cartesian_prod as cartesian_prod
from ddp._tensor.joining import cat as cat
from ddp._tensor.joining import column_stack as column_stack
from ddp._tensor.joining import concat as concat
from ddp._tensor.joining import concatenate as concatenate
from ddp._tensor.joining import dstack as dstack
from ddp._tensor.joining import hstack as hstack
from ddp._tensor.joining import meshgrid as meshgrid
from ddp._tensor.joining import repeat_interleave as repeat_interleave
from ddp._tensor.joining import stack as stack
from ddp._tensor.joining import tril_indices as tril_indices
from ddp._tensor.joining import triu_indices as triu_indices
from ddp._tensor.joining import vstack as vstack
from ddp._tensor.legacy_constructors import BFloat16Tensor as BFloat16Tensor
from ddp._tensor.legacy_constructors import BoolTensor as BoolTensor
from ddp._tensor.legacy_constructors import ByteTensor as ByteTensor
from ddp._tensor.legacy_constructors import CharTensor as CharTensor
from ddp._tensor.legacy_constructors import DoubleTensor as DoubleTensor
from ddp._tensor.legacy_constructors import FloatTensor as FloatTensor
from ddp._tensor.legacy_constructors import HalfTensor as HalfTensor
from ddp._tensor.legacy_constructors import IntTensor as IntTensor
from ddp._tensor.legacy_constructors import LongTensor as LongTensor
from ddp._tensor.legacy_constructors import ShortTensor as ShortTensor
from ddp._tensor.linear_algebra import cdist as cdist
from ddp._tensor.linear_algebra import einsum as einsum
from ddp._tensor.linear_algebra import kron as kron
from ddp._tensor.linear_algebra import tensordot as tensordot
from ddp._tensor.printing import set_printoptions as set_printoptions
from ddp._tensor.results import Size as Size
from ddp._tensor.sampling import Generator as Generator
from ddp._tensor.sampling import bernoulli as bernoulli
from ddp._tensor.sampling import get_rng_state as get_rng_state
from ddp._tensor.sampling import multinomial as multinomial
from ddp._tensor.sampling import normal as normal
from ddp._tensor.sampling import rand as rand
from ddp._tensor.sampling import rand_like as rand_like
from ddp._tensor.sampling import randint as randint
from ddp._tensor.sampling import randint_like as randint_like
from ddp._tensor.sampling import randn as randn
from ddp._tensor.sampling import randn_like as randn_like
from ddp._tensor.sampling import randperm as randperm
from ddp._tensor.sampling import seed as seed
from ddp._tensor.sampling import set_rng_state as set_rng_state
from ddp._tensor.sorting import isin as isin
from ddp._tensor.sorting import searchsorted as searchsorted
from ddp.ops.memory_formats import channels_last as channels_last
from ddp.ops.memory_formats import contiguous_format as contiguous_format
from ddp.ops.memory_formats import memory_format as memory_format
from ddp.ops.memory_formats import preserve_format as preserve_format

_heap.keep_freed()
_cuda.install()
_aliases.install()

if TYPE_CHECKING:
    from ddp import accelerator as accelerator
    from ddp import amp as amp
    from ddp import autograd as autograd
    from ddp import backends as backends
    from ddp import checkpoint as checkpoint
    from ddp import cuda as cuda
    from ddp import data as data
    from ddp import distributed as distributed
    from ddp import linalg as linalg
    from ddp import metrics as metrics
    from ddp import multiprocessing as multiprocessing
    from ddp import nn as nn
    from ddp import optim as optim
    from ddp import parallel as parallel
    from ddp import return_types as return_types
    from ddp import tracing as tracing
    from ddp.amp import autocast as autocast
    from ddp.backends import get_float32_matmul_precision as get_float32_matmul_precision
    from ddp.backends import set_float32_matmul_precision as set_float32_matmul_precision
    from ddp.parallel import DataParallel as DataParallel
    from ddp.serialization import load as load
    from ddp.serialization import save as save

# Imported when first asked for, so that nobody waits for what he does not use: modules, and names in them.
_LATER = {
    "DataParallel": "parallel",
    "autocast": "amp",
    "get_float32_matmul_precision": "backends",
    "load": "serialization",
    "save": "serialization",
    "set_float32_matmul_precision": "backends",
}
_MODULES = (
    "accelerator",
    "amp",
    "autograd",
    "backends",
    "checkpoint",
    "cuda",
    "data",
    "distributed",
    "linalg",
    "metrics",
    "multiprocessing",
    "nn",
    "onnx",
    "optim",
    "parallel",
    "return_types",
    "serialization",
    "tracing",
    "utils",
)

__all__ = sorted(
    ({name for name in (*globals(), *_LATER, *_MODULES) if name[0] != "_"} | {"__version__"})
    - {"Any", "TYPE_CHECKING", "onnx", "ops", "parallel", "serialization", "tracing"}
)


def __getattr__(name: str) -> Any:
    home = name if name in _MODULES else _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"ddp.{home}")
    value = globals()[name] = module if home == name else getattr(module, name)
    return value
