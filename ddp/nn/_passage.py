"""Backward hooks of a module: two gates in the graph around one call of it, identities that the hooks watch.

Through one the gradients of its results come in, through the other those of its inputs go out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp._engine import Joint, Node, modes, ports
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp.errors import ArgumentError, DtypeError, ShapeError

Hooks = Sequence[tuple[Callable[..., Any]]]
Grads = tuple[Any, ...]


class Passage:
    """One call of a module, through which a backward will pass.

    before: hooks that are called with the gradients of the results; after: with those of the inputs too
    inputs: how many positional ones the call has
    """

    def __init__(self, module: Any, before: Hooks, after: Hooks, inputs: int) -> None:
        self.module = module
        self.before = before
        self.after = after
        self.none_in: Grads = (None,) * inputs  # grad_input and grad_output before gradients come
        self.none_out: Grads = (None,)
        self.tracked: list[int] = []  # the inputs that gradients go to
        self.returned: list[int] = []  # the results that gradients come from
        self.grad_output: Grads = ()

    def enter(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs behind their gate."""
        self.tracked, self.none_in = _tracked(inputs)
        return _through(_Gate("module_inputs", self._depart), inputs, self.tracked)

    def leave(self, output: Any) -> Any:
        """The results behind theirs; what is neither a tensor nor a tuple goes on as it is."""
        outputs = output if isinstance(output, tuple) else (output,)
        self.returned, self.none_out = _tracked(outputs)
        passed = _through(_Gate("module_outputs", self._arrive), outputs, self.returned)
        return passed if isinstance(output, tuple) else passed[0]

    def _arrive(self, grads: Grads) -> Grads:
        whole = _filled(grads, self.returned, self.none_out)
        for (hook,) in tuple(self.before):
            whole = _substituted("full backward pre-hook", hook(self.module, whole), whole)
        self.grad_output = whole if self.tracked else ()
        if not self.tracked:
            for (hook,) in tuple(self.after):
                if hook(self.module, (None,) * len(self.none_in), whole) is not None:
                    raise ArgumentError("full backward hook: no input requires grad, so there is nothing to replace")
        return tuple(whole[i] for i in self.returned)

    def _depart(self, grads: Grads) -> Grads:
        whole = _filled(grads, self.tracked, self.none_in)
        for (hook,) in tuple(self.after):
            whole = _substituted("full backward hook", hook(self.module, whole, self.grad_output), whole)
        self.grad_output = ()
        return tuple(whole[i] for i in self.tracked)


class _Gate:
    """The op of a gate, as the engine sees it. watch: takes the gradients as tensors, and returns those that go on."""

    saves: tuple[str, ...] = ()
    into = False

    def __init__(self, name: str, watch: Callable[[Grads], Grads]) -> None:
        self.name = name
        self.watch = watch

    def backward(self, xp: Any, g: Any, needs: Any, saved: Any, residual: Any) -> Sequence[Any]:
        likes, where = residual
        # Copies: what the engine hands over may be shared, broadcast or read-only.
        grads = [
            wrap(xp.zeros(shape, dtype) if one is None else xp.array(one, dtype), where)
            for one, (shape, dtype) in zip(g if isinstance(g, list) else [g], likes, strict=True)
        ]
        return [_array(*each) for each in zip(self.watch(tuple(grads)), likes, strict=True)]


def _array(g: Any, like: tuple[Any, Any]) -> Any:
    if g is None:
        return None
    shape, dtype = like
    if not isinstance(g, Tensor):
        raise DtypeError(f"backward hook: expected tensors or None, got {type(g).__name__}")
    if g._array.shape != shape:
        raise ShapeError(f"backward hook: a gradient of shape {g._array.shape} for a tensor of shape {shape}")
    return g._array.astype(dtype, copy=False)


def _tracked(values: Sequence[Any]) -> tuple[list[int], Grads]:
    """Which of the values gradients go to; and what stands for those of the others: zeros if they are tensors."""
    which = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x._edge is not None]
    if not which:
        return which, (None,) * len(values)
    rest = [
        zeros(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) and x._edge is None else None
        for x in values
    ]
    return which, tuple(rest)


def _through(gate: _Gate, values: tuple[Any, ...], which: list[int]) -> tuple[Any, ...]:
    """The values, those of `which` behind the gate."""
    if not which:
        return values
    tensors = [values[i] for i in which]
    where = tensors[0]._device
    residual = [(x._array.shape, x._array.dtype) for x in tensors], where
    edges = tuple([x._edge for x in tensors])
    kind = Node if len(tensors) == 1 else Joint
    node = kind(gate, where.xp, edges, (True,) * len(tensors), (), (), residual)
    places: list[Node] = [node]
    if isinstance(node, Joint):
        node.outputs = len(tensors)
        places = ports(node)
    out = list(values)
    for i, x, place in zip(which, tensors, places, strict=True):
        out[i] = wrap(x._array, x._device, x)
        out[i]._edge = place
    for observer in modes.state.observers:
        observer(node)
    return tuple(out)


def _filled(grads: Grads, which: list[int], rest: Grads) -> Grads:
    out = list(rest)
    for i, g in zip(which, grads, strict=True):
        out[i] = g
    return tuple(out)


def _substituted(name: str, result: Any, grads: Grads) -> Grads:
    if result is None:
        return grads
    if not isinstance(result, tuple):
        result = (result,)
    if len(result) != len(grads):
        raise ArgumentError(f"{name}: returned {len(result)} gradients, expected {len(grads)}")
    return result
