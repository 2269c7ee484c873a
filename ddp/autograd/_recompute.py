"""Checkpointing of activations: a region keeps no saved values, and runs again when backward first asks for one.

The region's nodes are in the graph as always, but without saved values. There is no nested backward, so gradient-ready
hooks, and the numbers of gradients that leaves wait for, are unchanged. Source: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddp import _device
from ddp._engine import Node, enable_grad, modes
from ddp._tensor.base import TensorBase, wrap
from ddp.errors import ArgumentError, GraphError


class _Region:
    """One run of `function`: weak references to the nodes it made, and the arguments and modes to make them again."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], keep_random: bool) -> None:
        self.function = function
        self.args = [_detach(x) for x in args]
        self.kwargs = {name: _detach(x) for name, x in kwargs.items()}
        self.autocast = modes.state.autocast
        self.random = _device.random_state() if keep_random else None
        self.nodes: list[weakref.ref[Node]] = []
        self.recomputed: list[Node] = []

    def empty(self, node: Node) -> None:
        """Observes the first run: drops what a new node saved. Its versions stay, to be compared in backward."""
        self.nodes.append(weakref.ref(node))
        node.saved = ()
        node.residual = None
        node.call = None
        node.ensure_metadata().recompute = self.fill

    def collect(self, node: Node) -> None:
        """Observes the second run: keeps each new node."""
        self.recomputed.append(node)

    def fill(self) -> None:
        """Runs the function again, and gives each node its saved values back.

        Raises: GraphError if the function ran other ops, or an argument was changed in place; VersionError if another
        saved value was changed in place.
        """
        recomputed: list[Node] = []
        self.recomputed = recomputed
        state = modes.state
        before = state.observers, state.autocast, state.inference
        random = _device.random_state()
        state.observers = (self.collect,)
        state.autocast = self.autocast
        state.inference = False
        try:
            if self.random is not None:
                _device.set_random_state(self.random)
            with enable_grad():
                self.function(
                    *map(_restore, self.args),
                    **{name: _restore(x) for name, x in self.kwargs.items()},
                )
        finally:
            state.observers, state.autocast, state.inference = before
            self.recomputed = []
            _device.set_random_state(random)
        for i, ref in enumerate(self.nodes):
            node = ref()
            if node is None or node.metadata is None or node.metadata.recompute is None:
                continue
            if i >= len(recomputed) or recomputed[i].op.name != node.op.name:
                ran = recomputed[i].op.name if i < len(recomputed) else "nothing"
                raise GraphError(
                    f"checkpoint: the second run of {getattr(self.function, '__name__', self.function)} differs from "
                    f"the first: op {i} was {node.op.name}, now {ran}"
                )
            node.metadata.recompute = None
            node.check_versions()
            node.saved = recomputed[i].saved
            node.residual = recomputed[i].residual
            node.versions = recomputed[i].versions
            node.call = recomputed[i].call


class _SavedArgument(NamedTuple):
    """A tensor argument, whether it required grad, and the count of its version.

    tensor: detached, since the nodes of the region keep the graph of the argument
    """

    tensor: TensorBase
    requires_grad: bool
    version: int


def _detach(x: Any) -> Any:
    """Replaces the tensors in an argument, also those in lists, tuples and dicts, by `_SavedArgument`s."""
    if isinstance(x, TensorBase):
        return _SavedArgument(wrap(x.array, x.device, x), x.requires_grad, x.version.count)
    return _map_nested(_detach, x)


def _map_nested(function: Callable[[Any], Any], x: Any) -> Any:
    """Returns a new list, tuple or dict of `function(value)` for each value of `x`; returns anything else unchanged."""
    if type(x) is list or type(x) is tuple:
        return type(x)([function(value) for value in x])
    return {name: function(value) for name, value in x.items()} if type(x) is dict else x


def _restore(kept: Any) -> Any:
    if not isinstance(kept, _SavedArgument):
        return _map_nested(_restore, kept)
    x, requires_grad, count = kept
    if x.version.count != count:
        raise GraphError(
            f"checkpoint: an argument of shape {x.array.shape} was changed in place since (version {count}, now "
            f"{x.version.count}), so the region cannot run again as it did"
        )
    return wrap(x.array, x.device, x).requires_grad_(requires_grad)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs function(*args, **kwargs) without keeping saved values; backward computes them again, to save memory.

    A call inside another checkpointed region is part of that region.

    function: must run the same ops again. preserve_rng_state: the second run draws the same random numbers.
    use_reentrant: accepted for PyTorch's sake, and changes nothing.

    Raises, in backward: GraphError if the second run differs, or an argument was changed in place; VersionError if
    another value that the region read was changed in place.
    """
    inside = any(isinstance(getattr(observer, "__self__", None), _Region) for observer in modes.state.observers)
    if inside or not modes.state.enabled:
        return function(*args, **kwargs)
    region = _Region(function, args, kwargs, preserve_rng_state)
    before = modes.state.observers
    modes.state.observers = (*before, region.empty)
    try:
        return function(*args, **kwargs)
    finally:
        modes.state.observers = before


def checkpoint_sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True
) -> Any:
    """Runs a Sequential, or a list of functions, in `segments` parts, all of them checkpointed except the last one.

    Raises: ArgumentError unless there are 1 to len(functions) segments.
    """
    layers: Sequence[Any] = list(functions)
    if not 1 <= segments <= len(layers):
        raise ArgumentError(f"checkpoint_sequential: {segments} segments of {len(layers)} functions")
    size = len(layers) // segments

    def run(first: int, last: int) -> Callable[[Any], Any]:
        def part(x: Any) -> Any:
            for layer in layers[first:last]:
                x = layer(x)
            return x

        return part

    for i in range(segments - 1):
        input = checkpoint(run(i * size, (i + 1) * size), input, preserve_rng_state=preserve_rng_state)
    return run((segments - 1) * size, len(layers))(input)
