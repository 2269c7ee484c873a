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

from collectives import __version__ as _release
from ddp import _aliases, _cuda, _heap, _native
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
from ddp._tensor.complex_numbers import ComplexTensor as ComplexTensor
from ddp._tensor.core import Tensor as Tensor
from ddp._tensor.creation import *
from ddp._tensor.dtypes import *
from ddp._tensor.dtypes import bool_ as bool  # noqa: F401
from ddp._tensor.dtypes import float16 as half  # noqa: F401
from ddp._tensor.dtypes import float32 as float  # noqa: F401
from ddp._tensor.dtypes import float64 as double  # noqa: F401
from ddp._tensor.dtypes import int16 as short  # noqa: F401
from ddp._tensor.dtypes import int32 as int  # noqa: F401
from ddp._tensor.dtypes import int64 as long  # noqa: F401
from ddp._tensor.functions import *
from ddp._tensor.linear_algebra import *
from ddp._tensor.printing import set_printoptions as set_printoptions
from ddp._tensor.reductions import *
from ddp._tensor.results import Size as Size
from ddp._tensor.sampling import *
from ddp._version import TorchVersion as _TorchVersion
from ddp.ops.memory_formats import channels_last as channels_last
from ddp.ops.memory_formats import contiguous_format as contiguous_format
from ddp.ops.memory_formats import memory_format as memory_format
from ddp.ops.memory_formats import preserve_format as preserve_format

# Scripts compare this with releases of PyTorch. So it begins with the release of PyTorch whose names `ddp` has. Our own
# version comes after "+ddp.".
__version__ = _TorchVersion(f"2.13.0+ddp.{_release}")

_heap.keep_freed()
_cuda.install()
_native.install()
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
    from ddp import distributions as distributions
    from ddp import fft as fft
    from ddp import func as func
    from ddp import hub as hub
    from ddp import jit as jit
    from ddp import linalg as linalg
    from ddp import metrics as metrics
    from ddp import multiprocessing as multiprocessing
    from ddp import nn as nn
    from ddp import optim as optim
    from ddp import parallel as parallel
    from ddp import return_types as return_types
    from ddp import special as special
    from ddp import testing as testing
    from ddp import tracing as tracing
    from ddp.amp import autocast as autocast
    from ddp.backends import get_float32_matmul_precision as get_float32_matmul_precision
    from ddp.backends import set_float32_matmul_precision as set_float32_matmul_precision
    from ddp.jit import compile as compile
    from ddp.parallel import DataParallel as DataParallel
    from ddp.serialization import load as load
    from ddp.serialization import save as save

# Modules, and names in them, that are imported on first use, so that `import ddp` is fast.
_LATER = {
    "DataParallel": "parallel",
    "autocast": "amp",
    "compile": "jit",
    "get_float32_matmul_precision": "backends",
    "load": "serialization",
    "save": "serialization",
    "set_float32_matmul_precision": "backends",
}
_MODULES = (
    "accelerator amp autograd backends checkpoint cuda data distributed distributions fft func hub jit linalg metrics "
    "multiprocessing nn onnx optim parallel return_types serialization special testing tracing utils"
)

__all__ = sorted(
    ({name for name in (*globals(), *_LATER, *_MODULES.split()) if name[0] != "_"} | {"__version__"})
    - {"Any", "TYPE_CHECKING", "onnx", "ops", "parallel", "serialization", "tracing"}
)


def __getattr__(name: str) -> Any:
    home = name if name in _MODULES.split() else _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"ddp.{home}")
    value = globals()[name] = module if home == name else getattr(module, name)
    return value
