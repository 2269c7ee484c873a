"""Reverse mode on a graph of nodes: counts the gradients of each node, then runs the nodes, the newest first.

A backward begins with a counting pass over what the roots can reach. A node is ready when all its gradients have
arrived. The newest ready node runs first, so the last layers finish first. A leaf is complete when its count is zero.
Then its gradient-ready hook is called, while earlier layers still compute. So communication overlaps with backward.

Nothing here recurses. Gradients are raw arrays, unless the caller passes `run_node`. The graph holds no reference
cycles (tensor → node → older nodes → leaf → buffer), so reference counting frees memory as backward proceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, cast

import numpy as np

from ddp._engine import stream_sync
from ddp._engine.anomaly import check_gradients
from ddp._engine.grad_buffer import Array, GradReadyHook, Leaf
from ddp._engine.graph import CollectiveNode, Edge, Hook, MultiOutputNode, Node, OutputGradient
from ddp._engine.modes import state
from ddp.errors import GraphFreedError

RunNode = Callable[[Node, Any, tuple[bool, ...]], Sequence[Any]]


def backward(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool = False,
    sinks: dict[Edge, Any] | None = None,
    run_node: RunNode | None = None,
) -> None:
    """Propagates `grads` from `roots` into the gradient buffers of all leaves that the roots depend on.

    sinks: if given, the gradient of each of its keys becomes the key's value instead. No gradient buffer of a leaf is
    written, and no gradient-ready hook is called. Only the nodes on the way to a sink run, and only they are freed.
    run_node: called in place of `Node.run`; requires `sinks`. Gradients are then of the type that it takes and returns,
    such as tensors, and are added by +. If all sinks that `roots` reach are leaves, collectives that lead to no sink
    run, too, because other ranks wait for them.
    Arrays of `grads` are never written to.

    Raises: GraphFreedError, VersionError, AnomalyError; and whatever an op or a hook raises.
    """
    reached = None if sinks is None else _edges_leading_to(roots, sinks, run_node is not None)
    pending = _count(roots, reached)
    leaves = [edge for edge in pending if type(edge) is Leaf]
    if state.reached is not None:
        state.reached(leaves)
    groups: dict[int, tuple[GradReadyHook, list[Leaf]]] = {}
    for leaf in leaves if sinks is None else ():
        if (hook := leaf.ready_hook) is not None:
            groups.setdefault(id(hook), (hook, []))[1].append(leaf)
    active: list[GradReadyHook] = []
    try:
        for hook, hooked in sorted(groups.values(), key=lambda group: group[0].order):
            active.append(hook)
            hook.begin(hooked)
        with np.errstate(all="ignore"):  # no warnings of infinities and nan: anomaly mode looks for nan
            if stream_sync.switch.on or (stream_sync.switch.several_gpus and stream_sync.on_other_gpu(grads)):
                with stream_sync.StreamSync(pending) as sync:
                    _run(roots, grads, retain_graph, sinks, pending, sync, run_node)
            else:
                _run(roots, grads, retain_graph, sinks, pending, None, run_node)
        while active:
            active[0].end()
            del active[0]
    except BaseException as error:
        for hook in active:
            hook.abandon(error)
        raise


def leaves_of(roots: Sequence[Edge]) -> list[Leaf]:
    """The leaves that a backward from these roots reaches. Raises: GraphFreedError."""
    return [edge for edge in _count(roots, None) if type(edge) is Leaf]


def _edges_leading_to(roots: Sequence[Edge], sinks: Mapping[Edge, object], collectives: bool) -> set[Edge]:
    """Finds the sinks that `roots` reach, and the nodes through which gradients reach these sinks.

    collectives: if all sinks found are leaves, also finds all collectives, and the nodes through which gradients reach
    them

    Raises: GraphFreedError if a sink was not found, but may be behind a node that was freed.
    """
    visited: set[Edge] = set()
    freed: Node | None = None
    arrivals: list[Edge | None] = [*roots]
    while arrivals:
        edge = arrivals.pop()
        if edge is None or edge in visited:
            continue
        visited.add(edge)
        if isinstance(edge, Node):
            if edge.edges is None:
                freed = edge
            arrivals += edge.edges or ()
    reached = {edge for edge in visited if edge in sinks}
    if freed is not None and len(reached) < len(sinks):
        raise _freed_error(freed)
    nodes = [edge for edge in visited if isinstance(edge, Node)]
    collectives = collectives and reached.isdisjoint(nodes)
    for node in sorted(nodes, key=lambda node: node.number):  # inputs first: they are older than results
        if (collectives and type(node) is CollectiveNode and node.edges) or not reached.isdisjoint(node.edges or ()):
            reached.add(node)
    return reached


def _freed_error(node: Node) -> GraphFreedError:
    return GraphFreedError(
        f"{node.op.name}: backward ran over this graph before and freed it; "
        "pass retain_graph=True to the first backward to run a second"
    )


def _count(roots: Sequence[Edge], reached: set[Edge] | None) -> dict[Edge, int]:
    """Counts the gradients that each edge waits for, including the one that a root gets from the caller.

    reached: only these edges count; None: all that `roots` reach
    Raises: GraphFreedError without `reached`, if a node was freed.
    """
    pending: dict[Edge, int] = {}
    arrivals: list[Edge | None] = [*roots]
    while arrivals:
        edge = arrivals.pop()
        if edge is None or (reached is not None and edge not in reached):
            continue
        count = pending.get(edge, 0)
        pending[edge] = count + 1
        if count == 0 and type(edge) is not Leaf:
            if edge.edges is None and reached is None:
                raise _freed_error(edge)
            arrivals += edge.edges or ()  # with `reached`, a freed node is a sink, which does not run
    return pending


def _run(
    roots: Sequence[Edge],
    grads: Sequence[Array],
    retain_graph: bool,
    sinks: dict[Edge, Any] | None,
    pending: dict[Edge, int],
    sync: stream_sync.StreamSync | None,
    run_node: RunNode | None,
) -> None:
    # The gradient of each edge so far. Without `sinks`, that of a leaf without hooks is in the leaf's buffer instead.
    incoming: dict[Edge, Any] = {}
    ready: list[tuple[int, Node]] = []
    anomaly = state.anomaly
    edges: Sequence[Edge | None] = roots
    results: Sequence[Any] = grads
    while True:
        for edge, g in zip(edges, results, strict=True):
            if edge is None or (count := pending.get(edge)) is None:
                continue
            if sync is not None:
                sync.begin_delivery(edge, g)
            if g is not None:
                if type(edge) is Leaf and sinks is None and not edge.hooks:
                    edge.grad_buffer.accumulate(g)
                elif type(g) is OutputGradient:
                    parts = incoming.setdefault(edge, [None] * cast(MultiOutputNode, edge).outputs)
                    part = parts[g.output]  # None, unless create_graph made a second node for this output
                    parts[g.output] = g.gradient if part is None else _sum(part, g.gradient, edge)
                else:  # not added in place: the first gradient is not a copy, and may be read-only or in use elsewhere
                    before = incoming.get(edge)
                    incoming[edge] = g if before is None else _sum(before, g, edge)
            if count > 1:
                pending[edge] = count - 1
            else:
                del pending[edge]  # a reference here would keep the node alive after it ran
                if type(edge) is Leaf:
                    _complete_leaf(edge, incoming, sinks)
                else:
                    if edge.metadata is not None or sinks is not None:
                        _complete_node(edge, incoming, sinks)
                    if sinks is None or edge not in sinks or not pending.keys().isdisjoint(edge.edges or ()):
                        heappush(ready, (-edge.number, edge))
                    else:
                        incoming.pop(edge, None)
            if sync is not None:
                sync.end_delivery(edge, edge in incoming)
        del edges, results
        if not ready:
            return
        node = heappop(ready)[1]
        assert node.edges is not None
        edges = node.edges
        g = incoming.pop(node, None)
        if sync is not None:
            sync.enter(node, g)
        if g is None and type(node) is not CollectiveNode:  # no gradient arrived: the inputs get none
            results = (None,) * len(edges)
        elif sinks is not None:
            needs = tuple([edge is not None and edge in pending for edge in edges])
            results = node.run(g, needs) if run_node is None else run_node(node, g, needs)
        elif node.op.grad_out and (sync is None or sync.on_home_stream):
            results = node.run(g, node.needs, _grad_outs(edges, node.op.grad_out == "accumulate"))
        else:
            results = node.run(g, node.needs)
        if sync is not None:
            sync.leave(node, g)
        if anomaly and run_node is None:
            check_gradients(node, results)
        if not retain_graph:
            node.free()
        del node, g  # frees both; in the loop above, `g` then keeps the last of `results` until the next node has run


def _complete_node(node: Node, incoming: dict[Edge, Any], sinks: dict[Edge, Any] | None) -> None:
    """Calls the hooks of a node with its complete gradient, and stores the gradient for retain_grad and `sinks`."""
    if node.metadata is not None:
        _call_hooks(node, node.metadata.hooks, incoming)
        if node.metadata.retained_grad is not None and node in incoming:
            node.metadata.retained_grad(incoming[node])
    if sinks is not None and node in sinks:
        sinks[node] = incoming.get(node)


def _complete_leaf(leaf: Leaf, incoming: dict[Edge, Any], sinks: dict[Edge, Any] | None) -> None:
    if leaf.hooks:
        _call_hooks(leaf, leaf.hooks, incoming)
    if sinks is not None:
        sinks[leaf] = incoming.pop(leaf, None)
        return
    if leaf in incoming:
        leaf.grad_buffer.accumulate(incoming.pop(leaf))
    if leaf.after and leaf.grad_buffer.full:
        for after in [*leaf.after]:
            after()
    if leaf.ready_hook is not None:
        leaf.ready_hook.ready(leaf)


def _call_hooks(edge: Edge, hooks: Sequence[Hook], incoming: dict[Edge, Any]) -> None:
    if edge in incoming:
        for hook in [*hooks]:  # a hook may remove itself
            changed = hook(incoming[edge])
            if changed is not None:
                incoming[edge] = changed


def _sum(a: Any, b: Any, edge: Edge) -> Any:
    if type(a) is np.ndarray or type(edge) is Leaf or not hasattr(a, "flags") or a.flags.c_contiguous or not a.ndim:
        return a + b
    # CuPy's `a + b` would not keep the memory order of `a`, such as channels last.
    xp = edge.xp
    return xp.add(a, b, out=xp.empty_like(a))


def _grad_outs(edges: Sequence[Edge | None], accumulate: bool) -> list[Array | None]:
    """The argument `grad_outs` of `Node.run`: for each input, what `GradBuffer.grad_out` returns, or None.

    It is None unless the input is a leaf without hooks that gets a single gradient from this node.
    """
    return [
        edge.grad_buffer.grad_out(accumulate)
        if type(edge) is Leaf and not edge.hooks and edges.count(edge) == 1
        else None
        for edge in edges
    ]
