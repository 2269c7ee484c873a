"""Normalisation of rows as functions: layer_norm, rms_norm, normalize."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import is_float
from ddp._tensor.reductions import axis, required_float
from ddp.errors import DtypeError, ShapeError
from ddp.ops import norm_rows

_EPSILON = {"float64": 2.0**-52}  # the step above 1; half types are normalised in float32


def affine_dtype(name: str, input: Tensor, *parameters: Tensor | None) -> None:
    """Raises: DtypeError unless `input` is floating, and weight and bias are of its dtype, or float32 beside a half."""
    dtype = input._array.dtype
    if not is_float(dtype):
        raise DtypeError(f"{name}: expected a floating input, got {dtype}")
    for each in parameters:
        if each is not None and each._array.dtype != dtype and (dtype.itemsize > 2 or each._array.dtype != "float32"):
            raise DtypeError(f"{name}: input is {dtype}, weight or bias {each.dtype}; they need one dtype")


def _trailing(name: str, input: Tensor, normalized_shape: Sequence[int], *parameters: Tensor | None) -> int:
    """How many axes are normalised. Raises: ShapeError, DtypeError."""
    shape, whole = tuple(normalized_shape), input._array.shape
    if not shape or len(whole) < len(shape) or whole[len(whole) - len(shape) :] != shape:
        raise ShapeError(f"{name}: input {input.shape} does not end in normalized_shape {shape}")
    for each in parameters:
        if each is not None and each._array.shape != shape:
            raise ShapeError(f"{name}: weight or bias {each.shape} for normalized_shape {shape}")
    affine_dtype(name, input, *parameters)
    return len(shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias, over the last axes. input: (..., *normalized_shape).

    weight, bias: of normalized_shape. The variance is the biased one. Raises: ShapeError, DtypeError.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    axes = _trailing("layer_norm", input, normalized_shape, weight, bias)
    return apply(norm_rows.layer_norm, (input, weight, bias), axes=axes, eps=eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """input / sqrt(mean of squares + eps) * weight, over the last axes. input: (..., *normalized_shape).

    weight: of normalized_shape; eps: None is the precision of the dtype that computes (float32 for half types).
    Raises: ShapeError, DtypeError. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    axes = _trailing("rms_norm", input, normalized_shape, weight)
    if eps is None:
        eps = _EPSILON.get(input.dtype.name, 2.0**-23)
    return apply(norm_rows.rms_norm, (input, weight), axes=axes, eps=eps)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """input / max(its p-norm along `dim`, eps). input: any shape with that dimension; p: a number, inf or -inf.

    Raises: RangeError, DtypeError.
    """
    at = axis(required_float(input, "normalize"), dim, "normalize")
    if not input.ndim:
        return normalize(input.reshape(1), p, 0, eps).reshape(())
    if not p > 0:  # the op's formula for the gradient is that of a norm
        return input / input.norm(p, at, keepdim=True).clamp_min(eps)
    return apply(norm_rows.normalize, (input,), p=float(p), dim=at, eps=eps)
