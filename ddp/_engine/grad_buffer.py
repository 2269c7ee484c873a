"""The ends of the graph: leaves, the buffers of their gradients, and the hooks for gradients that are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any, Protocol, final

Array = Any  # numpy.ndarray or cupy.ndarray


class AccumulateInto:
    """Asks an op to add the gradient that it computes to the one in `array`."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


class GradState(Enum):
    """What a gradient buffer holds."""

    EMPTY = auto()
    FULL = auto()  # a gradient
    ZEROED = auto()  # the zeros of zero_grad(set_to_none=False)


class GradMemory(Enum):
    """Whose memory a gradient buffer uses."""

    OWN = auto()  # the buffer's own, which later steps use again
    LENT = auto()  # the buffer's own, but a caller may hold a tensor over it: dropped when the buffer is emptied
    BOUND = auto()  # the memory that was given to `bind`
    GRAPH = auto()  # the array that was given to `replace`: a graph may have saved it, so nothing is added to it


EMPTY, FULL, ZEROED = GradState
OWN, LENT, BOUND, GRAPH = GradMemory


class GradBuffer:
    """The memory of a leaf's gradient, and whether there is a gradient in it."""

    __slots__ = ("accumulating", "array", "dtype", "memory", "read_error", "shape", "state", "xp")

    def __init__(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.xp = xp
        self.array: Array | None = None  # None while the buffer holds no memory
        self.state = EMPTY
        self.memory = OWN
        self.accumulating = False  # `grad_out` asked an op to add to the gradient
        self.read_error: str | None = None  # why reading `grad` raises: this rank has only a part of the gradient

    @property
    def full(self) -> bool:
        """Whether there is a gradient, or the zeros that zero_grad wrote."""
        return self.state is not EMPTY

    def accumulate(self, g: Array) -> None:
        """Adds `g` (the leaf's shape) to the gradient: in place, except in GRAPH memory. An empty buffer copies `g`."""
        if g is self.array:  # an op has computed `g` in this memory: see `grad_out`
            assert self.state is EMPTY or self.accumulating
            self.accumulating = False
        elif self.state is EMPTY:
            self.set(g)
            return
        else:
            assert g.shape == self.shape, f"gradient of shape {g.shape} for a leaf of shape {self.shape}"
            if self.memory is GRAPH:
                self.array = self.xp.array(self.array)
                self.memory = OWN
            self.xp.add(self.array, g, out=self.array, casting="same_kind")
        self.state = FULL
        self.read_error = None

    def grad_out(self, accumulate: bool = False) -> Array | AccumulateInto | None:
        """Returns the array in which an op may compute the next gradient, so that accumulating it copies nothing.

        If the buffer holds a gradient already, returns None. With `accumulate`, returns an `AccumulateInto` instead,
        unless a graph may have saved the array.
        """
        if self.state is not EMPTY:
            self.accumulating = accumulate and self.memory is not GRAPH
            return AccumulateInto(self.array) if self.accumulating else None
        if self.array is None:
            self.array = self.xp.empty(self.shape, self.dtype)
        return self.array

    def set(self, array: Array) -> None:
        """Copies `array` (the leaf's shape) into the buffer, cast to the leaf's dtype; keeps no reference to it."""
        assert array.shape == self.shape, f"gradient of shape {array.shape} for a leaf of shape {self.shape}"
        if self.array is None or self.memory is GRAPH:
            self.array = self.xp.empty(self.shape, self.dtype)
            self.memory = OWN
        self.array[...] = array
        self.state = FULL
        self.read_error = None

    def replace(self, array: Array) -> None:
        """Uses `array` (a gradient with a graph) instead of any other memory. The next gradient is added to a copy."""
        self.array = array
        self.memory = GRAPH
        self.state = FULL
        self.read_error = None

    def lend(self) -> None:
        """Notes that a caller has a tensor over the buffer's own memory, so that `clear` drops that memory."""
        if self.memory is OWN:
            self.memory = LENT

    def take_back(self) -> None:
        """Undoes `lend`: `clear` then keeps the memory for later steps, even if a caller holds a tensor over it."""
        if self.memory is LENT:
            self.memory = OWN

    def clear(self) -> None:
        """Empties the buffer. Drops memory that is LENT or GRAPH; keeps other memory for the next gradient."""
        self.state = EMPTY
        if self.memory is LENT or self.memory is GRAPH:
            self.array = None
            self.memory = OWN

    def bind(self, buffer: Array) -> None:
        """Keeps the gradient in `buffer` (the leaf's shape and dtype) from now on. An existing gradient is copied."""
        assert buffer.shape == self.shape, f"buffer of shape {buffer.shape} for a leaf of shape {self.shape}"
        assert buffer.dtype == self.dtype, f"buffer of {buffer.dtype} for a leaf of {self.dtype}"
        if self.state is not EMPTY:
            buffer[...] = self.array
        self.array = buffer
        self.memory = BOUND

    def unbind(self) -> None:
        """Undoes `bind`: the gradient is in the buffer's own memory from now on. Copies an existing gradient there."""
        if self.memory is BOUND:
            assert self.array is not None
            self.array = None if self.state is EMPTY else self.array.copy()
            self.memory = OWN


class GradReadyHook(Protocol):
    """Methods that backward calls: before it runs, when the gradient of a leaf is complete, and at the end.

    order: hooks with lower numbers begin and end before those with higher ones
    """

    order: int

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """Called before the first node runs. leaves: all that have this hook and that this backward will reach"""

    def ready(self, leaf: Leaf) -> None:
        """Called when the leaf's gradient is complete and in its buffer, or when all uses of the leaf gave None."""

    def end(self) -> None:
        """Called after the last node, still inside backward."""

    def abandon(self, error: BaseException) -> None:
        """Called if backward raises, after begin() was called and before end() has returned."""

    def recording(self, leaves: Sequence[Leaf]) -> AbstractContextManager[None]:
        """Called under create_graph instead of the other methods. Backward runs in the context that is returned."""


@final
class Leaf:
    """The graph's end for one tensor that requires grad.

    hooks: called with the sum of a backward's gradients before it is accumulated; each may return another gradient
    after: called after the gradient was accumulated
    owner: a weak reference to the tensor, whose `grad` is set by a backward under create_graph
    """

    __slots__ = ("__weakref__", "after", "dtype", "grad_buffer", "hooks", "owner", "ready_hook", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, xp: Any, owner: Callable[[], Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.owner = owner
        self.grad_buffer = GradBuffer(shape, dtype, xp)
        self.ready_hook: GradReadyHook | None = None
        self.hooks: list[Callable[[Array], Array | None]] = []
        self.after: list[Callable[[], None]] = []


class RemovableHandle:
    """Takes a hook out of the list it was put into: by `remove()`, or at the end of a `with` block."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        """Removes the hook; a second call changes nothing."""
        for i, hook in enumerate(self._hooks):
            if hook is self._hook:
                del self._hooks[i]
                return

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
