"""Forward and backward of every operation, on arrays alone: one family a file, the formula above each pair."""

from ddp.ops import (
    activation,
    attention,
    convolution,
    elementwise,
    gradients,
    indexing,
    losses,
    normalization,
    pooling,
    products,
    recurrent,
    reduction,
    shape,
    softmax_ops,
    special,
)
from ddp.ops.op import OPS, Op

__all__ = [
    "OPS",
    "Op",
    "activation",
    "attention",
    "convolution",
    "elementwise",
    "gradients",
    "indexing",
    "losses",
    "normalization",
    "pooling",
    "products",
    "recurrent",
    "reduction",
    "shape",
    "softmax_ops",
    "special",
]
