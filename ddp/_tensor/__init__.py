"""Tensors. Most files have one family of methods and the functions of its topic; `core` puts the methods together."""

from ddp._tensor.core import Tensor

__all__ = ["Tensor"]
