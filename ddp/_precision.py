"""The precision of float32 matrix products on a GPU, which the user sets and every product reads.

This module is separate from the CUDA code, because the precision can be set before a GPU is used, or without a GPU.
"""

from __future__ import annotations

from ddp.errors import ArgumentError

PRECISIONS = ("highest", "high", "medium")


class Precision:
    """Settings of matrix products on GPUs. They can be set without a GPU.

    tf32: whether float32 factors may be rounded to TF32, which has the range of float32 and 10 bits of mantissa
    """

    __slots__ = ("name", "tf32")

    def __init__(self) -> None:
        self.name = "highest"
        self.tf32 = False

    @property
    def allow_tf32(self) -> bool:
        """Whether factors of float32 may be rounded to TF32; off at first. See `set_float32_matmul_precision`."""
        return self.tf32

    @allow_tf32.setter
    def allow_tf32(self, value: bool) -> None:
        self.choose("high" if value else "highest")

    def choose(self, name: str) -> None:
        """Chooses one of PRECISIONS. Raises: ArgumentError for another name."""
        if name not in PRECISIONS:
            raise ArgumentError(f"set_float32_matmul_precision({name!r}): expected {', '.join(map(repr, PRECISIONS))}")
        self.name = name
        self.tf32 = name != "highest"


matmul = Precision()
