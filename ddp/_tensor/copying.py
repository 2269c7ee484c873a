"""The same values once more: `data`, copies, and pickles between processes of one job."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from ddp._device import CPU, device, place
from ddp._engine import Node, Version
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import is_float
from ddp.errors import DtypeError, GraphError, ShapeError
from ddp.ops import elementwise

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

T = TypeVar("T", bound="Copying")


class Copying(TensorBase):
    """Copies of a tensor, and other tensors over its memory."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The same memory outside the graph, with a version of its own: backward does not notice writes through it.

        Assigning a tensor makes this one share that one's memory from now on; a leaf may change shape, dtype and device
        by it. Raises: GraphError if a wrapped parameter would; ShapeError for a tensor unlike the result of an op that
        it replaces, or of another shape than the gradient that is there; DtypeError for integers where requires_grad.
        """
        return wrap(self.array, self._device)

    @data.setter
    def data(self, value: TensorBase) -> None:
        if not isinstance(value, TensorBase):
            raise DtypeError(f"data: expected a Tensor, got {type(value).__name__}")
        new, old = value.array, self.array
        if self.edge is not None and not is_float(new.dtype):
            raise DtypeError(f"data: a tensor that requires grad cannot become {new.dtype}")
        alike = new.shape == old.shape and new.dtype == old.dtype and value._device is self._device
        if isinstance(self.edge, Node) and not alike:
            raise ShapeError(
                f"data: {old.dtype} {old.shape} on {self._device} is the result of an op, and cannot become "
                f"{new.dtype} {new.shape} on {value._device}"
            )
        if new.shape != old.shape and self.maybe_leaf is not None and self.maybe_leaf.grad_buffer.full:
            raise ShapeError(f"data: shape {old.shape} cannot become {new.shape} with grad there; set that to None")
        if alike:  # the leaf, and the graph that leads to it, stay
            self.array, self.version, self._epoch = new, Version(), 0
        else:
            self.replace_storage(new, value._device)

    def clone(self) -> Tensor:
        """A copy that gradients pass through."""
        return apply(elementwise.clone, (self,))

    def detach_(self: T) -> T:
        """Takes this tensor out of the graph: it becomes a leaf that does not require grad."""
        self.edge = None
        return self

    def __copy__(self: T) -> T:
        return _twin(self, self.array, "copying", self)

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        if id(self) in memo:
            return memo[id(self)]
        twin = memo[id(self)] = _twin(self, self.array.copy(order="K"), "copying")
        if hasattr(self, "__dict__"):
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.grad = self.grad
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        _check_leaf(self, "pickling")
        arguments = (type(self), place(self.array, CPU), self._device, self.edge is not None)
        return _rebuild, arguments, getattr(self, "__dict__", None)


def _check_leaf(x: TensorBase, name: str) -> None:
    if isinstance(x.edge, Node):
        raise GraphError(f"{name} the result of an op: the graph cannot go along; use detach()")


def _twin(x: T, array: Any, name: str, like: TensorBase | None = None) -> T:
    """A leaf of the class of `x` around `array`. Raises: GraphError for the result of an op."""
    _check_leaf(x, name)
    twin = _of_class(type(x), wrap(array, x._device, like))
    if like is not None and hasattr(x, "__dict__"):
        twin.__dict__.update(x.__dict__)
    return twin.requires_grad_() if x.edge is not None else twin


def _of_class(kind: type[T], plain: Any) -> T:
    """A tensor of the class `kind` in the place of a new one."""
    if kind is type(plain):
        return plain
    self = object.__new__(kind)
    for name in TensorBase.__slots__:
        if name != "__weakref__" and hasattr(plain, name):
            setattr(self, name, getattr(plain, name))
    return self


def _rebuild(kind: type[T], array: Any, where: device, requires_grad: bool) -> T:
    self = _of_class(kind, wrap(place(array, where), where))
    return self.requires_grad_() if requires_grad else self
