"""Forward and backward of every operation, on arrays alone: one family a file, the formula above each pair."""

from ddp.ops import conv, elementwise, index, loss, pool, products, reduce, shape
from ddp.ops._op import OPS, Op

__all__ = ["OPS", "Op", "conv", "elementwise", "index", "loss", "pool", "products", "reduce", "shape"]
