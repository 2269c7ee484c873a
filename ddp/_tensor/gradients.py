"""Tensor methods for backward: starting it, hooks, retained gradients, and `grad_fn`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddp import _engine
from ddp._device import device, on
from ddp._engine import Leaf, Node, RemovableHandle
from ddp._tensor.base import Tensor, TensorBase, apply, required_edge, root_of, seed_of, wrap
from ddp.errors import ArgumentError, DtypeError, GraphError, ShapeError
from ddp.ops import elementwise
from ddp.ops.arrays import Ints
from ddp.ops.op import OPS


class GradFn:
    """A node of the graph as PyTorch names it: the op that made a tensor, or the end of the graph at a leaf.

    Two objects are equal if they stand for the same node.
    """

    __slots__ = ("_edge",)

    def __init__(self, edge: Node | Leaf) -> None:
        self._edge = edge

    def name(self) -> str:
        """ "AddBackward0" for add; "AccumulateGrad" for a leaf."""
        if isinstance(self._edge, Leaf):
            return "AccumulateGrad"
        name = self._edge.op.name
        if name not in OPS:
            return f"{name}Backward"  # a user's `Function` keeps its own name
        return "".join(part[:1].upper() + part[1:] for part in name.split("_")) + "Backward0"

    @property
    def next_functions(self) -> tuple[tuple[GradFn | None, int], ...]:
        """A pair for each input: the GradFn that its gradient goes to (None if it gets no gradient), and 0.

        () for a leaf, and after the graph was freed.
        """
        if isinstance(self._edge, Leaf) or self._edge.edges is None:
            return ()
        return tuple((None if edge is None else GradFn(edge), 0) for edge in self._edge.edges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradFn) and other._edge is self._edge

    def __hash__(self) -> int:
        return hash(self._edge)

    def __repr__(self) -> str:
        return f"<{self.name()} object at {id(self._edge):#x}>"


Hook = Callable[[Any], Any]


class Gradients(TensorBase):
    """Backward, hooks and detaching."""

    __slots__ = ()

    def backward(
        self,
        gradient: TensorBase | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Computes the gradient with respect to each leaf of this tensor's graph, and adds it to the leaf's `grad`.

        gradient: of this tensor's shape; None: 1, if there is one element. retain_graph: keeps the graph for another
        backward. inputs: only these tensors get a gradient. create_graph: gradients have a graph, so that they can be
        differentiated; `grad` keeps this graph alive; `autograd.grad` returns the gradients instead.

        Raises: GraphError if this tensor or one of `inputs` does not require grad, if one of `inputs` is a parameter
        under DataParallel, or under create_graph for an op without a second derivative; GraphFreedError for a graph
        that an earlier backward has freed; VersionError if a value that backward reads was changed in place;
        InplaceError if this tensor is a view whose base was changed in place; ShapeError, DtypeError, DeviceError if
        `gradient` does not fit; ArgumentError if `inputs` is empty.
        """
        run_backward([self], [gradient], retain_graph, create_graph, inputs)

    def detach(self) -> Tensor:
        """A tensor over the same memory, outside the graph. In-place changes show in both; backward notices them."""
        x = wrap(self.array, self._device)
        x.version = self.version
        x._epoch = -1  # x does not depend on this tensor's edge
        if x.version.base is None:
            x.version.base = weakref.ref(self)
        return x

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Calls `hook(grad)` in each backward, with this tensor's gradient; a tensor that the hook returns replaces it.

        grad: a copy, which the hook may change and keep. Hooks run in the order of registration; those of a leaf run
        before its gradient is accumulated. Raises: GraphError unless this tensor requires grad; ShapeError, DtypeError
        in backward if the hook returns something that does not fit.
        """
        edge = required_edge(self, "register_hook")
        hooks = edge.ensure_metadata().hooks if isinstance(edge, Node) else edge.hooks
        like = (self.array.shape, self.array.dtype)
        device = self._device

        def run(g: Any) -> Any:
            if isinstance(g, TensorBase):  # under create_graph
                changed = hook(apply(elementwise.clone, (g,)))
                gradient_array("hook", changed, like)
                return changed
            (gradient,) = gradient_tensors(g, [like], device)
            return gradient_array("hook", hook(gradient), like)

        hooks.append(run)
        return RemovableHandle(hooks, run)

    def register_post_accumulate_grad_hook(self, hook: Hook) -> RemovableHandle:
        """Calls `hook(tensor)` in each backward once the `grad` of this leaf is complete.

        Raises: GraphError unless this tensor is a leaf that requires grad.
        """
        if isinstance(self.edge, Node) or self.edge is None:
            raise GraphError("register_post_accumulate_grad_hook: expected a leaf that requires grad")
        owner = weakref.ref(self)  # weak: the tensor refers to the leaf
        after = self.edge.after

        def run() -> None:
            x = owner()
            if x is not None:
                hook(x)

        after.append(run)
        return RemovableHandle(after, run)

    def retain_grad(self) -> None:
        """Makes backward keep this tensor's gradient in `grad`, even if the tensor is not a leaf.

        Raises: GraphError unless it requires grad.
        """
        edge = required_edge(self, "retain_grad")
        if isinstance(edge, Node):
            edge.ensure_metadata().retained_grad = partial(_accumulate, weakref.ref(self))

    @property
    def retains_grad(self) -> bool:
        """Whether backward keeps the gradient of this tensor although it is not a leaf."""
        edge = self.edge
        return isinstance(edge, Node) and edge.metadata is not None and edge.metadata.retained_grad is not None


def _accumulate(owner: Callable[[], TensorBase | None], g: Any) -> None:
    """Adds a gradient, an array or a tensor with a graph, to the `grad` of a tensor, if the tensor still exists."""
    x = owner()
    if x is None:
        return
    if not isinstance(g, TensorBase):
        x.leaf.grad_buffer.accumulate(g)
        return
    hold_grad(x, g if x.grad is None else x.grad + g)


def hold_grad(x: TensorBase, g: TensorBase) -> None:
    """Sets the `grad` of x to a copy of g with the same edge."""
    with on(x.device):
        x.grad_view = wrap(g.array.copy(), x.device)
    x.grad_view.edge = g.edge
    x.leaf.grad_buffer.replace(x.grad_view.array)


Like = tuple[Ints, Any]  # the shape and dtype of a gradient


def gradient_tensors(g: Any, likes: Sequence[Like], device: device, zeros: bool = True) -> list[Tensor | None]:
    """Copies the gradients of a node's results to tensors for the user's code, since the arrays may be shared.

    g: an array, or a list with an array or None for each result. zeros: replaces None by zeros; otherwise None stays.
    """
    xp = device.xp
    grads = g if isinstance(g, list) else [g]
    tensors: list[Tensor | None] = []
    for grad, (shape, dtype) in zip(grads, likes, strict=True):
        if grad is not None:
            tensors.append(wrap(xp.array(grad, dtype), device))
        elif zeros:
            tensors.append(wrap(xp.zeros(shape, dtype), device))
        else:
            tensors.append(None)
    return tensors


def gradient_array(name: str, g: Any, like: Like) -> Any:
    """The array of a gradient that the user's code returned, cast to the dtype of `like`; None if `g` is None.

    Raises: DtypeError if `g` is neither a tensor nor None; ShapeError if its shape is not that of `like`.
    """
    if g is None:
        return None
    shape, dtype = like
    if not isinstance(g, TensorBase):
        raise DtypeError(f"{name}: expected tensors or None, got {type(g).__name__}")
    if g.array.shape != shape:
        raise ShapeError(f"{name}: a gradient of shape {g.array.shape} for a tensor of shape {shape}")
    return g.array.astype(dtype, copy=False)


def sink_gradients(
    tensors: Sequence[TensorBase],
    gradients: Sequence[Any],
    retain_graph: bool | None,
    create_graph: bool,
    wanted: Sequence[TensorBase],
) -> list[Any]:
    """The gradient of all `tensors` with respect to each of `wanted`; None where none arrived.

    Of the tensors that backward reaches, only those with `retain_grad` get a `grad`, as in PyTorch. The gradients are
    arrays; under create_graph, tensors. retain_graph: None stands for the value of create_graph
    """
    keep = create_graph if retain_graph is None else bool(retain_graph)
    if create_graph:
        from ddp._tensor.create_graph import recorded_gradients  # imported only here, because few programs need it

        return recorded_gradients(tensors, gradients, keep, [root_of(x) for x in wanted])
    sinks: dict[_engine.Edge, Any] = {root_of(x): None for x in wanted}
    _engine.backward(*_starts(tensors, gradients), keep, sinks)
    return [sinks[root_of(x)] for x in wanted]


def _starts(tensors: Sequence[TensorBase], gradients: Sequence[Any]) -> tuple[list[Node | Leaf], list[Any]]:
    """Returns the edges and the gradients (arrays) with which a backward of all `tensors` begins."""
    seeds = [seed_of(x, g) for x, g in zip(tensors, gradients, strict=True)]
    return [root_of(x) for x in tensors], seeds


def run_backward(
    tensors: Sequence[TensorBase], gradients: Sequence[Any], retain_graph: bool | None, create_graph: bool, inputs: Any
) -> None:
    """Adds the gradients of all `tensors` to the leaves they depend on, or to `inputs` (a tensor or several) alone.

    Raises: ArgumentError if `inputs` is empty; GraphError if an input does not require grad, or is a parameter under
    DataParallel, whose gradient the other ranks would not reduce; and what `GradReadyHook.recording` raises.
    """
    if inputs is None and not create_graph:
        _engine.backward(*_starts(tensors, gradients), bool(retain_graph))
        return
    if inputs is None:
        owners = [leaf.owner() for leaf in _engine.leaves_of([root_of(x) for x in tensors])]
        wanted = [x for x in owners if x is not None and x.edge is not None]
    else:  # a tensor that is given twice gets its gradient once
        wanted = [inputs] if isinstance(inputs, TensorBase) else list({id(x): x for x in inputs}.values())
        if not wanted:
            raise ArgumentError("backward(inputs=[]): there is nothing to compute a gradient for")
    hooks: set[Any] = {x.leaf.ready_hook for x in wanted} - {None}
    if hooks and inputs is not None:
        raise GraphError(
            "backward(inputs=...): one of them is a parameter under DataParallel, and the other ranks would not reduce "
            "its gradient: leave that out, or use autograd.grad"
        )
    with contextlib.ExitStack() as stack:
        for hook in sorted(hooks, key=lambda hook: hook.order):
            stack.enter_context(hook.recording([x.leaf for x in wanted]))
        results = sink_gradients(tensors, gradients, retain_graph, create_graph, wanted)
        for x, g in zip(wanted, results, strict=True):
            if g is not None and not x.retains_grad:  # with `retain_grad`, backward has already added it
                _accumulate(weakref.ref(x), g)
                for after in [*x.leaf.after]:
                    after()
