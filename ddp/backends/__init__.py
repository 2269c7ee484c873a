"""Switches of the libraries that compute, by PyTorch's names."""

from ddp._precision import matmul
from ddp.backends import cuda, cudnn, mps, native

__all__ = ["cuda", "cudnn", "get_float32_matmul_precision", "mps", "native", "set_float32_matmul_precision"]


def set_float32_matmul_precision(precision: str) -> None:
    """How exact products of float32 on a GPU are, from now on and in all threads.

    "highest", as at first: float32. "high": factors may be rounded to TF32, whose mantissa has 10 bits, which tensor
    cores multiply several times as fast; sums stay float32. "medium": the same here. A CPU computes in float32 always.
    Raises: ArgumentError for anything else.
    """
    matmul.choose(precision)


def get_float32_matmul_precision() -> str:
    """What `set_float32_matmul_precision` chose last, or "high" or "highest" as `allow_tf32` was set."""
    return matmul.name
