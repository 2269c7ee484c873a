"""Hooks of a module: functions that are called around its forward, its backward and its state dicts.

A module without hooks pays one attribute look-up per call. Backward hooks need two identity nodes in the graph: the
inputs of a call pass through one, its outputs through the other. Backward reaches the node of the outputs first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from ddp._engine import MultiOutputNode, Node, RemovableHandle, modes
from ddp._tensor.base import record, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp._tensor.gradients import gradient_array, gradient_tensors
from ddp.errors import ArgumentError, DtypeError

Hook = Callable[..., Any]
Grads = tuple[Any, ...]


# The hooks of one module, by kind: lists of (hook, *options), in the order of the calls. Kinds and their options:
# forward_pre (with_kwargs), forward (with_kwargs, always_call), backward_pre, backward, state_dict_pre,
# state_dict_post, load_state_dict_pre and load_state_dict_post.
Hooks = dict[str, list[tuple[Any, ...]]]


class HasHooks:
    """The hooks of a module. If a hook returns None, arguments, outputs and gradients stay unchanged.

    Registering a hook returns a handle. `handle.remove()` removes the hook, as does the end of a `with handle:` block.
    """

    _hooks_: Hooks | None = None  # a class attribute, so that a module without hooks needs no memory for them

    def _add_hook(self, name: str, entry: tuple[Any, ...], prepend: bool = False) -> RemovableHandle:
        if self._hooks_ is None:
            self.__dict__["_hooks_"] = {}
        hooks = cast(Hooks, self._hooks_).setdefault(name, [])
        hooks.insert(0 if prepend else len(hooks), entry)
        return RemovableHandle(hooks, entry)

    def _hooks(self, name: str) -> tuple[tuple[Any, ...], ...]:
        """The hooks of a kind, as a copy: a hook that is called may register or remove others."""
        return tuple(self._hooks_.get(name, ())) if self._hooks_ else ()

    def register_forward_pre_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Calls hook(module, args) before forward. Its result, a tuple or one value, replaces the positional arguments.

        with_kwargs: calls hook(module, args, kwargs), which returns (args, kwargs) or None; for another result, the
        call of the module raises DtypeError. prepend: calls the hook before the hooks that are registered already.
        """
        return self._add_hook("forward_pre", (hook, with_kwargs), prepend)

    def register_forward_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemovableHandle:
        """Calls hook(module, args, output) after forward. Its result replaces the output.

        with_kwargs: calls hook(module, args, kwargs, output). prepend: calls the hook before the hooks that are
        registered already. always_call: calls the hook even if forward or another hook raises. `output` is then the
        output so far, or None.
        """
        return self._add_hook("forward", (hook, with_kwargs, always_call), prepend)

    def register_full_backward_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Calls hook(module, grad_output) before backward enters the module. Its result replaces grad_output.

        grad_output: a tuple, one gradient for each result. If the hook returns another number of gradients, backward
        raises ArgumentError.
        """
        return self._add_hook("backward_pre", (hook,), prepend)

    def register_full_backward_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Calls hook(module, grad_input, grad_output) once backward has passed the module. Its result replaces
        grad_input.

        grad_input: a tuple, one gradient for each positional input; grad_output: one for each result. A tensor without
        a gradient has zeros, any other value None. If no input requires grad, grad_input has only None. The hook is
        then called as soon as grad_output is known, and must return None. If the hook's result does not fit, backward
        raises ArgumentError.
        """
        return self._add_hook("backward", (hook,), prepend)

    def register_state_dict_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, prefix, keep_vars) before this module's part of a state dict is taken."""
        return self._add_hook("state_dict_pre", (hook,))

    def register_state_dict_post_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, state_dict, prefix, local_metadata) after the parts of this module and its children were
        taken. The hook may change state_dict in place. local_metadata: an empty dict.
        """
        return self._add_hook("state_dict_post", (hook,))

    def register_load_state_dict_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        before this module is loaded. The hook may change state_dict, which is a copy of the dict with the same tensors,
        and add to the lists.
        """
        return self._add_hook("load_state_dict_pre", (hook,))

    def register_load_state_dict_post_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, incompatible_keys) after loading; keys that it removes from the lists raise no error."""
        return self._add_hook("load_state_dict_post", (hook,))

    def _call_with_hooks(self, forward: Hook, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        always = [entry for entry in self._hooks("forward") if entry[2]]
        output = None
        try:
            for hook, with_kwargs in self._hooks("forward_pre"):
                inputs, options = _run_pre_hook(self, hook, with_kwargs, inputs, options)
            backward = None
            if modes.state.enabled and (self._hooks("backward_pre") or self._hooks("backward")):
                backward = _BackwardHooks(self, len(inputs))
                inputs = backward.attach_inputs(inputs)
            output = forward(*inputs, **options)
            for entry in self._hooks("forward"):
                always = [other_entry for other_entry in always if other_entry is not entry]
                output = _run_forward_hook(self, entry, inputs, options, output)
            return output if backward is None else backward.attach_output(output)
        except Exception:
            for entry in always:
                try:
                    output = _run_forward_hook(self, entry, inputs, options, output)
                except Exception as error:  # the first error is raised
                    warnings.warn(f"a forward hook with always_call raised {error!r}", stacklevel=3)
            raise


def _run_pre_hook(
    module: Any, hook: Hook, with_kwargs: bool, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls a forward pre-hook, and returns the arguments as the hook has changed them."""
    result = hook(module, inputs, options) if with_kwargs else hook(module, inputs)
    if result is None:
        return inputs, options
    if not with_kwargs:
        return (result if isinstance(result, tuple) else (result,)), options
    if not (isinstance(result, tuple) and len(result) == 2):
        raise DtypeError(f"forward pre-hook: expected None or (args, kwargs), got {type(result).__name__}")
    return result


