"""The functions of layers, each defined in the file of its layer. They check shapes once, before they call an op."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING

from ddp._aliases import defined_in
from ddp._tensor.functions import sigmoid as sigmoid
from ddp._tensor.functions import tanh as tanh

if TYPE_CHECKING:
    from ddp.nn.activation import *
    from ddp.nn.attention import *
    from ddp.nn.convolution import *
    from ddp.nn.dropout import *
    from ddp.nn.embedding import *
    from ddp.nn.linear import *
    from ddp.nn.loss import *
    from ddp.nn.normalization import *
    from ddp.nn.padding import *
    from ddp.nn.pooling import *
    from ddp.nn.vision import *
else:
    FAMILIES = "activation attention convolution ctc dropout embedding linear loss normalization padding pooling vision"
    functions = defined_in("ddp.nn", FAMILIES, FunctionType)
    # Not offered here: running_stats_update is for other packages of the runtime, sdpa_kernel is in nn.attention.
    del functions["running_stats_update"], functions["sdpa_kernel"]
    globals().update(functions)
    __all__ = sorted([*functions, "sigmoid", "tanh"])
