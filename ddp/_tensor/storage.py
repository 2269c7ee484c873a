"""The memory of tensors: `data`, copies, pickles, and moving it to where other processes can map it.

An array cannot be moved under its views. So the memory that a tensor lies in is copied whole, and every tensor over it
is put on the copy: its views, what it is a view of, `detach()` and `data`. Reference counts say whether there are any;
only then are they looked for among all objects, which takes milliseconds.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ddp._block import Block, is_shared
from ddp._device import CPU, device, place
from ddp._engine import Node, Version
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import is_float
from ddp._tensor.inplace import must_record, operand_array
from ddp._tensor.operands import REJECTED, Other, as_ddp_error
from ddp.errors import DtypeError, GraphError, ShapeError
from ddp.ops import elementwise

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


T = TypeVar("T", bound="Storage")


Array = np.ndarray[Any, Any]
_LINE = 64  # bytes: each piece of memory starts on a cache line of its block


class Storage(TensorBase):
    """Copies of a tensor and into it, other tensors over its memory, and sharing it with other processes."""

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

    def copy_(self: T, source: Other, non_blocking: bool = False) -> T:
        """The elements of `source`, broadcast and cast to this dtype.

        non_blocking: between a GPU and pinned memory of one shape and dtype the host does not wait; see `to`.
        """
        if isinstance(source, TensorBase) and source._device is not self._device:
            plain = not must_record(self, "copy_", source)
            if plain and "cpu" in (source._device.type, self._device.type) and self.array.flags.c_contiguous:
                from ddp._cuda import copies  # only where there is a GPU

                if copies.straight(self.array, source.array, non_blocking):
                    self.version.count += 1
                    return self
        value = operand_array(self, source, "copy_")
        if must_record(self, "copy_", source):
            cast(Any, self)[...] = source
            return self
        try:
            self.array[...] = value
        except REJECTED as error:
            raise as_ddp_error("copy_", error) from error
        self.version.count += 1
        return self

    def fill_(self: T, value: Any) -> T:
        """Every element becomes `value`, a number or a tensor of one element."""
        if isinstance(value, TensorBase) and value.array.size != 1:
            raise ShapeError(f"fill_: expected a number or a tensor of one element, got shape {value.array.shape}")
        if must_record(self, "fill_", value):
            cast(Any, self)[...] = value
            return self
        try:
            self.array.fill(value.array.item() if isinstance(value, TensorBase) else value)
        except REJECTED as error:
            raise as_ddp_error("fill_", error) from error
        self.version.count += 1
        return self

    def zero_(self: T) -> T:
        """Every element becomes 0."""
        return self.fill_(0)

    def __copy__(self: T) -> T:
        return _copy_as_leaf(self, self.array, "copying", self)

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        if id(self) in memo:
            return memo[id(self)]
        twin = memo[id(self)] = _copy_as_leaf(self, self.array.copy(order="K"), "copying")
        if hasattr(self, "__dict__"):
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.grad = self.grad
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        check_leaf(self, "pickling")
        arguments = (type(self), place(self.array, CPU), self._device, self.edge is not None)
        return _rebuild, arguments, getattr(self, "__dict__", None)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for hook in _class_hooks:
            hook(cls)

    def share_memory_(self: T) -> T:
        """Moves this tensor's memory to where other processes can map it, and returns it.

        Whatever shares the memory moves along: views, `detach()`, a module's other names for it. NumPy arrays taken
        from it before keep the old memory, and the gradient stays private. Nothing happens if it is there already, and
        on a GPU, whose memory can always be shared. Raises: SharingError if the system gives no memory.
        """
        move_to_shared_memory([self])
        return self

    def is_shared(self) -> bool:
        """Whether other processes can map this tensor's memory; always on a GPU."""
        return self._device is not CPU or is_shared(self.array)


def check_leaf(x: TensorBase, name: str) -> None:
    if isinstance(x.edge, Node):
        raise GraphError(f"{name} the result of an op: the graph cannot go along; use detach()")


