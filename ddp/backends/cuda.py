"""`ddp.backends.cuda.matmul.allow_tf32`, as in PyTorch."""

from __future__ import annotations

from ddp._precision import matmul as _precision

__all__ = ["matmul"]


class _Matmul:
    """Switches of matrix products on GPUs; they may be turned where there is none."""

    __slots__ = ()

    @property
    def allow_tf32(self) -> bool:
        """Whether factors of float32 may be rounded to TF32; off at first. See `set_float32_matmul_precision`."""
        return _precision.tf32

    @allow_tf32.setter
    def allow_tf32(self, value: bool) -> None:
        _precision.choose("high" if value else "highest")


matmul = _Matmul()
