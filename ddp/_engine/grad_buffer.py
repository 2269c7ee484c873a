"""Where the graph ends: a leaf, the buffer that holds its gradient, and the hook that is called when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

Array = Any  # numpy.ndarray or cupy.ndarray


class AccumulateInto:
    """An array that holds a gradient: what is computed is to be added to it."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


class GradBuffer:
    """The memory of a leaf's gradient: empty, or holding an array.

    A bound buffer uses the memory that `bind` gave it. An unbound one allocates its own at the first write and uses it
    again in later steps, unless a caller may still hold it.
    """

    __slots__ = ("adding", "array", "bound", "dtype", "full", "in_graph", "lent", "shape", "withheld", "xp", "zeroed")

    def __init__(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.xp = xp
        self.array: Array | None = None  # the memory; None while never written and not bound
        self.full = False  # holds a gradient now
        self.adding = False  # an op was asked to add to it: see `target`
        self.bound = False
        self.lent = False  # a caller was given a tensor over this memory
        self.in_graph = False  # a graph may have saved the array, so that it must not be written to: see `hold`
        self.withheld: str | None = None  # why `grad` raises: this rank has only a part of the gradient
        self.zeroed = False  # holds the zeros of zero_grad(set_to_none=False)

    def accumulate(self, g: Array) -> None:
        """Adds `g` (the leaf's shape): the first of a step is written, later ones are added in place."""
        if g is self.array:  # computed where it belongs: see `target`
            assert not self.full or self.adding
            self.full, self.adding, self.withheld, self.zeroed = True, False, None, False
        elif self.full:
            assert g.shape == self.shape, f"gradient of shape {g.shape} for a leaf of shape {self.shape}"
            if self.in_graph:
                self.array, self.in_graph = self.xp.array(self.array), False
            self.xp.add(self.array, g, out=self.array, casting="same_kind")
            self.withheld, self.zeroed = None, False
        else:
            self.set(g)

    def target(self, adding: bool = False) -> Array | AccumulateInto | None:
        """The array that the next gradient may be computed in, so that accumulating it copies nothing.

        If the buffer holds a gradient: None, or with `adding` an `AccumulateInto`.
        """
        if self.full:
            self.adding = adding and not self.in_graph
            return AccumulateInto(self.array) if self.adding else None
        if self.array is None:
            self.array = self.xp.empty(self.shape, self.dtype)
        return self.array

    def set(self, array: Array) -> None:
        """Copies `array` (the leaf's shape) in, cast to the leaf's dtype; never keeps a reference to it."""
        assert array.shape == self.shape, f"gradient of shape {array.shape} for a leaf of shape {self.shape}"
        if self.array is None or self.in_graph:
            self.array, self.in_graph = self.xp.empty(self.shape, self.dtype), False
        self.array[...] = array
        self.full, self.withheld, self.zeroed = True, None, False

    def hold(self, array: Array) -> None:
        """Holds `array` itself, a gradient with a graph, and unbinds. The next gradient is added to a copy."""
        self.array, self.full, self.in_graph, self.lent = array, True, True, True
        self.bound, self.withheld, self.zeroed = False, None, False

    def clear(self) -> None:
        """Empties the buffer; its memory stays for the next first write, unless a caller may hold it."""
        self.full = False
        if self.lent and not self.bound:
            self.array, self.lent, self.in_graph = None, False, False

    def bind(self, buffer: Array) -> None:
        """From now on the gradient lives in `buffer` (the leaf's shape and dtype); a live one is copied into it."""
        assert buffer.shape == self.shape, f"buffer of shape {buffer.shape} for a leaf of shape {self.shape}"
        assert buffer.dtype == self.dtype, f"buffer of {buffer.dtype} for a leaf of {self.dtype}"
        if self.full:
            buffer[...] = self.array
        self.array, self.bound, self.lent, self.in_graph = buffer, True, False, False

    def unbind(self) -> None:
        """From now on the gradient lives in memory of its own; a live one is copied there."""
        if self.bound:
            assert self.array is not None
            self.array = self.array.copy() if self.full else None
            self.bound = self.lent = False


class GradReadyHook(Protocol):
    """Called with the leaves that a backward will reach, and when the gradient of each of them is complete.

    turn: of several hooks, that with the lowest begins first and ends first
    """

    turn: int

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """Before the first node runs: all leaves with this hook that this backward will reach."""

    def ready(self, leaf: Leaf) -> None:
        """The leaf's gradient of this backward is complete in its buffer (empty if every use gave None)."""

    def end(self) -> None:
        """After the last node, still inside backward."""

    def abandon(self, error: BaseException) -> None:
        """Backward raised after begin() was called."""

    def recording(self, leaves: Sequence[Leaf]) -> AbstractContextManager[None]:
        """Instead of the other methods under create_graph: gradients of the leaves are accumulated in this context."""


@final
class Leaf:
    """The graph's end for one tensor that requires grad.

    hooks: called with the sum of a backward's gradients before it is accumulated; each may return another one
    after: called once it is accumulated
    owner: a weak reference to the tensor, for gradients that are tensors themselves
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
        """The hook is called no more; removing it twice changes nothing."""
        for i, hook in enumerate(self._hooks):
            if hook is self._hook:
                del self._hooks[i]
                return

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
