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
from ddp._tensor.functions import abs as abs
from ddp._tensor.functions import absolute as absolute
from ddp._tensor.functions import acos as acos
from ddp._tensor.functions import acosh as acosh
from ddp._tensor.functions import add as add
from ddp._tensor.functions import addcdiv as addcdiv
from ddp._tensor.functions import addcmul as addcmul
from ddp._tensor.functions import addmm as addmm
from ddp._tensor.functions import addmv as addmv
from ddp._tensor.functions import addr as addr
from ddp._tensor.functions import all as all
from ddp._tensor.functions import allclose as allclose
from ddp._tensor.functions import amax as amax
from ddp._tensor.functions import amin as amin
from ddp._tensor.functions import aminmax as aminmax
from ddp._tensor.functions import any as any
from ddp._tensor.functions import arccos as arccos
from ddp._tensor.functions import arccosh as arccosh
from ddp._tensor.functions import arcsin as arcsin
from ddp._tensor.functions import arcsinh as arcsinh
from ddp._tensor.functions import arctan as arctan
from ddp._tensor.functions import arctan2 as arctan2
from ddp._tensor.functions import arctanh as arctanh
from ddp._tensor.functions import argmax as argmax
from ddp._tensor.functions import argmin as argmin
from ddp._tensor.functions import argsort as argsort
from ddp._tensor.functions import argwhere as argwhere
from ddp._tensor.functions import as_strided as as_strided
from ddp._tensor.functions import asin as asin
from ddp._tensor.functions import asinh as asinh
from ddp._tensor.functions import atan as atan
from ddp._tensor.functions import atan2 as atan2
from ddp._tensor.functions import atanh as atanh
from ddp._tensor.functions import baddbmm as baddbmm
from ddp._tensor.functions import bincount as bincount
from ddp._tensor.functions import bitwise_and as bitwise_and
from ddp._tensor.functions import bitwise_left_shift as bitwise_left_shift
from ddp._tensor.functions import bitwise_not as bitwise_not
from ddp._tensor.functions import bitwise_or as bitwise_or
from ddp._tensor.functions import bitwise_right_shift as bitwise_right_shift
from ddp._tensor.functions import bitwise_xor as bitwise_xor
from ddp._tensor.functions import bmm as bmm
from ddp._tensor.functions import broadcast_to as broadcast_to
from ddp._tensor.functions import bucketize as bucketize
from ddp._tensor.functions import ceil as ceil
from ddp._tensor.functions import chunk as chunk
from ddp._tensor.functions import clamp as clamp
from ddp._tensor.functions import clamp_max as clamp_max
from ddp._tensor.functions import clamp_min as clamp_min
from ddp._tensor.functions import clip as clip
from ddp._tensor.functions import clone as clone
from ddp._tensor.functions import cos as cos
from ddp._tensor.functions import cosh as cosh
from ddp._tensor.functions import count_nonzero as count_nonzero
from ddp._tensor.functions import cummax as cummax
from ddp._tensor.functions import cummin as cummin
from ddp._tensor.functions import cumprod as cumprod
from ddp._tensor.functions import cumsum as cumsum
from ddp._tensor.functions import detach as detach
from ddp._tensor.functions import diag as diag
from ddp._tensor.functions import diag_embed as diag_embed
from ddp._tensor.functions import diagonal as diagonal
from ddp._tensor.functions import div as div
from ddp._tensor.functions import divide as divide
from ddp._tensor.functions import dot as dot
from ddp._tensor.functions import eq as eq
from ddp._tensor.functions import equal as equal
from ddp._tensor.functions import erf as erf
from ddp._tensor.functions import erfc as erfc
from ddp._tensor.functions import erfinv as erfinv
from ddp._tensor.functions import exp as exp
from ddp._tensor.functions import exp2 as exp2
from ddp._tensor.functions import expm1 as expm1
from ddp._tensor.functions import fix as fix
from ddp._tensor.functions import flatten as flatten
from ddp._tensor.functions import flip as flip
from ddp._tensor.functions import fliplr as fliplr
from ddp._tensor.functions import flipud as flipud
from ddp._tensor.functions import floor as floor
from ddp._tensor.functions import floor_divide as floor_divide
from ddp._tensor.functions import fmax as fmax
from ddp._tensor.functions import fmin as fmin
from ddp._tensor.functions import fmod as fmod
from ddp._tensor.functions import frac as frac
from ddp._tensor.functions import gather as gather
from ddp._tensor.functions import ge as ge
from ddp._tensor.functions import greater as greater
from ddp._tensor.functions import greater_equal as greater_equal
from ddp._tensor.functions import gt as gt
from ddp._tensor.functions import histc as histc
from ddp._tensor.functions import hypot as hypot
from ddp._tensor.functions import index_add as index_add
from ddp._tensor.functions import index_copy as index_copy
from ddp._tensor.functions import index_fill as index_fill
from ddp._tensor.functions import index_put as index_put
from ddp._tensor.functions import index_select as index_select
from ddp._tensor.functions import inner as inner
from ddp._tensor.functions import is_floating_point as is_floating_point
from ddp._tensor.functions import is_tensor as is_tensor
from ddp._tensor.functions import isclose as isclose
from ddp._tensor.functions import isfinite as isfinite
from ddp._tensor.functions import isinf as isinf
from ddp._tensor.functions import isnan as isnan
from ddp._tensor.functions import kthvalue as kthvalue
from ddp._tensor.functions import le as le
from ddp._tensor.functions import lerp as lerp
from ddp._tensor.functions import less as less
from ddp._tensor.functions import less_equal as less_equal
from ddp._tensor.functions import log as log
from ddp._tensor.functions import log1p as log1p
from ddp._tensor.functions import log2 as log2
from ddp._tensor.functions import log10 as log10
from ddp._tensor.functions import log_softmax as log_softmax
from ddp._tensor.functions import logaddexp as logaddexp
from ddp._tensor.functions import logical_and as logical_and
from ddp._tensor.functions import logical_not as logical_not
from ddp._tensor.functions import logical_or as logical_or
from ddp._tensor.functions import logical_xor as logical_xor
from ddp._tensor.functions import logit as logit
from ddp._tensor.functions import logsumexp as logsumexp
from ddp._tensor.functions import lt as lt
from ddp._tensor.functions import masked_fill as masked_fill
from ddp._tensor.functions import masked_scatter as masked_scatter
from ddp._tensor.functions import masked_select as masked_select
from ddp._tensor.functions import matmul as matmul
from ddp._tensor.functions import max as max
from ddp._tensor.functions import maximum as maximum
from ddp._tensor.functions import mean as mean
from ddp._tensor.functions import median as median
from ddp._tensor.functions import min as min
from ddp._tensor.functions import minimum as minimum
from ddp._tensor.functions import mm as mm
from ddp._tensor.functions import moveaxis as moveaxis
from ddp._tensor.functions import movedim as movedim
from ddp._tensor.functions import msort as msort
from ddp._tensor.functions import mul as mul
from ddp._tensor.functions import multiply as multiply
from ddp._tensor.functions import mv as mv
from ddp._tensor.functions import nan_to_num as nan_to_num
from ddp._tensor.functions import nanmean as nanmean
from ddp._tensor.functions import nansum as nansum
from ddp._tensor.functions import narrow as narrow
from ddp._tensor.functions import ne as ne
from ddp._tensor.functions import neg as neg
from ddp._tensor.functions import negative as negative
from ddp._tensor.functions import nonzero as nonzero
from ddp._tensor.functions import norm as norm
from ddp._tensor.functions import not_equal as not_equal
from ddp._tensor.functions import numel as numel
from ddp._tensor.functions import outer as outer
from ddp._tensor.functions import permute as permute
from ddp._tensor.functions import positive as positive
from ddp._tensor.functions import pow as pow
from ddp._tensor.functions import prod as prod
from ddp._tensor.functions import ravel as ravel
from ddp._tensor.functions import reciprocal as reciprocal
from ddp._tensor.functions import relu as relu
from ddp._tensor.functions import remainder as remainder
from ddp._tensor.functions import reshape as reshape
from ddp._tensor.functions import result_type as result_type
from ddp._tensor.functions import roll as roll
from ddp._tensor.functions import rot90 as rot90
from ddp._tensor.functions import round as round
from ddp._tensor.functions import rsqrt as rsqrt
from ddp._tensor.functions import rsub as rsub
from ddp._tensor.functions import scatter as scatter
from ddp._tensor.functions import scatter_add as scatter_add
from ddp._tensor.functions import select as select
from ddp._tensor.functions import sigmoid as sigmoid
from ddp._tensor.functions import sign as sign
from ddp._tensor.functions import sin as sin
from ddp._tensor.functions import sinh as sinh
from ddp._tensor.functions import softmax as softmax
from ddp._tensor.functions import sort as sort
from ddp._tensor.functions import split as split
from ddp._tensor.functions import split_with_sizes as split_with_sizes
from ddp._tensor.functions import sqrt as sqrt
from ddp._tensor.functions import square as square
from ddp._tensor.functions import squeeze as squeeze
from ddp._tensor.functions import std as std
from ddp._tensor.functions import std_mean as std_mean
from ddp._tensor.functions import sub as sub
from ddp._tensor.functions import subtract as subtract
from ddp._tensor.functions import sum as sum
from ddp._tensor.functions import swapaxes as swapaxes
from ddp._tensor.functions import swapdims as swapdims
from ddp._tensor.functions import t as t
from ddp._tensor.functions import take as take
from ddp._tensor.functions import take_along_dim as take_along_dim
from ddp._tensor.functions import tan as tan
from ddp._tensor.functions import tanh as tanh
from ddp._tensor.functions import tensor_split as tensor_split
from ddp._tensor.functions import tile as tile
from ddp._tensor.functions import topk as topk
from ddp._tensor.functions import trace as trace
from ddp._tensor.functions import transpose as transpose
from ddp._tensor.functions import tril as tril
from ddp._tensor.functions import triu as triu
from ddp._tensor.functions import true_divide as true_divide
from ddp._tensor.functions import trunc as trunc
from ddp._tensor.functions import unbind as unbind
from ddp._tensor.functions import unflatten as unflatten
from ddp._tensor.functions import unique as unique
from ddp._tensor.functions import unique_consecutive as unique_consecutive
from ddp._tensor.functions import unsqueeze as unsqueeze
from ddp._tensor.functions import var as var
from ddp._tensor.functions import var_mean as var_mean
from ddp._tensor.functions import where as where
from ddp._tensor.functions import xlogy as xlogy
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
