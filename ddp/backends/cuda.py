"""`ddp.backends.cuda.matmul.allow_tf32`, as in PyTorch."""

from ddp._precision import matmul as matmul

__all__ = ["matmul"]
