"""Switches of the libraries that compute, by PyTorch's names."""

from ddp.backends import cuda, cudnn, mps
from ddp.backends._float32 import get_float32_matmul_precision, set_float32_matmul_precision

__all__ = ["cuda", "cudnn", "get_float32_matmul_precision", "mps", "set_float32_matmul_precision"]
