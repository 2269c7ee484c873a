"""Choices between values as methods: extremes of two tensors, bounds (relu is one), numbers in place of nan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp._tensor.arithmetic import Other, beside, binary, broadcast, convert, jointly, required
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.dtypes import finfo, is_float, promote_scalar
from ddp.errors import ArgumentError, DtypeError
from ddp.ops import activation, elementwise

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Choosing(TensorBase):
    """Methods that choose one of several values, element by element."""

    __slots__ = ()

    def maximum(self, other: TensorBase) -> Tensor:
        """The larger of both, nan if one is; equal elements share the gradient."""
        return required(binary(elementwise.maximum, self, other), "maximum", other)

    def minimum(self, other: TensorBase) -> Tensor:
        """The smaller of both, nan if one is; equal elements share the gradient."""
        return required(binary(elementwise.minimum, self, other), "minimum", other)

    def fmax(self, other: TensorBase) -> Tensor:
        """The larger of both, of a number and nan the number."""
        return required(binary(elementwise.fmax, self, other), "fmax", other)

    def fmin(self, other: TensorBase) -> Tensor:
        """The smaller of both, of a number and nan the number."""
        return required(binary(elementwise.fmin, self, other), "fmin", other)

    def clamp(self, min: Other = None, max: Other = None) -> Tensor:
        """self held within [min, max], numbers or tensors; where min > max, it is max. Either may be left out.

        Raises: ArgumentError if both are; ShapeError if tensors do not broadcast.
        """
        if min is None and max is None:
            raise ArgumentError("clamp: expected min, max or both")
        if isinstance(min, TensorBase) or isinstance(max, TensorBase):
            bounds = [
                each if each is None or isinstance(each, TensorBase) else beside(each, self) for each in (min, max)
            ]
            found = iter(jointly("clamp", self, *[each for each in bounds if each is not None]))
            x = next(found)
            return apply(elementwise.clamp_between, (x, *[None if each is None else next(found) for each in bounds]))
        x = self
        for bound in (min, max):
            if bound is not None:
                x = convert(x, promote_scalar(x.array.dtype, bound))
        return apply(elementwise.clamp, (x,), low=min, high=max)

    clip = clamp

    def clamp_min(self, min: Other) -> Tensor:
        """self, at least `min`."""
        return self.clamp(min=min)

    def clamp_max(self, max: Other) -> Tensor:
        """self, at most `max`."""
        return self.clamp(max=max)

    def where(self, condition: TensorBase, other: Other) -> Tensor:
        """self where `condition` (bool) holds, else `other`."""
        return chosen(condition, self, other)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
        """Numbers in place of nan and infinities: by default 0, and the largest and smallest of the dtype."""
        if not is_float(self.array.dtype):
            return self.clone()  # type: ignore[attr-defined]  # every tensor has the mixins
        bounds = finfo(self.array.dtype)
        return apply(
            elementwise.nan_to_num,
            (self,),
            nan=nan,
            posinf=float(bounds.max) if posinf is None else posinf,
            neginf=float(bounds.min) if neginf is None else neginf,
        )

    def relu(self) -> Tensor:
        """max(self, 0). Raises: DtypeError for bool."""
        if self.array.dtype.kind == "b":
            raise DtypeError("relu: expected numbers, got bool")
        return apply(activation.relu, (self,))


def chosen(condition: TensorBase, input: Any, other: Any) -> Tensor:
    """`input` where `condition`, else `other`: tensors or numbers. Raises: DtypeError, ShapeError."""
    if condition.array.dtype.kind != "b":
        raise DtypeError(f"where: the condition is bool, not {condition.array.dtype}")
    values = [input, other]
    for i, each in enumerate(values):
        if not isinstance(each, TensorBase):
            values[i] = beside(each, values[1 - i] if isinstance(values[1 - i], TensorBase) else condition)
    pair = jointly("where", *values)
    for x in pair:
        broadcast(condition.array.shape, x.array.shape, "where")
    return apply(elementwise.where, (condition, *pair))
