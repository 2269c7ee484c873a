"""Tensors: each file has one family of methods, and the functions beside them; `core` puts the methods together."""

from ddp._tensor.core import Tensor

__all__ = ["Tensor"]
