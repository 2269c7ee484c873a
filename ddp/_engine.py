"""Reverse mode on a graph of nodes: count first, then run newest first, so that the last layers' gradients come first.

A backward begins with a counting pre-pass over what the roots can reach. A node runs when every gradient it waits for
has come, the newest of the ready ones first; a leaf is complete at the moment its own count reaches zero, and its
watcher is told so while older layers are still computing: only so does communication overlap with backward.

Nothing here recurses, and nothing here knows tensors: gradients are raw arrays. The graph holds no reference cycles
(tensor → node → older nodes → leaf → slot), so memory goes by reference counting as backward passes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar, cast

from ddp.errors import GraphFreedError, VersionError

Array = Any  # numpy.ndarray or cupy.ndarray
Fn = TypeVar("Fn", bound=Callable[..., Any])


class Version:
    """How often the memory of a tensor and its views was written in place; shared by all of them."""

    count = 0  # a class attribute, so that making one for every tensor runs no __init__


class Differentiable(Protocol):
    """What the engine asks of an op."""

    name: str
    saves: tuple[str, ...]
    backward: Callable[..., Sequence[Array | None]]


class Slot:
    """Where a leaf's gradient lives: empty, or holding an array.

    A bound slot writes into memory that somebody else laid out; an unbound one makes its own at the first write and
    keeps it, so that a training loop allocates gradients once.
    """

    __slots__ = ("buffer", "dtype", "full", "shape", "xp")

    def __init__(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.xp = xp
        self.buffer: Array | None = None  # the memory; None while never written and not bound
        self.full = False  # holds a gradient now

    def accumulate(self, g: Array) -> None:
        """Adds `g` (the leaf's shape): the first of a step is written, later ones are added in place."""
        if self.full:
            assert g.shape == self.shape, f"gradient of shape {g.shape} for a leaf of shape {self.shape}"
            self.xp.add(self.buffer, g, out=self.buffer, casting="same_kind")
        else:
            self.set(g)

    def set(self, array: Array) -> None:
        """Copies `array` (the leaf's shape) in, cast to the leaf's dtype; never keeps a reference to it."""
        assert array.shape == self.shape, f"gradient of shape {array.shape} for a leaf of shape {self.shape}"
        if self.buffer is None:
            self.buffer = self.xp.empty(self.shape, self.dtype)
        self.buffer[...] = array
        self.full = True

    def clear(self) -> None:
        """Empties the slot; its memory stays for the next first write."""
        self.full = False

    def bind(self, buffer: Array) -> None:
        """From now on the gradient lives in `buffer` (the leaf's shape and dtype); a live one is copied into it."""
        assert buffer.shape == self.shape, f"buffer of shape {buffer.shape} for a leaf of shape {self.shape}"
        assert buffer.dtype == self.dtype, f"buffer of {buffer.dtype} for a leaf of {self.dtype}"
        if self.full:
            buffer[...] = self.buffer
        self.buffer = buffer


class Watcher(Protocol):
    """Somebody who follows leaves through a backward: it learns which will be reached, and when each is complete."""

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """Before the first node runs: all leaves with this watcher that this backward will reach."""

    def ready(self, leaf: Leaf) -> None:
        """The leaf's gradient of this backward is complete in its slot (empty if every use gave None)."""

    def end(self) -> None:
        """After the last node, still inside backward."""

    def abandon(self, error: BaseException) -> None:
        """Backward raised after begin() was called."""


class Leaf:
    """The graph's end for one tensor that requires grad."""

    __slots__ = ("__weakref__", "dtype", "shape", "slot", "watcher")

    def __init__(self, shape: tuple[int, ...], dtype: Any, xp: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.slot = Slot(shape, dtype, xp)
        self.watcher: Watcher | None = None


_numbers = itertools.count()


class Node:
    """One op that ran: what its backward needs, and where the gradients go."""

    __slots__ = ("__weakref__", "edges", "needs", "number", "op", "residual", "saved", "versions", "xp")

    def __init__(
        self,
        op: Differentiable,
        xp: Any,
        edges: tuple[Node | Leaf | None, ...],
        needs: tuple[bool, ...],
        saved: tuple[Any, ...],
        versions: Sequence[tuple[Version, int, int]],
        residual: Any,
    ) -> None:
        self.number = next(_numbers)  # creation order: a higher number is nearer the loss
        self.op = op
        self.xp = xp
        self.edges: tuple[Node | Leaf | None, ...] | None = edges  # one per input; None once freed
        self.needs = needs
        self.saved = saved  # arrays, in the order of op.saves
        self.versions = versions  # (counter, count at save time, position in saved) of each saved tensor
        self.residual = residual  # what backward needs besides: shapes, masks, parameters

    def run(self, g: Array) -> Sequence[Array | None]:
        """The gradients of the inputs. Raises: VersionError if a saved value was changed in place since."""
        for counter, count, position in self.versions:
            if counter.count != count:
                raise VersionError(
                    f"{self.op.name}: backward reads {self.op.saves[position]!r} of shape "
                    f"{tuple(self.saved[position].shape)}, saved at version {count}, but it was changed in place and "
                    f"is now at version {counter.count}; use the out-of-place form, or clone() it before"
                )
        return self.op.backward(self.xp, g, self.needs, self.saved, self.residual)

    def free(self) -> None:
        """Lets go of everything, so that memory falls while backward still runs."""
        self.edges = None
        self.saved = ()
        self.versions = ()
        self.residual = None


Edge = Node | Leaf


def backward(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool = False,
    sinks: dict[Edge, Array | None] | None = None,
) -> None:
    """Propagates `grads` from `roots` into the slots of all leaves they depend on.

    With `sinks`, the gradients of exactly those edges are put there instead, and no slot or watcher is touched.
    Arrays of `grads` are borrowed: never written to.

    Raises: GraphFreedError, VersionError; and whatever an op or a watcher raises.
    """
    pending, watching = _count(roots, sinks is None)
    groups: dict[int, tuple[Watcher, list[Leaf]]] = {}
    for leaf, watcher in watching.items():
        groups.setdefault(id(watcher), (watcher, []))[1].append(leaf)
    active: list[Watcher] = []
    try:
        for watcher, leaves in groups.values():
            active.append(watcher)
            watcher.begin(leaves)
        _run(roots, grads, retain_graph, sinks, pending, watching)
        while active:
            active[0].end()
            del active[0]
    except BaseException as error:
        for watcher in active:
            watcher.abandon(error)
        raise


def _count(roots: Sequence[Edge], watched: bool) -> tuple[dict[Edge, int], dict[Leaf, Watcher]]:
    """How many gradients each reachable edge waits for (a root waits for its own), and which leaves are watched."""
    pending: dict[Edge, int] = {}
    watching: dict[Leaf, Watcher] = {}
    arrivals: list[Edge] = list(roots)
    while arrivals:
        edge = arrivals.pop()
        count = pending.get(edge, 0)
        pending[edge] = count + 1
        if count:
            continue
        if isinstance(edge, Leaf):
            if watched and edge.watcher is not None:
                watching[edge] = edge.watcher
            continue
        if edge.edges is None:
            raise GraphFreedError(
                f"{edge.op.name}: backward ran over this graph before and freed it; "
                "pass retain_graph=True to the first backward to run a second"
            )
        arrivals.extend(input for input in edge.edges if input is not None)
    return pending, watching


def _run(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool,
    sinks: dict[Edge, Array | None] | None,
    pending: dict[Edge, int],
    watching: dict[Leaf, Watcher],
) -> None:
    incoming: dict[Edge, Array] = {}  # what has come for each node so far
    owned: set[Edge] = set()  # nodes whose incoming array is our own, so that it may be added to in place
    ready: list[tuple[int, Node]] = []

    def deliver(edge: Edge, g: Array | None) -> None:
        if isinstance(edge, Leaf) and sinks is None:
            if g is not None:
                edge.slot.accumulate(g)
        elif g is not None:
            before = incoming.get(edge)
            if before is None:
                # Borrowed: it may be broadcast, read-only, or somebody else's.
                incoming[edge] = g
            elif edge in owned:
                before += g
                incoming[edge] = before  # a 0-d sum is a scalar, and += made a new one
            else:
                incoming[edge] = before + g
                owned.add(edge)
        pending[edge] -= 1
        if pending[edge]:
            return
        del pending[edge]  # no reference may outlive the node's turn
        if sinks is not None and edge in sinks:
            sinks[edge] = incoming.get(edge)
        if isinstance(edge, Node):
            heappush(ready, (-edge.number, edge))
        elif (watcher := watching.get(edge)) is not None:
            watcher.ready(edge)

    for root, g in zip(roots, grads, strict=True):
        deliver(root, g)
    while ready:
        node = heappop(ready)[1]
        edges = node.edges
        assert edges is not None
        g = incoming.pop(node, None)
        owned.discard(node)
        # Nothing came: every use gave None, and None is what its inputs get.
        results: Sequence[Array | None] = node.run(g) if g is not None else (None,) * len(edges)
        if not retain_graph:
            node.free()
        del g
        for edge, result in zip(edges, results, strict=True):
            if edge is not None:
                deliver(edge, result)
        del results, edges, node
        # `edge` and `result` are overwritten at the next node; they hold at most one gradient.


class _Mode(threading.local):
    enabled = True


_mode = _Mode()


def is_grad_enabled() -> bool:
    """Whether ops of this thread are recorded for backward."""
    return _mode.enabled


class set_grad_enabled:
    """Turns recording on or off in this thread: as a context manager, a decorator, or called as a statement.

    As in PyTorch, `set_grad_enabled(False)` takes effect at once; `with` restores what was before it.
    """

    def __init__(self, mode: bool) -> None:
        self.mode = mode
        self.before = [_mode.enabled]
        _mode.enabled = mode

    def __enter__(self) -> None:
        _mode.enabled = self.mode

    def __exit__(self, *exc: object) -> None:
        _mode.enabled = self.before[-1]

    def __call__(self, function: Fn) -> Fn:
        _mode.enabled = self.before[-1]  # used as a decorator: only calls of the function are meant
        return _decorated(function, self.mode)


class _Scope:
    """A grad mode for a `with` block or a decorated function; one object may be entered again inside itself."""

    mode: bool

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(_mode.enabled)
        _mode.enabled = self.mode

    def __exit__(self, *exc: object) -> None:
        _mode.enabled = self.before.pop()

    def __call__(self, function: Fn) -> Fn:
        return _decorated(function, self.mode)


class no_grad(_Scope):
    """Ops inside are not recorded: `with no_grad(): ...` or `@no_grad()`. Per thread."""

    mode = False


class enable_grad(_Scope):
    """Ops inside are recorded, also within no_grad: `with enable_grad(): ...` or `@enable_grad()`. Per thread."""

    mode = True


def _decorated(function: Fn, mode: bool) -> Fn:
    import functools

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        before = _mode.enabled
        _mode.enabled = mode
        try:
            return function(*args, **kwargs)
        finally:
            _mode.enabled = before

    return cast(Fn, inner)
