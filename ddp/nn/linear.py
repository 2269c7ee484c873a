"""Fully connected layers, which a GPU can fuse with their activation, and layers that only reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.functions import flatten
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init
from ddp.nn.activation import gelu, relu
from ddp.nn.module import FunctionModule, Layer, Module
from ddp.nn.validation import one_dtype
from ddp.ops import products


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias. input: (..., n), weight: (m, n), bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    # Reads the attributes of the array: this is called very often, and a property of the tensor costs a call.
    x = input.array
    w = weight.array
    b = None if bias is None else bias.array
    if (x.dtype != w.dtype or (b is not None and b.dtype != w.dtype)) and modes.state.autocast is None:
        one_dtype("linear", input, weight, bias)
    shape = w.shape
    if len(shape) != 2 or not x.ndim or x.shape[-1] != shape[1]:
        raise ShapeError(f"linear: input {x.shape} and weight {shape}: expected (..., n) and (m, n)")
    if b is not None and b.shape != shape[:1]:
        raise ShapeError(f"linear: bias {b.shape} for weight {shape}: expected {shape[:1]}")
    return apply(products.linear, (input, weight, bias))


def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "relu",
    approximate: str = "none",
) -> Tensor:
    """activation(linear(input, weight, bias)). Shapes: as in `linear`.

    activation: "relu" or "gelu"; approximate: as in `gelu`. On a GPU, it takes one launch if cuBLASLt supports the
    activation (not the exact gelu), the dtype and the layout. Raises: ArgumentError for another activation; ShapeError,
    DtypeError.
    """
    act = _parse_activation("linear_act", activation, approximate)
    if not _is_fusable(act, weight):
        return _activate(linear(input, weight, bias), act)
    _check_shapes("linear_act", input, weight, bias)
    keep = _needs_grad(input, weight, bias)
    return apply(products.linear_act, (input, weight, bias), activation=act, keep=keep)


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "relu",
    approximate: str = "none",
) -> Tensor:
    """linear(activation(linear(input, weight1, bias1)), weight2, bias2). input: (..., n), weight1: (m, n), weight2:
    (k, m); returns (..., k).

    On a GPU, the launches of the products also compute the activation, its derivative and the gradients of the biases,
    under the conditions of `linear_act`. activation, approximate: as in `linear_act`.

    Raises: ArgumentError for another activation; ShapeError, DtypeError.
    """
    act = _parse_activation("feed_forward", activation, approximate)
    if not _is_fusable(act, weight1) or weight2.ndim != 2:
        return linear(_activate(linear(input, weight1, bias1), act), weight2, bias2)
    _check_shapes("feed_forward", input, weight1, bias1)
    if weight2.shape[1] != weight1.shape[0] or (bias2 is not None and bias2.shape != weight2.shape[:1]):
        raise ShapeError(
            f"feed_forward: weights {weight1.shape} and {weight2.shape}, second bias "
            f"{None if bias2 is None else bias2.shape}: expected (m, n), (k, m) and (k,)"
        )
    one_dtype("feed_forward", input, weight2, bias2)
    tensors = input, weight1, bias1, weight2, bias2
    return apply(products.feed_forward, tensors, activation=act, keep=_needs_grad(*tensors))


def _parse_activation(name: str, activation: str, approximate: str) -> str:
    """Returns the op's name of the activation: "relu", "gelu" or "gelu_tanh". Raises: ArgumentError."""
    if activation not in ("relu", "gelu") or approximate not in ("none", "tanh"):
        raise ArgumentError(
            f"{name}: activation is 'relu' or 'gelu' and approximate 'none' or 'tanh', not {activation!r} and "
            f"{approximate!r}"
        )
    return activation if activation == "relu" or approximate == "none" else "gelu_tanh"


def _activate(x: Tensor, act: str) -> Tensor:
    if act == "relu":
        return relu(x)
    return gelu(x, "tanh" if act == "gelu_tanh" else "none")


def _is_fusable(act: str, weight: Tensor) -> bool:
    array = weight.array
    return act in products.ACTIVATIONS and weight.device.type == "cuda" and array.ndim == 2 and array.dtype.kind in "fV"


def _check_shapes(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    one_dtype(name, input, weight, bias)
    if not input.ndim or input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ShapeError(
            f"{name}: input {input.shape}, weight {weight.shape} and bias {None if bias is None else bias.shape}: "
            "expected (..., n), (m, n) and (m,)"
        )


def _needs_grad(*tensors: Any) -> bool:
    """Whether backward may compute a gradient of one of the tensors."""
    return modes.state.enabled and any(tensor is not None and tensor.edge is not None for tensor in tensors)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input1^T @ weight[k] @ input2 + bias[k] for each k. input1: (..., n1), input2: (..., n2), weight: (m, n1, n2),
    bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    one_dtype("bilinear", input1, input2, weight, bias)
    lead = input1.shape[:-1]
    if weight.ndim != 3 or (*input1.shape, *input2.shape) != (*lead, weight.shape[1], *lead, weight.shape[2]):
        raise ShapeError(
            f"bilinear: inputs {input1.shape} and {input2.shape}, weight {weight.shape}: expected (..., n1), (..., n2) "
            "and (m, n1, n2)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bilinear: bias {bias.shape} for weight {weight.shape}: expected {weight.shape[:1]}")
    m, n1, n2 = weight.shape
    mixed = (input1 @ weight.permute(1, 0, 2).reshape(n1, m * n2)).reshape(*lead, m, n2)
    out = (mixed @ input2.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


class Identity(Module):
    """Returns its input. The constructor ignores its arguments, so that Identity can replace any layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Returns input."""
        return input


class Linear(Layer, shown="in_features= out_features= bias="):
    """input @ weight.T + bias. input: (..., in_features); weight: (out_features, in_features); bias: (out_features,).

    Raises: ShapeError, DtypeError when called with an input that does not fit.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        widths = (out_features, in_features)
        self._register_empty(device, dtype, weight=widths, bias=widths[:1] if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights and biases."""
        init.reset_affine(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features); returns (..., out_features)."""
        return linear(input, self.weight, self.bias)


class Bilinear(Layer, shown="in1_features= in2_features= out_features= bias="):
    """input1^T @ weight[k] @ input2 + bias[k] for each k. input1: (..., in1_features); input2: (..., in2_features);
    weight: (out_features, in1_features, in2_features); bias: (out_features,).

    Raises: ArgumentError unless in1_features is positive; ShapeError, DtypeError when called with inputs that do not
    fit.
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
        widths = (out_features, in1_features, in2_features)
        self._register_empty(device, dtype, weight=widths, bias=widths[:1] if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights and biases uniformly from [-b, b], b = 1/sqrt(in1_features)."""
        bound = 1 / math.sqrt(self.in1_features)
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """input1: (..., in1_features), input2: (..., in2_features); returns (..., out_features)."""
        return bilinear(input1, input2, self.weight, self.bias)


class Flatten(FunctionModule, function=flatten):
    """Joins dimensions start_dim to end_dim (inclusive) into one: (N, C, H, W) becomes (N, C*H*W)."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self._init(start_dim=start_dim, end_dim=end_dim)


class Unflatten(Layer, shown="dim= unflattened_size="):
    """Splits dimension `dim` into several: with (C, H, W), (N, C*H*W) becomes (N, C, H, W). One size may be -1.

    Raises: ShapeError when called, if the size of `dim` is not the product of unflattened_size; RangeError if there is
    no dimension `dim`.
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim = dim
        self.unflattened_size = tuple(unflattened_size)

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape with a dimension `dim`."""
        return input.unflatten(self.dim, self.unflattened_size)
