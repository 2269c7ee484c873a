"""Normalisation layers without running statistics: LayerNorm, RMSNorm, GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.creation import ones, zeros
from ddp.errors import ArgumentError
from ddp.nn import functional, init
from ddp.nn._module import Module, Parameter


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes of every sample, then weight and bias. input: (..., *normalized_shape).

    weight, bias: of normalized_shape. Raises: ShapeError, DtypeError when called; see functional.layer_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        affine_bias = elementwise_affine and bias
        like = {"device": device, "dtype": dtype}
        self.register_parameter(
            "weight", Parameter(ones(self.normalized_shape, **like)) if elementwise_affine else None
        )
        self.register_parameter("bias", Parameter(zeros(self.normalized_shape, **like)) if affine_bias else None)

    def reset_parameters(self) -> None:
        """Weights become 1, biases 0."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., *normalized_shape)."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}"
        )


class RMSNorm(Module):
    """Root mean square 1 over the last axes of every sample, then weight. input: (..., *normalized_shape).

    weight: of normalized_shape. Raises: ShapeError, DtypeError when called; see functional.rms_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        weight = Parameter(ones(self.normalized_shape, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def reset_parameters(self) -> None:
        """Weights become 1."""
        if self.weight is not None:
            init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., *normalized_shape)."""
        return functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(Module):
    """Mean 0 and variance 1 over groups of channels of every sample, then weight and bias. input: (N, C, ...).

    weight, bias: (num_channels,). Raises: ArgumentError unless num_groups divides num_channels; ShapeError, DtypeError
    when called; see functional.group_norm.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(f"GroupNorm: {num_groups} groups do not divide {num_channels} channels")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        like = {"device": device, "dtype": dtype}
        self.register_parameter("weight", Parameter(ones(num_channels, **like)) if affine else None)
        self.register_parameter("bias", Parameter(zeros(num_channels, **like)) if affine and bias else None)

    def reset_parameters(self) -> None:
        """Weights become 1, biases 0."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...)."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, "
            f"bias={self.bias is not None}"
        )
