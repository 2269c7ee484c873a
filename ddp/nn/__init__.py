"""Layers, under PyTorch's names. Each family of layers has a file, which also holds its functions."""

from typing import TYPE_CHECKING

from ddp import _aliases
from ddp.nn import functional as functional
from ddp.nn import init as init
from ddp.nn import parameter as parameter
from ddp.nn import utils as utils
from ddp.nn.module import Module as Module
from ddp.nn.parameter import Buffer as Buffer
from ddp.nn.parameter import Parameter as Parameter

if TYPE_CHECKING:
    from ddp.nn.containers import *
    from ddp.nn.functional import *
    from ddp.nn.recurrent import *
    from ddp.nn.transformer import *
else:
    _layers = _aliases.defined_in("ddp.nn", f"{functional.FAMILIES} containers recurrent transformer", type)
    # Not layers for users: a base class, a name that is only printed, and an enum that PyTorch has in nn.attention.
    del _layers["BatchNorm"], _layers["NonDynamicallyQuantizableLinear"], _layers["SDPBackend"]
    globals().update(_layers)
    __all__ = sorted([*_layers, "Buffer", "Module", "Parameter", "functional", "init", "parameter", "utils"])

__getattr__ = _aliases.attribute(__name__)
