"""What can go wrong in tensors, autograd, layers and optimizers, as one tree:

    DdpError (RuntimeError)
    ├── ArgumentError (ValueError)      a value that the call cannot take
    │   └── ShapeError                  shapes that do not fit each other, or the call
    ├── DtypeError (TypeError)          a dtype, or a type, that the call cannot take
    ├── RangeError (IndexError)         an index, a dimension or a class target out of range
    ├── DeviceError                     a device that is not there, or tensors on different devices
    ├── GraphError                      backward cannot run on this graph
    │   ├── GraphFreedError             a second backward over a graph that the first has freed
    │   ├── VersionError                a value that backward reads was changed in place
    │   ├── InplaceError                an in-place operation that autograd cannot follow
    │   └── AnomalyError                a gradient is nan, in anomaly mode
    ├── ParallelError                   ranks that do not agree on the model, or a wrapper used against its order
    │   └── EarlyStop                   a rank ran out of data inside join, and to hear of it was asked for
    ├── GradcheckError (AssertionError) a backward disagrees with finite differences
    ├── SerializationError (ValueError) a file that is not what load can read
    └── StateDictError (ValueError)     a state dict that does not fit the module or optimizer

A message says what was asked, what was expected and what was got.
"""

from __future__ import annotations


class DdpError(RuntimeError):
    """The root: anything that `ddp` raises on purpose."""


class ArgumentError(DdpError, ValueError):
    """A value that the call cannot take."""


class ShapeError(ArgumentError):
    """Shapes that do not fit each other, or the call."""


class DtypeError(DdpError, TypeError):
    """A dtype, or a type, that the call cannot take."""


class RangeError(DdpError, IndexError):
    """An index, a dimension or a class target out of range."""


class DeviceError(DdpError):
    """A device that is not there, or tensors on different devices."""


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
    """Ranks that do not agree on the model or the step, or a wrapper used against its order."""


class EarlyStop(ParallelError):
    """A rank has run out of data, and `join(throw_on_early_termination=True)` asked to hear of it."""


class GradcheckError(DdpError, AssertionError):
    """A backward disagrees with finite differences."""


class SerializationError(DdpError, ValueError):
    """A file that is truncated, or not of the format that load reads."""


class StateDictError(DdpError, ValueError):
    """A state dict that does not fit the module or optimizer it is loaded into."""
