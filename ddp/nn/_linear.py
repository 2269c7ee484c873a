"""The fully connected layer."""

from __future__ import annotations

import math
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp.errors import ArgumentError
from ddp.nn import functional, init
from ddp.nn._module import Module, Parameter


def reset_affine(weight: Tensor, bias: Tensor | None) -> None:
    """PyTorch's default for weights and biases of linear and convolution layers: uniform within 1/sqrt(fan in)."""
    if weight.numel():
        init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(init.fans(weight)[0], 1))
        init.uniform_(bias, -bound, bound)


class Identity(Module):
    """Its input. Takes any arguments and ignores them, so that it can stand where any layer stood."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Returns input."""
        return input


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


class Bilinear(Module):
    """input1^T @ weight[k] @ input2 + bias[k] for each k. input1: (..., in1_features); input2: (..., in2_features);
    weight: (out_features, in1_features, in2_features); bias: (out_features,).

    Raises: ShapeError, DtypeError when called with inputs that do not fit.
    """

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if in1_features <= 0:
            raise ArgumentError(f"Bilinear: in1_features is positive, not {in1_features}")
        self.in1_features = in1_features
        self.in2_features = in2_features
        self.out_features = out_features
        self.weight = Parameter(empty(out_features, in1_features, in2_features, device=device, dtype=dtype))
        self.register_parameter("bias", Parameter(empty(out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew, uniform within 1/sqrt(in1_features)."""
        bound = 1 / math.sqrt(self.in1_features)
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """input1: (..., in1_features), input2: (..., in2_features); returns (..., out_features)."""
        return functional.bilinear(input1, input2, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
