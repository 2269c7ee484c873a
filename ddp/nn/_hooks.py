"""Hooks: functions that look on while a module is called, while backward passes it, or while its state is taken.

A module without hooks pays one look at an attribute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

from ddp._engine import RemovableHandle, modes
from ddp.errors import DtypeError
from ddp.nn._passage import Passage

Hook = Callable[..., Any]


class HookLists:
    """The hooks of one module, each list in the order in which they are called."""

    def __init__(self) -> None:
        self.before: list[tuple[Hook, bool]] = []  # hook, with_kwargs
        self.after: list[tuple[Hook, bool, bool]] = []  # hook, with_kwargs, always_call
        self.backward_before: list[tuple[Hook]] = []
        self.backward_after: list[tuple[Hook]] = []
        self.saving: list[tuple[Hook]] = []
        self.saved: list[tuple[Hook]] = []
        self.loading: list[tuple[Hook]] = []
        self.loaded: list[tuple[Hook]] = []


def _put(hooks: list[Any], entry: Any, prepend: bool = False) -> RemovableHandle:
    hooks.insert(0 if prepend else len(hooks), entry)
    return RemovableHandle(hooks, entry)


class Hooked:
    """The hooks of a module. Each registration returns a handle: `handle.remove()`, or `with` it."""

    _hooks_: HookLists | None = None  # on the class: a module without hooks carries none

    @property
    def _own_hooks(self) -> HookLists:
        if self._hooks_ is None:
            self.__dict__["_hooks_"] = HookLists()
        return cast(HookLists, self._hooks_)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What calling the module computes."""
        raise NotImplementedError

    def register_forward_pre_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Calls hook(module, args) before forward; what it returns, a tuple or one value, replaces the arguments.

        with_kwargs: hook(module, args, kwargs), which returns (args, kwargs). prepend: before all others.
        """
        return _put(self._own_hooks.before, (hook, with_kwargs), prepend)

    def register_forward_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemovableHandle:
        """Calls hook(module, args, output) after forward; what it returns replaces the output.

        with_kwargs: hook(module, args, kwargs, output). prepend: before all others. always_call: also where the call
        raises, with the output so far, or None.
        """
        return _put(self._own_hooks.after, (hook, with_kwargs, always_call), prepend)

    def register_full_backward_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Calls hook(module, grad_output) before backward passes the module; what it returns replaces grad_output.

        grad_output: a tuple, one gradient for each result.
        """
        return _put(self._own_hooks.backward_before, (hook,), prepend)

    def register_full_backward_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Calls hook(module, grad_input, grad_output) once backward has passed the module; what it returns replaces
        grad_input.

        grad_input, grad_output: tuples, one gradient for each positional input and each result, None where there is
        none. Where no input requires grad the hook is called when grad_output is there, and returns None.
        """
        return _put(self._own_hooks.backward_after, (hook,), prepend)

    def register_state_dict_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, prefix, keep_vars) before this module's part of a state dict is taken."""
        return _put(self._own_hooks.saving, (hook,))

    def register_state_dict_post_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, state_dict, prefix, local_metadata) after this module's part was taken, to change it in
        place. local_metadata: an empty dict.
        """
        return _put(self._own_hooks.saved, (hook,))

    def register_load_state_dict_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        before anything is loaded, to change state_dict, a copy, or to add to the lists.
        """
        return _put(self._own_hooks.loading, (hook,))

    def register_load_state_dict_post_hook(self, hook: Hook) -> RemovableHandle:
        """Calls hook(module, incompatible_keys) after loading; what it takes out of these lists is no error."""
        return _put(self._own_hooks.loaded, (hook,))

    def _call_with_hooks(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        hooks = self._own_hooks
        waiting = [entry for entry in hooks.after if entry[2]]
        output = None
        try:
            for hook, with_kwargs in tuple(hooks.before):
                inputs, options = _replaced(self, hook, with_kwargs, inputs, options)
            passage = None
            if (hooks.backward_before or hooks.backward_after) and modes.state.enabled:
                passage = Passage(self, hooks.backward_before, hooks.backward_after, len(inputs))
                inputs = passage.enter(inputs)
            output = self.forward(*inputs, **options)
            for entry in tuple(hooks.after):
                waiting = [each for each in waiting if each is not entry]
                output = _after(self, entry, inputs, options, output)
            return output if passage is None else passage.leave(output)
        except Exception:
            for entry in waiting:
                try:
                    output = _after(self, entry, inputs, options, output)
                except Exception as error:  # the first error is the one to tell
                    warnings.warn(f"a forward hook with always_call raised {error!r}", stacklevel=3)
            raise


def _replaced(
    module: Any, hook: Hook, with_kwargs: bool, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if with_kwargs:
        result = hook(module, inputs, options)
        if result is None:
            return inputs, options
        if not (isinstance(result, tuple) and len(result) == 2):
            raise DtypeError(f"forward pre-hook: expected None or (args, kwargs), got {type(result).__name__}")
        return result
    result = hook(module, inputs)
    if result is None:
        return inputs, options
    return (result if isinstance(result, tuple) else (result,)), options


def _after(
    module: Any, entry: tuple[Hook, bool, bool], inputs: tuple[Any, ...], options: dict[str, Any], output: Any
) -> Any:
    hook, with_kwargs, _ = entry
    result = hook(module, inputs, options, output) if with_kwargs else hook(module, inputs, output)
    return output if result is None else result
