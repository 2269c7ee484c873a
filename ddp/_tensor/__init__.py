"""Tensors: one family of methods a file, put together in `core`; the public functions beside them."""

from ddp._tensor.core import Tensor

__all__ = ["Tensor"]
