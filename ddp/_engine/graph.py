"""The parts of the graph: one node for each recorded op, and the versions of the tensors that the node saved.

An op with several results has a `MultiOutputNode`, and a `SelectOutput` node for each result. The `SelectOutput` node
gets the sum of its result's gradients, and passes it to the `MultiOutputNode`, which waits for all results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddp._engine.grad_buffer import Array, Leaf
from ddp.errors import VersionError


class Version:
    """Counts the in-place writes to the memory of a tensor. The tensor and its views share one object.

    count: the number of writes
    epoch: increased by each write that autograd records, and when a tensor with views is first made to require grad.
        A tensor whose own epoch is earlier has a stale edge
    base: a weak reference to the tensor of which the first view was made. If it is gone, the next view sets it anew
    saved_by: a weak reference to the node whose result this memory is, if the node saved it
    """

    # Class attributes, so that making a Version for every tensor runs no __init__.
    count = 0
    epoch = 0
    base: Callable[[], Any] | None = None
    saved_by: Callable[[], Node | None] | None = None


Versions = Sequence[tuple[Version, int, int]]
Differentiable = Any  # an op: see `ddp.ops.op.Op`; the engine reads name, saves, plan, grad_out and backward
Hook = Callable[[Array], "Array | None"]


class NodeMetadata:
    """State that few nodes need.

    hooks: called with the node's incoming gradient; each may return another gradient
    retained_grad: called after the hooks with the gradient, which it adds to a tensor's `grad`
    recompute: called before backward reads saved values that a checkpoint dropped; fills them in
    trace: the line of user code that ran the op
    stream: the CUDA stream that the op ran on, if several streams are used
    """

    __slots__ = ("hooks", "recompute", "retained_grad", "stream", "trace")

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.retained_grad: Callable[[Any], None] | None = None
        self.recompute: Callable[[], None] | None = None
        self.trace: str | None = None
        self.stream: Any = None


_numbers = itertools.count()


class Node:
    """One recorded op: what its backward needs, and where the gradients go."""

    __slots__ = (
        "__weakref__",
        "call",
        "edges",
        "metadata",
        "needs",
        "number",
        "op",
        "residual",
        "saved",
        "versions",
        "xp",
    )

    def __init__(
        self,
        op: Differentiable,
        xp: Any,
        edges: tuple[Node | Leaf | None, ...],
        needs: tuple[bool, ...],
        saved: tuple[Any, ...],
        versions: Versions,
        residual: Any,
    ) -> None:
        self.number = next(_numbers)  # creation order: higher than the numbers of the nodes that made the inputs
        self.op = op
        self.xp = xp
        self.edges: tuple[Node | Leaf | None, ...] | None = edges  # one per input; None once freed
        self.needs = needs
        # Arrays and numbers, in the order of `op.saves` or `save_for_backward`. None where no gradient reads the value.
        self.saved = saved
        self.versions = versions  # (version, its count when saved, position in `saved`) of each saved tensor
        self.residual = residual  # what else backward needs: shapes, masks, parameters
        # What the forward needs to run again, if the residual changes with the inputs: the inputs (arrays and numbers),
        # (version, count, position) of each input that is a tensor, and the parameters.
        self.call: tuple[Sequence[Any], Versions, dict[str, Any]] | None = None
        self.metadata: NodeMetadata | None = None

    def ensure_metadata(self) -> NodeMetadata:
        """Returns the node's metadata, which the first call creates."""
        if self.metadata is None:
            self.metadata = NodeMetadata()
        return self.metadata

    def check_versions(self) -> None:
        """Checks that no saved value was changed in place after it was saved. Raises: VersionError if one was."""
        for counter, count, position in self.versions:
            if counter.count != count:
                what = repr(self.op.saves[position]) if position < len(self.op.saves) else f"saved tensor {position}"
                shape = f" of shape {tuple(self.saved[position].shape)}" if position < len(self.saved) else ""
                raise VersionError(
                    f"{self.op.name}: backward reads {what}{shape}, saved at version {count}, but it was changed in "
                    f"place and is now at version {counter.count}; use the out-of-place form, or clone() it before"
                )

    def run(self, g: Any, needs: tuple[bool, ...], grad_outs: Sequence[Any] | None = None) -> Sequence[Any]:
        """Computes the gradients of inputs, None where `needs` is False. Raises: VersionError; what the op raises.

        needs: which inputs get a gradient: those of `self.needs`, or fewer
        grad_outs: only for an op with `grad_out`: for each input, a result of `GradBuffer.grad_out` or None
        """
        if self.metadata is not None and self.metadata.recompute is not None:
            self.metadata.recompute()
        for counter, count, _ in self.versions:
            if counter.count != count:
                self.check_versions()
        saved = self.saved
        if needs is not self.needs and self.op.saves:  # values that no wanted gradient reads become None
            plan = self.op.plan(needs)
            saved = tuple([None if position is None else x for position, x in zip(plan, saved, strict=True)])
        if grad_outs is None:
            return self.op.backward(self.xp, g, needs, saved, self.residual)
        return self.op.backward(self.xp, g, needs, saved, self.residual, grad_outs)

    def free(self) -> None:
        """Drops all that the node holds for its backward, so that memory is freed while backward still runs."""
        self.edges = None
        self.saved = ()
        self.versions = ()
        self.residual = self.call = None
        self.metadata = None


class ReusableNode(Node):
    """A node that several graphs share, so it is never freed. Its op saves nothing."""

    __slots__ = ()

    def free(self) -> None:
        """Does nothing."""


class CollectiveNode(Node):
    """A node whose backward is a collective. Every rank runs it, with None as the gradient if none arrives."""

    __slots__ = ()


class MultiOutputNode(Node):
    """The node of an op with `outputs` results: its gradient is a list with a gradient or None for each of them."""

    __slots__ = ("outputs",)
    outputs: int


class OutputGradient(NamedTuple):
    """The gradient of result number `output`."""

    output: int
    gradient: Array


class SelectOutput:
    """The op of a node that passes the gradient of one result to the `MultiOutputNode`."""

    saves: tuple[str, ...] = ()
    grad_out = False

    def __init__(self, name: str) -> None:
        self.name = name

    def backward(self, xp: Any, g: Array, needs: Any, saved: Any, output: int) -> Sequence[OutputGradient]:
        return (OutputGradient(output, g),)


def output_nodes(node: MultiOutputNode) -> list[Node]:
    """Returns a `SelectOutput` node for each result of `node`."""
    select = SelectOutput(node.op.name)
    return [Node(select, node.xp, (node,), (True,), (), (), i) for i in range(node.outputs)]


Edge = Node | Leaf
