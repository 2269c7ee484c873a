"""Fully connected layers as functions, with what follows them where one launch on a GPU does both."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional._activation import gelu, relu
from ddp.nn.functional._check import one_dtype
from ddp.ops import perceptron, products


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias. input: (..., n), weight: (m, n) or (n,), bias: (m,) or (); returns (..., m) or (...).

    Raises: ShapeError, DtypeError.
    """
    # The array's own attributes: this is called more often than anything else, and a property of ours is a call.
    x, w = input._array, weight._array
    b = None if bias is None else bias._array
    if (x.dtype != w.dtype or (b is not None and b.dtype != w.dtype)) and modes.state.autocast is None:
        one_dtype("linear", input, weight, bias)
    shape = w.shape
    if len(shape) != 2:
        return _vector(input, weight, bias)
    if not x.ndim or x.shape[-1] != shape[1]:
        raise ShapeError(f"linear: input {x.shape} and weight {shape}: expected (..., n) and (m, n)")
    if b is not None and b.shape != shape[:1]:
        raise ShapeError(f"linear: bias {b.shape} for weight {shape}: expected {shape[:1]}")
    return apply(products.linear, (input, weight, bias))


def _vector(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.ndim != 1 or not input.ndim or input.shape[-1] != weight.shape[0] or (bias is not None and bias.ndim):
        raise ShapeError(
            f"linear: input {input.shape} and weight {weight.shape}: expected (..., n) and (m, n), or (n,) and bias ()"
        )
    out = input @ weight
    return out if bias is None else out + bias


def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "relu",
    approximate: str = "none",
) -> Tensor:
    """activation(linear(input, weight, bias)), on a GPU in one launch; shapes as `linear` has them.

    activation: "relu" or "gelu"; approximate: gelu's. cuBLASLt has gelu by tanh only, so that the exact one stays a
    launch of its own. Raises: ArgumentError for another activation; ShapeError, DtypeError.
    """
    kind = _activation("linear_act", activation, approximate)
    if not _fuses(kind, weight):
        return _separate(linear(input, weight, bias), kind)
    _check("linear_act", input, weight, bias)
    keep = _kept(input, weight, bias)
    return apply(perceptron.linear_act, (input, weight, bias), activation=kind, keep=keep)


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

    On a GPU the activation, its slope and the gradients of the biases ride along with the products. activation,
    approximate: as for `linear_act`. Raises: ArgumentError for another activation; ShapeError, DtypeError.
    """
    kind = _activation("feed_forward", activation, approximate)
    if not _fuses(kind, weight1) or weight2.ndim != 2:
        return linear(_separate(linear(input, weight1, bias1), kind), weight2, bias2)
    _check("feed_forward", input, weight1, bias1)
    if weight2.shape[1] != weight1.shape[0] or (bias2 is not None and bias2.shape != weight2.shape[:1]):
        raise ShapeError(
            f"feed_forward: weights {weight1.shape} and {weight2.shape}, second bias "
            f"{None if bias2 is None else bias2.shape}: expected (m, n), (k, m) and (k,)"
        )
    if modes.state.autocast is None:
        one_dtype("feed_forward", input, weight2, bias2)
    tensors = input, weight1, bias1, weight2, bias2
    return apply(perceptron.feed_forward, tensors, activation=kind, keep=_kept(*tensors))


def _activation(name: str, activation: str, approximate: str) -> str:
    """The activation in one word."""
    if activation not in ("relu", "gelu") or approximate not in ("none", "tanh"):
        raise ArgumentError(
            f"{name}: activation is 'relu' or 'gelu' and approximate 'none' or 'tanh', not {activation!r} and "
            f"{approximate!r}"
        )
    return activation if activation == "relu" or approximate == "none" else "gelu_tanh"


def _separate(x: Tensor, kind: str) -> Tensor:
    return relu(x) if kind == "relu" else gelu(x, "tanh" if kind == "gelu_tanh" else "none")


def _fuses(kind: str, weight: Tensor) -> bool:
    array = weight._array
    return (
        kind in perceptron.ACTIVATIONS and weight._device.xp is not np and array.ndim == 2 and array.dtype.kind in "fV"
    )


def _check(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if modes.state.autocast is None:
        one_dtype(name, input, weight, bias)
    if not input.ndim or input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ShapeError(
            f"{name}: input {input.shape}, weight {weight.shape} and bias {None if bias is None else bias.shape}: "
            "expected (..., n), (m, n) and (m,)"
        )


def _kept(*tensors: Any) -> bool:
    """Whether a backward will come."""
    return modes.state.enabled and any(each is not None and each._edge is not None for each in tensors)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input1^T @ weight[k] @ input2 + bias[k] for each k. input1: (..., n1), input2: (..., n2), weight: (m, n1, n2),
    bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    one_dtype("bilinear", input1, input2, weight, bias)
    lead = input1.shape[:-1]
    if (
        weight.ndim != 3
        or not input1.ndim
        or not input2.ndim
        or input2.shape[:-1] != lead
        or (input1.shape[-1], input2.shape[-1]) != weight.shape[1:]
    ):
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
