"""Tensors in memory that processes share: `share_memory_` moves what is there, and all that look at it follow.

An array cannot be moved under its views. So the memory that a tensor lies in is copied whole, and every tensor over it
is put on the copy: its views, what it is a view of, `detach()` and `data`. Whether there are any is told by reference
counts; only then are they looked for among all objects, which takes milliseconds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ddp._block import Block, is_shared
from ddp._device import CPU
from ddp._tensor.base import TensorBase

Array = np.ndarray[Any, Any]
T = TypeVar("T", bound="Sharing")
_LINE = 64  # bytes: each piece of memory starts on a cache line of its block


class Sharing(TensorBase):
    """Moving a tensor's memory to where other processes can map it."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for told in _told:
            told(cls)

    def share_memory_(self: T) -> T:
        """Moves this tensor's memory to where other processes can map it, and returns it.

        Whatever shares the memory moves along: views, `detach()`, a module's other names for it. NumPy arrays taken
        from it before keep the old memory, and the gradient stays private. Nothing happens if it is there already, and
        on a GPU, whose memory can always be shared. Raises: SharingError if the system gives no memory.
        """
        move([self])
        return self

    def is_shared(self) -> bool:
        """Whether other processes can map this tensor's memory; always on a GPU."""
        return self._device is not CPU or is_shared(self.array)


_told: list[Callable[[type], Any]] = []


def for_each_class(tell: Callable[[type], Any]) -> None:
    """Calls `tell` with each class of tensors, those to come included: pickles know classes one by one."""
    kinds: list[type] = [Sharing]
    for kind in kinds:
        kinds += kind.__subclasses__()
        tell(kind)
    _told.append(tell)


def move(tensors: list[Any]) -> None:
    """Moves tensors that are not shared yet into one new block, with all that share their memory."""
    tensors = [x for x in tensors if x._device is CPU and not is_shared(x.array)]
    if not tensors:
        return
    alone = all(map(_alone, tensors))  # first: what follows holds references, too
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


def _alone(x: Any) -> bool:
    """Whether no other tensor can be over the memory of `x`; False may be wrong."""
    return _references(x) in _PRIVATE


class _Sample:
    """The counts of an array that one object holds, of its own or as a view: they differ among Pythons."""

    def __init__(self, array: Array) -> None:
        self.array = array


_PRIVATE = {_references(_Sample(np.empty(2))), _references(_Sample(np.empty((2, 2)).reshape(4)))}
