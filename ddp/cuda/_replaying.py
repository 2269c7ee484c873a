"""A captured step as it is launched again: its inputs are filled, the graph runs, and the host notes what it did.

What the step's own code would have noted on the host (which gradients are there, and where) is put back to what it was
at the end of the capture, since that code does not run again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ddp import _device
from ddp._cuda import copies
from ddp._engine import Leaf
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda.graphs import CUDAGraph

_WITHIN = 3  # cudaMemcpyDeviceToDevice


class Slot:
    """A leaf's gradient at one moment, as far as the host knows it."""

    __slots__ = ("buffer", "full", "leaf", "withheld", "zeroed")

    def __init__(self, leaf: Leaf) -> None:
        slot = leaf.grad_buffer
        self.leaf, self.full, self.buffer = leaf, slot.full, slot.array
        self.withheld, self.zeroed = slot.withheld, slot.zeroed

    @classmethod
    def empty(cls, leaf: Leaf) -> Slot:
        """One that nothing was in before."""
        self = cls(leaf)
        self.full, self.withheld, self.zeroed = False, None, False
        return self

    def restore(self) -> None:
        """Makes the slot what it was."""
        slot = self.leaf.grad_buffer
        slot.full, slot.array, slot.withheld, slot.zeroed = self.full, self.buffer, self.withheld, self.zeroed
        slot.lent = False

    def matches(self) -> bool:
        """Whether a gradient is there as it was, in the same memory."""
        slot = self.leaf.grad_buffer
        # Of an empty one the memory is forgotten, unless buckets bound it: the graph brings its own.
        return slot.full == self.full and (slot.array is self.buffer or not (self.full or slot.bound))


class Recorded:
    """A captured step. start, end: the gradients before it and after it"""

    def __init__(
        self,
        xp: Any,
        made: CUDAGraph,
        state: Hashable,
        inputs: list[Any],
        outputs: Any,
        start: list[Slot],
        end: list[Slot],
    ) -> None:
        self.state = state
        self._xp, self._graph, self._inputs, self._outputs, self._start, self._end = (
            *(xp, made, inputs, outputs, start),
            end,
        )
        # Views of the inputs may be among the outputs, and whoever holds one shall see that it was written to.
        self._results: list[TensorBase] = []
        flatten_outputs(outputs, self._results)

    def fits(self) -> bool:
        """Whether gradients lie as they did, and what the captured code has fixed is as it was."""
        return all(map(Slot.matches, self._start)) and self._graph.told.fits()

    def replay(self, tensors: Sequence[TensorBase]) -> Any:
        """Runs the step on these numbers."""
        for static, x in zip(self._inputs, tensors, strict=True):
            if x is not static:
                _fill(self._xp, static.array, x)
                static.version.count += 1
        self._graph.replay()
        for each in self._end:
            each.restore()
        for x in self._results:
            x.version.count += 1
        return self._outputs


def flatten_outputs(value: Any, tensors: list[TensorBase]) -> None:
    """Puts the tensors of nested tuples, lists and dicts into `tensors`, in the order of `rebuilt`."""
    if isinstance(value, TensorBase):
        tensors.append(value)
    elif isinstance(value, tuple | list):
        for each in value:
            flatten_outputs(each, tensors)
    elif isinstance(value, dict):
        for each in value.values():
            flatten_outputs(each, tensors)


def detached(x: TensorBase) -> Any:
    return wrap(x.array, x.device)


def static(xp: Any, x: TensorBase) -> Any:
    """Memory for inputs like `x`; made outside of the graph's pool, so that no graph computes there."""
    array = xp.empty(x.array.shape, x.array.dtype)
    made = wrap(array, _device.device_of(array))
    return made.requires_grad_() if x.edge is not None else made


def _fill(xp: Any, target: Any, x: TensorBase) -> None:
    source = x.array
    if x.device.type == "cpu":
        if copies.is_pinned(xp, source) and source.flags.c_contiguous:
            copies.into(target, source)
        else:
            target.set(source)
    elif source.flags.c_contiguous and source.nbytes:
        stream = xp.cuda.get_current_stream()
        xp.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, _WITHIN, stream.ptr)
    else:
        target[...] = source
