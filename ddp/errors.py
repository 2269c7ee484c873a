"""The errors of tensors, autograd, layers and optimizers, as one tree:

    DdpError (RuntimeError)
    ├── ArgumentError (ValueError)      a value that the call cannot take
    │   └── ShapeError                  shapes that do not fit each other, or the call
    ├── DtypeError (TypeError)          a dtype, or a type, that the call cannot take
    ├── RangeError (IndexError)         an index, a dimension or a class target out of range
    ├── DeviceError                     a device that is missing or cannot do the call, or tensors on different devices
    ├── OutOfMemoryError (MemoryError)  a GPU's memory is full
    ├── CudaError                       an error that CUDA reports for work on a GPU
    ├── CaptureError                    an operation that cannot be part of a CUDA graph
    ├── GraphError                      backward cannot run on this graph
    │   ├── GraphFreedError             a second backward over a graph that the first has freed
    │   ├── VersionError                a value that backward reads was changed in place
    │   ├── InplaceError                an in-place operation that autograd cannot follow
    │   └── AnomalyError                a gradient is nan, in anomaly mode
    ├── ParallelError                   ranks that do not agree on the model, or calls of a wrapper in a wrong order
    │   ├── EarlyStop                   a rank ran out of data inside join(throw_on_early_termination=True)
    │   └── PeerError                   another rank failed in an operation that this rank waits for
    ├── GradcheckError (AssertionError) a backward disagrees with finite differences
    ├── CheckpointError                 a checkpoint that cannot be written or read, or differs from what was written
    ├── SerializationError (ValueError) a file that load cannot read
    ├── DataFileError (ValueError)      a file of samples that is not what its reader expects
    ├── SharingError                    shared memory that cannot be made, sent or opened
    ├── WorkerError                     a worker process of a DataLoader raised, died or took too long
    └── StateDictError (ValueError)     a state dict that does not fit the module or optimizer

A message says what was asked, what was expected and what was got.
"""

from __future__ import annotations

import functools
import os
import warnings


class DdpError(RuntimeError):
    """The base class of the errors that `ddp` defines."""


class ArgumentError(DdpError, ValueError):
    """A value that the call cannot take."""


class ShapeError(ArgumentError):
    """Shapes that do not fit each other, or the call."""


class DtypeError(DdpError, TypeError):
    """A dtype, or a type, that the call cannot take."""


class RangeError(DdpError, IndexError):
    """An index, a dimension or a class target out of range."""


class DeviceError(DdpError):
    """A device that is missing or cannot do what the call asks, or tensors on different devices."""


class CaptureError(DdpError):
    """An operation that cannot be part of a CUDA graph: the host would wait for the device, or do some of the work."""


class CudaError(DdpError):
    """An error that CUDA reports for work on a GPU. `status`: CUDA's error code; None if CuPy does not give one.

    Work runs after the call that launched it, so a later call may raise this. With CUDA_LAUNCH_BLOCKING=1, the op that
    failed raises it.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.status)


class OutOfMemoryError(DdpError, MemoryError):
    """A GPU's memory is full, or the limit of this process is reached. The message says what holds the memory.

    Raised after the pool has given back its free blocks, unless a CUDA graph is being captured.

    device: for example "cuda:0". In bytes: requested; allocated: held by arrays; reserved: held by the pool, for arrays
    and for later use; free, total: of the device; limit: of this process, or None
    """

    device = ""
    requested = allocated = reserved = free = total = 0
    limit: int | None = None


class GraphError(DdpError):
    """Backward cannot run on this graph."""


class GraphFreedError(GraphError):
    """A second backward over a graph that the first has freed."""


class VersionError(GraphError):
    """A value that backward reads was changed in place after forward saved it."""


class InplaceError(GraphError):
    """An in-place operation that autograd cannot follow."""


class AnomalyError(GraphError):
    """A gradient is nan, found in anomaly mode."""


class ParallelError(DdpError):
    """Ranks that do not agree on the model or the step, or calls of a wrapper in a wrong order."""


class EarlyStop(ParallelError):
    """A rank has run out of data inside `join(throw_on_early_termination=True)`."""


class PeerError(ParallelError):
    """Another rank failed in an operation that this rank waits for."""


class GradcheckError(DdpError, AssertionError):
    """A backward disagrees with finite differences."""


class SerializationError(DdpError, ValueError):
    """A file that is truncated, or not of the format that load reads."""


class SharingError(DdpError):
    """Shared memory that cannot be made, sent or opened, for example because its owner has freed it."""


class WorkerError(DdpError):
    """A worker process of a DataLoader raised an exception, died, took too long or could not be started.

    For an exception, the message has its traceback, and if possible the error is also an instance of the exception's
    class: `except FileNotFoundError` catches it.
    """


class DataFileError(DdpError, ValueError):
    """A file of samples that is truncated, too long, or not of its format; the message names the file."""


class CheckpointError(DdpError):
    """A checkpoint that cannot be written or read, or differs from what was written; or a Checkpointer that was closed.

    If one rank cannot write its part, all ranks raise this error.
    """


class StateDictError(DdpError, ValueError):
    """A state dict that does not fit the module or optimizer it is loaded into."""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this project, from the folder of its sources or from the package index."""
    sources = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.exists(os.path.join(sources, "setup.cfg")):
        return f"pip install -e '{sources}[{extra}]'"
    return f"pip install 'ddp-runtime[{extra}]'"


@functools.cache
def warn_once(message: str, stacklevel: int = 2, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the first call with these arguments. Later calls with the same arguments do nothing.

    stacklevel: as for a call of `warnings.warn` in the same place
    """
    warnings.warn(message, category, stacklevel=stacklevel + 1)
