"""Tensors that become another view of themselves: no element is written, so that backward has nothing to notice."""

from __future__ import annotations

from typing import Any, TypeVar

from ddp._engine import modes
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.inplace import become
from ddp.errors import InplaceError, ShapeError

Self = TypeVar("Self", bound=TensorBase)


def _seen_as(x: Self, name: str, view: TensorBase) -> Self:
    """`x` in the shape of `view`, one of its own. Raises: InplaceError if a gradient of the old shape is to come."""
    if x.edge is not None and (x.is_leaf or not modes.state.enabled):
        raise InplaceError(
            f"{name}: a tensor of shape {x.array.shape} that requires grad cannot change shape in place, if it is a "
            "leaf or where no graph is recorded; use the out-of-place form"
        )
    x.check_replaceable()
    x.array, x.edge, x.maybe_leaf, x.grad_view = view.array, view.edge, None, None
    return x


class ReshapingInPlace(TensorBase):
    """Methods that end in an underscore change this tensor's own shape; other views of its memory keep theirs.

    Raises: InplaceError on a leaf that requires grad; and as the out-of-place forms.
    """

    __slots__ = ()

    def squeeze_(self: Self, dim: Any = None) -> Self:
        """squeeze() in place."""
        return _seen_as(self, "squeeze_", self.squeeze(dim))  # type: ignore[attr-defined]  # every tensor has the mixins

    def unsqueeze_(self: Self, dim: int) -> Self:
        """unsqueeze() in place."""
        return _seen_as(self, "unsqueeze_", self.unsqueeze(dim))  # type: ignore[attr-defined]  # as above

    def t_(self: Self) -> Self:
        """t() in place."""
        return _seen_as(self, "t_", self.t())  # type: ignore[attr-defined]  # as above

    def transpose_(self: Self, dim0: int, dim1: int) -> Self:
        """transpose() in place."""
        return _seen_as(self, "transpose_", self.transpose(dim0, dim1))  # type: ignore[attr-defined]  # as above

    swapaxes_ = swapdims_ = transpose_

    def tril_(self: Self, diagonal: int = 0) -> Self:
        """tril() in place: the elements above the diagonal become 0."""
        return become(self, "tril_", self.tril(diagonal))  # type: ignore[attr-defined,type-var]  # as above

    def triu_(self: Self, diagonal: int = 0) -> Self:
        """triu() in place: the elements below the diagonal become 0."""
        return become(self, "triu_", self.triu(diagonal))  # type: ignore[attr-defined,type-var]  # as above

    def fill_diagonal_(self: Self, fill_value: float) -> Self:
        """The diagonal of a matrix becomes `fill_value`. Raises: ShapeError for other dimensions."""
        if self.array.ndim != 2:
            raise ShapeError(f"fill_diagonal_: expected a matrix, got shape {self.array.shape}")
        diagonal = wrap(self._device.xp.eye(*self.array.shape, dtype=bool), self._device)
        return self.masked_fill_(diagonal, fill_value)  # type: ignore[attr-defined]  # as above
