"""`ddp.cuda`: the CUDA devices of this process, as far as CuPy finds any. Every question can be asked without one."""

from types import FunctionType
from typing import TYPE_CHECKING

from ddp import _aliases
from ddp._tensor.creation import ON_CUDA
from ddp.cuda import memory as memory
from ddp.cuda import nvtx as nvtx
from ddp.cuda._graphed_step import graphed_step as graphed_step
from ddp.errors import OutOfMemoryError as OutOfMemoryError

if TYPE_CHECKING:
    from ddp.cuda._devices import *
    from ddp.cuda.graphs import *
    from ddp.cuda.memory import *
    from ddp.cuda.streams import *
else:
    _names = _aliases.defined_in("ddp.cuda", "_devices graphs memory streams", (type, FunctionType))
    del _names["use"], _names["device_stream_of"]  # of memory; for other modules of this package
    globals().update(_names)
    __all__ = sorted([*_names, "OutOfMemoryError", "graphed_step", "memory", "nvtx"])

__getattr__ = _aliases.attribute(__name__)
globals().update(ON_CUDA)  # cuda.FloatTensor and its kin