def _copy_as_leaf(x: T, array: Any, name: str, like: TensorBase | None = None) -> T:
    """A leaf of the class of `x` around `array`. Raises: GraphError for the result of an op."""
    check_leaf(x, name)
    twin = as_subclass(type(x), wrap(array, x._device, like))
    if like is not None and hasattr(x, "__dict__"):
        twin.__dict__.update(x.__dict__)
    return twin.requires_grad_() if x.edge is not None else twin


def as_subclass(kind: type[T], plain: Any) -> T:
    """A tensor of the class `kind` in the place of a new one."""
    if kind is type(plain):
        return plain
    self = object.__new__(kind)
    for name in TensorBase.__slots__:
        if name != "__weakref__" and hasattr(plain, name):
            setattr(self, name, getattr(plain, name))
    return self


def _rebuild(kind: type[T], array: Any, where: device, requires_grad: bool) -> T:
    self = as_subclass(kind, wrap(place(array, where), where))
    return self.requires_grad_() if requires_grad else self


_class_hooks: list[Callable[[type], Any]] = []


def for_each_class(hook: Callable[[type], Any]) -> None:
    """Calls `hook` with each class of tensors, those to come included: pickles know classes one by one."""
    kinds: list[type] = [Storage]
    for kind in kinds:
        kinds += kind.__subclasses__()
        hook(kind)
    _class_hooks.append(hook)


def move_to_shared_memory(tensors: list[Any]) -> None:
    """Moves tensors that are not shared yet into one new block, with all that share their memory."""
    tensors = [x for x in tensors if x._device is CPU and not is_shared(x.array)]
    if not tensors:
        return
    alone = all(map(_is_only_reference, tensors))  # first: what follows holds references, too
    roots = {id(root): root for root in map(_root, (x.array for x in tensors))}
    found: Any = tensors
    if not alone:
        # Not isinstance: that asks objects for their __class__, and lazy ones do things when asked.
        found = [x for x in gc.get_objects() if issubclass(type(x), TensorBase) and _is_over(x, roots)]
        found += [x for x in tensors if not any(x is each for each in found)]  # such as gc.freeze has hidden
    places, nbytes = {}, 0
    for key, root in roots.items():
        low, high = _bounds(root)
        places[key] = (low, nbytes)
        nbytes += -(-(high - low) // _LINE) * _LINE
    block = Block.create(nbytes)
    memory = block.array(np.uint8, nbytes)
    for key, root in roots.items():
        _moved(root, memory, *places[key])[...] = root
    for x in found:
        array = x.array
        after = _moved(array, memory, *places[id(_root(array))])
        after.flags.writeable = array.flags.writeable
        x.array = after


def _root(array: Array) -> Array:
    """The array at the bottom of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_over(x: TensorBase, roots: dict[int, Array]) -> bool:
    array = getattr(x, "array", None)  # one that is just being made has none
    return isinstance(array, np.ndarray) and id(_root(array)) in roots


def _bounds(root: Array) -> tuple[int, int]:
    """The addresses of an array's first byte and of the one after its last."""
    start = root.__array_interface__["data"][0]
    if root.size == 0:
        return start, start
    reach = [(n - 1) * step for n, step in zip(root.shape, root.strides, strict=True)]
    return start + sum(each for each in reach if each < 0), start + sum(
        each for each in reach if each > 0
    ) + root.itemsize


def _moved(array: Array, memory: Array, low: int, offset: int) -> Array:
    """What `array` is of the memory that began at address `low` and now lies at byte `offset` of `memory`."""
    at = offset + array.__array_interface__["data"][0] - low if array.size else 0
    return np.ndarray(array.shape, array.dtype, memory, at, array.strides)


def _references(x: Any) -> tuple[int, ...]:
    """How many references there are to a tensor's array and to the memory below it."""
    array = x.array
    root = _root(array)
    return (array is root, sys.getrefcount(array), sys.getrefcount(root))


def _is_only_reference(x: Any) -> bool:
    """Whether no other tensor can be over the memory of `x`; False may be wrong."""
    return _references(x) in _PRIVATE


class _Sample:
    """The counts of an array that one object holds, of its own or as a view: they differ among Pythons."""

    def __init__(self, array: Array) -> None:
        self.array = array


_PRIVATE = {_references(_Sample(np.empty(2))), _references(_Sample(np.empty((2, 2)).reshape(4)))}
