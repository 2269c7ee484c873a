"""`ddp.cuda`: CUDA devices, streams, memory and graphs, by CuPy.

Without a GPU, the module can be imported and `is_available` called. Functions that need a GPU raise DeviceError.
"""

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
    # `use` is public as `memory.use`, and `device_stream_of` is for other modules of `ddp`.
    del _names["use"]
    del _names["device_stream_of"]
    globals().update(_names)
    __all__ = sorted([*_names, "OutOfMemoryError", "graphed_step", "memory", "nvtx"])

__getattr__ = _aliases.attribute(__name__)
globals().update(ON_CUDA)  # cuda.FloatTensor and the like
