"""Settings of the libraries that ops compute with, under PyTorch's names."""

from ddp._precision import matmul
from ddp.backends import cuda, cudnn, mps, native

__all__ = ["cuda", "cudnn", "get_float32_matmul_precision", "mps", "native", "set_float32_matmul_precision"]


def set_float32_matmul_precision(precision: str) -> None:
    """Sets how exact matrix products of float32 on a GPU are, from now on and in all threads.

    "highest", the default: float32. "high": factors may be rounded to TF32, which has a mantissa of 10 bits; sums are
    still float32. Tensor cores multiply TF32 several times as fast. "medium": the same as "high". Products on the
    CPU are always float32. Convolutions by cuDNN follow `ddp.backends.cudnn.allow_tf32` instead. Raises: ArgumentError
    for anything else.
    """
    matmul.choose(precision)


def get_float32_matmul_precision() -> str:
    """The precision that was set last.

    `ddp.backends.cuda.matmul.allow_tf32 = True` sets "high", and False sets "highest".
    """
    return matmul.name
