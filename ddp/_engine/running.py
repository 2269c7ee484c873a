"""Reverse mode on a graph of nodes: count first, then run newest first, so that the last layers' gradients come first.

A backward begins with a counting pass over what the roots can reach. A node runs when every gradient that it waits for
has arrived, the newest of the ready ones first. A leaf is complete when its own count reaches zero, and its
gradient-ready hook is called while older layers still compute: that is how communication overlaps with backward.

Nothing here recurses, and nothing here knows tensors: gradients are raw arrays. The graph holds no reference cycles
(tensor → node → older nodes → leaf → buffer), so memory falls by reference counting as backward proceeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, cast

import numpy as np

from ddp._engine import stream_sync
from ddp._engine.anomaly import check_gradients
from ddp._engine.leaves import Array, GradReadyHook, Leaf
from ddp._engine.modes import state
from ddp._engine.nodes import CollectiveNode, Edge, Hook, MultiOutputNode, Node, OutputGradient
from ddp.errors import GraphFreedError


def backward(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool = False,
    sinks: dict[Edge, Array | None] | None = None,
) -> None:
    """Propagates `grads` from `roots` into the gradient buffers of all leaves they depend on.

    With `sinks`, the gradients of exactly those edges are put there instead, and no buffer or gradient-ready hook is
    touched; only the nodes on the way to a sink run, and only they are freed.
    Arrays of `grads` are never written to.

    Raises: GraphFreedError, VersionError; and whatever an op or a hook raises.
    """
    running = None if sinks is None else _nodes_leading_to(roots, sinks)
    pending = _count(roots, sinks, running)
    leaves = [edge for edge in pending if type(edge) is Leaf]
    if state.reached is not None:
        state.reached(leaves)
    groups: dict[int, tuple[GradReadyHook, list[Leaf]]] = {}
    for leaf in leaves if sinks is None else ():
        if (hook := leaf.ready_hook) is not None:
            groups.setdefault(id(hook), (hook, []))[1].append(leaf)
    active: list[GradReadyHook] = []
    try:
        for hook, hooked in sorted(groups.values(), key=lambda group: group[0].turn):
            active.append(hook)
            hook.begin(hooked)
        with np.errstate(all="ignore"):  # infinities and nan are values here; anomaly mode looks for them
            if stream_sync.switch.on or (stream_sync.switch.several_gpus and stream_sync.on_other_gpu(grads)):
                with stream_sync.StreamSync(pending) as sync:
                    _run(roots, grads, retain_graph, sinks, running, pending, sync)
            else:
                _run(roots, grads, retain_graph, sinks, running, pending)
        while active:
            active[0].end()
            del active[0]
    except BaseException as error:
        for hook in active:
            hook.abandon(error)
        raise


def _nodes_leading_to(roots: Sequence[Edge], sinks: Mapping[Edge, object]) -> set[Edge]:
    """The nodes that must run for their gradients to reach a sink.

    Raises: GraphFreedError if a sink was not found, and may lie behind a node that was freed.
    """
    found: set[Edge] = set()
    nodes: list[Node] = []
    freed: Node | None = None
    arrivals: list[Edge] = list(roots)
    while arrivals:
        edge = arrivals.pop()
        if edge in found:
            continue
        found.add(edge)
        if not isinstance(edge, Node):
            continue
        if edge.edges is None:
            freed = edge
        else:
            nodes.append(edge)
            arrivals.extend(input for input in edge.edges if input is not None)
    if freed is not None and not found.issuperset(sinks):
        raise _freed_error(freed)
    running: set[Edge] = set()
    for node in sorted(nodes, key=lambda node: node.number):  # inputs are older than what was made of them
        if any(input in running or input in sinks for input in node.edges or () if input is not None):
            running.add(node)
    return running


def _freed_error(node: Node) -> GraphFreedError:
    return GraphFreedError(
        f"{node.op.name}: backward ran over this graph before and freed it; "
        "pass retain_graph=True to the first backward to run a second"
    )


def _count(roots: Sequence[Edge], sinks: Mapping[Edge, object] | None, running: set[Edge] | None) -> dict[Edge, int]:
    """How many gradients each reachable edge waits for; a root waits for its own.

    With `sinks`, only they and the `running` nodes count.
    """
    pending: dict[Edge, int] = {}
    arrivals: list[Edge] = list(roots)
    while arrivals:
        edge = arrivals.pop()
        if running is not None and sinks is not None and edge not in running and edge not in sinks:
            continue
        count = pending.get(edge, 0)
        pending[edge] = count + 1
        if count or not isinstance(edge, Node) or (running is not None and edge not in running):
            continue
        if edge.edges is None:
            raise _freed_error(edge)
        arrivals.extend(input for input in edge.edges if input is not None)
    return pending


def _run(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool,
    sinks: dict[Edge, Array | None] | None,
    running: set[Edge] | None,
    pending: dict[Edge, int],
    sync: stream_sync.StreamSync | None = None,
) -> None:
    incoming: dict[Edge, Any] = {}  # the gradient of each node so far
    owned: set[Edge] = set()  # nodes whose incoming array is our own, so that it may be added to in place
    ready: list[tuple[int, Node]] = []

    def deliver(edge: Edge, g: Any) -> None:
        if g is not None:
            if type(g) is OutputGradient:
                incoming.setdefault(edge, [None] * cast(MultiOutputNode, edge).outputs)[g.output] = g.gradient
            elif sinks is None and type(edge) is Leaf and not edge.hooks:
                edge.grad_buffer.accumulate(g)
            elif (before := incoming.get(edge)) is None:
                # Not copied: it may be broadcast, read-only, or in use elsewhere.
                incoming[edge] = g
            elif edge in owned:
                before += g
                incoming[edge] = before  # a 0-d sum is a scalar, and += made a new one
            else:
                incoming[edge] = _sum(before, g, edge)
                owned.add(edge)
        if (left := pending[edge] - 1) > 0:
            pending[edge] = left
            return
        del pending[edge]  # no reference may outlive the node's turn
        if sinks is None and type(edge) is Node and edge.metadata is None:
            heappush(ready, (-edge.number, edge))
        else:
            complete(edge)

    def complete(edge: Edge) -> None:
        if (hooks := _hooks(edge)) and (g := incoming.get(edge)) is not None:
            for hook in [*hooks]:  # one may take itself out
                changed = hook(g)
                if changed is not None:
                    g = incoming[edge] = changed
                    owned.discard(edge)
        if sinks is not None and edge in sinks:
            sinks[edge] = incoming.get(edge)
        if isinstance(edge, Node):
            if edge.metadata is not None and edge.metadata.retained_grad is not None and edge in incoming:
                edge.metadata.retained_grad.accumulate(incoming[edge])
            if running is None or edge in running:
                heappush(ready, (-edge.number, edge))
            else:
                incoming.pop(edge, None)
                owned.discard(edge)
        elif sinks is None:
            if (g := incoming.pop(edge, None)) is not None:
                owned.discard(edge)
                edge.grad_buffer.accumulate(g)
            if edge.after and edge.grad_buffer.full:
                for after in [*edge.after]:
                    after()
            if edge.ready_hook is not None:
                edge.ready_hook.ready(edge)

    hand_on = deliver if sync is None else partial(sync.deliver, deliver, incoming)
    for root, g in zip(roots, grads, strict=True):
        if root in pending:
            hand_on(root, g)
    anomaly = state.anomaly
    while ready:
        node = heappop(ready)[1]
        edges = node.edges
        assert edges is not None
        g = incoming.pop(node, None)
        owned.discard(node)
        results: Sequence[Any]
        if sync is not None:
            sync.enter(node, g)
        if g is None and type(node) is not CollectiveNode:  # every use gave None, and None is what its inputs get
            results = (None,) * len(edges)
        elif running is not None:
            results = node.run(
                g, tuple([need and edge in pending for need, edge in zip(node.needs, edges, strict=True)])
            )
        elif node.op.into and (sync is None or sync.on_home_stream):
            results = node.run(g, node.needs, _targets(edges, node.op.into == "adding"))
        else:
            results = node.run(g, node.needs)
        if sync is not None:
            sync.leave(node, g)
        if anomaly:
            check_gradients(node, results)
        if not retain_graph:
            node.free()
        del g
        for edge, result in zip(edges, results, strict=True):
            if edge is not None and edge in pending:
                hand_on(edge, result)
        del results, edges, node
        # `edge` and `result` are overwritten at the next node; they hold at most one gradient.


def _sum(a: Any, b: Any, edge: Edge) -> Any:
    if type(a) is np.ndarray or type(edge) is Leaf or a.flags.c_contiguous or not a.ndim:
        return a + b
    # CuPy would give it in the order of its axes; gradients of images with channels last stay so.
    xp = cast(Node, edge).xp
    return xp.add(a, b, out=xp.empty_like(a))


def _targets(edges: Sequence[Edge | None], adding: bool) -> list[Array | None]:
    """Where gradients may be written that go to a leaf once; `adding`: or be added to what is there."""
    return [
        edge.grad_buffer.target(adding) if type(edge) is Leaf and not edge.hooks and edges.count(edge) == 1 else None
        for edge in edges
    ]


def _hooks(edge: Edge) -> Sequence[Hook]:
    if isinstance(edge, Leaf):
        return edge.hooks
    return () if edge.metadata is None else edge.metadata.hooks
