"""The fully connected layer."""

from __future__ import annotations

import math
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp.nn import functional, init
from ddp.nn._module import Module, Parameter


def reset_affine(weight: Tensor, bias: Tensor | None) -> None:
    """PyTorch's default for weights and biases of linear and convolution layers: uniform within 1/sqrt(fan in)."""
    if weight.numel():
        init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(init.fans(weight)[0], 1))
        init.uniform_(bias, -bound, bound)


class Linear(Module):
    """input @ weight.T + bias. input: (..., in_features); weight: (out_features, in_features); bias: (out_features,).

    Raises: ShapeError, DtypeError when called with an input that does not fit.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", Parameter(empty(out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew."""
        reset_affine(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features); returns (..., out_features)."""
        return functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