def _run_forward_hook(
    module: Any, entry: tuple[Any, ...], inputs: tuple[Any, ...], options: dict[str, Any], output: Any
) -> Any:
    hook, with_kwargs, _ = entry
    result = hook(module, inputs, options, output) if with_kwargs else hook(module, inputs, output)
    return output if result is None else result


class _BackwardHooks:
    """Calls the backward hooks for one call of a module, and holds the gradients for them."""

    def __init__(self, module: Any, inputs: int) -> None:
        self.module = module
        # Positions of the tensors that get gradients. The others have zeros or None as their gradients.
        self.input_positions: list[int] = []
        self.output_positions: list[int] = []
        self.other_grad_input: Grads = (None,) * inputs
        self.other_grad_output: Grads = (None,)
        self.grad_output: Grads = ()

    def attach_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Passes the inputs through an identity node."""
        self.input_positions, self.other_grad_input = _split_tracked(inputs)
        return _through_identity(_Identity("module_inputs", self._on_grad_input), inputs, self.input_positions)

    def attach_output(self, output: Any) -> Any:
        """Passes the outputs through an identity node. Returns an output that is neither tensor nor tuple unchanged."""
        outputs = output if isinstance(output, tuple) else (output,)
        self.output_positions, self.other_grad_output = _split_tracked(outputs)
        op = _Identity("module_outputs", self._on_grad_output)
        passed = _through_identity(op, outputs, self.output_positions)
        return passed if isinstance(output, tuple) else passed[0]

    def _on_grad_output(self, grads: Grads) -> Grads:
        grad_output = _merge(grads, self.output_positions, self.other_grad_output)
        for (hook,) in self.module._hooks("backward_pre"):
            grad_output = _replace("full backward pre-hook", hook(self.module, grad_output), grad_output)
        self.grad_output = grad_output if self.input_positions else ()
        if not self.input_positions:
            for (hook,) in self.module._hooks("backward"):
                if hook(self.module, (None,) * len(self.other_grad_input), grad_output) is not None:
                    raise ArgumentError("full backward hook: no input requires grad, so there is nothing to replace")
        return tuple(grad_output[i] for i in self.output_positions)

    def _on_grad_input(self, grads: Grads) -> Grads:
        grad_input = _merge(grads, self.input_positions, self.other_grad_input)
        for (hook,) in self.module._hooks("backward"):
            grad_input = _replace("full backward hook", hook(self.module, grad_input, self.grad_output), grad_input)
        self.grad_output = ()
        return tuple(grad_input[i] for i in self.input_positions)


class _Identity:
    """An op that returns its inputs. on_grads: takes the gradients as tensors, and returns the gradients to pass on."""

    saves: tuple[str, ...] = ()
    grad_out = False

    def __init__(self, name: str, on_grads: Callable[[Grads], Grads]) -> None:
        self.name = name
        self.on_grads = on_grads

    def backward(self, xp: Any, g: Any, needs: Any, saved: Any, residual: Any) -> Sequence[Any]:
        likes, device = residual
        grads = self.on_grads(tuple(gradient_tensors(g, likes, device)))
        return [gradient_array("backward hook", *pair) for pair in zip(grads, likes, strict=True)]


def _split_tracked(values: Sequence[Any]) -> tuple[list[int], Grads]:
    """The positions of the values that get gradients, and the gradients of the others: zeros for tensors, else None.

    If no value gets a gradient, all gradients are None.
    """
    positions = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.edge is not None]
    if not positions:
        return positions, (None,) * len(values)
    others = [
        zeros(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) and x.edge is None else None
        for x in values
    ]
    return positions, tuple(others)


def _through_identity(op: _Identity, values: tuple[Any, ...], positions: list[int]) -> tuple[Any, ...]:
    """Returns the values, with those at `positions` replaced by results of one node of `op`."""
    if not positions:
        return values
    tensors = [values[i] for i in positions]
    device = tensors[0].device
    residual = [(x.array.shape, x.array.dtype) for x in tensors], device
    edges = tuple([x.edge for x in tensors])
    node_class = Node if len(tensors) == 1 else MultiOutputNode
    node = node_class(op, device.xp, edges, (True,) * len(tensors), (), (), residual)
    views = [wrap(x.array, x.device, x) for x in tensors]
    record(node, views)
    return _merge(tuple(views), positions, values)


def _merge(grads: Grads, positions: list[int], others: Grads) -> Grads:
    """Returns `others` with `grads` at `positions`."""
    merged = list(others)
    for i, g in zip(positions, grads, strict=True):
        merged[i] = g
    return tuple(merged)


def _replace(name: str, result: Any, grads: Grads) -> Grads:
    """Returns a hook's result as a tuple, or `grads` for None. Raises: ArgumentError if their number is wrong."""
    if result is None:
        return grads
    if not isinstance(result, tuple):
        result = (result,)
    if len(result) != len(grads):
        raise ArgumentError(f"{name}: returned {len(result)} gradients, expected {len(grads)}")
    return result
