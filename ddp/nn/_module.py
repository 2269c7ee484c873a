"""`Module`: layers and models. Its walks, conversions, hooks and state are each in a file of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from ddp._tensor.base import clear_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError
from ddp.nn import _state
from ddp.nn._conversion import Convertible
from ddp.nn._hooks import Hooked
from ddp.nn._parameter import Buffer, Parameter
from ddp.nn._walking import registered

__all__ = ["Module", "Parameter"]

M = TypeVar("M", bound="Module")


class Module(Convertible, Hooked):
    """The base of layers and models: subclasses call `super().__init__()`, assign parts, and define `forward`."""

    training: bool
    _nameless_: str | None = None  # the child whose state stands in state dicts under its own names alone

    def __init__(self) -> None:
        parts = self.__dict__
        parts["training"] = True
        parts["_parameters"] = {}
        parts["_buffers"] = {}
        parts["_modules"] = {}
        parts["_transient"] = set()  # buffers that the state dict leaves out

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What calling the module computes; subclasses define it. Raises: NotImplementedError where they do not."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        try:
            if self._hooks_ is None:
                return self.forward(*inputs, **options)
            return self._call_with_hooks(inputs, options)
        except AttributeError as error:
            wrong = [type(x).__name__ for x in inputs if not isinstance(x, Tensor)]
            if not wrong or not type(self).__module__.startswith("ddp.nn"):
                raise
            raise DtypeError(
                f"{type(self).__name__}: expected tensors, got {wrong[0]}; as_tensor() makes one"
            ) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: call super().__init__() before assigning {name!r}")
        if isinstance(value, Parameter):
            self._place(name, value, self._parameters)
        elif isinstance(value, Module):
            self._place(name, value, self._modules)
        elif isinstance(value, Buffer):
            self._place(name, value, self._buffers)
            (self._transient.discard if value.persistent else self._transient.add)(name)
        elif name in self._parameters:
            if value is not None:
                raise DtypeError(f"{name!r} is a parameter; assign a Parameter or None, not {type(value).__name__}")
            self._parameters[name] = None
        elif name in self._buffers:
            if value is not None and not isinstance(value, Tensor):
                raise DtypeError(f"{name!r} is a buffer; assign a Tensor or None, not {type(value).__name__}")
            self._buffers[name] = value
        elif name in self._modules:
            if value is not None:
                raise DtypeError(f"{name!r} is a module; assign a Module or None, not {type(value).__name__}")
            self._modules[name] = None
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Only names that are no plain attribute arrive here.
        for kind in ("_parameters", "_buffers", "_modules"):
            found = self.__dict__.get(kind, {})
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for part in (self._parameters, self._buffers, self._modules):
            if name in part:
                del part[name]
                self._transient.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> Iterable[str]:
        parts = (*self._parameters, *self._buffers, *self._modules)
        return sorted({*super().__dir__(), *(name for name in parts if not name[0].isdigit())})

    def _place(self, name: str, value: Any, own: Any) -> None:
        """Puts a part under `name`, in place of what bore it. Raises: ArgumentError if it cannot be in a path."""
        if not isinstance(name, str):
            raise DtypeError(f"{type(self).__name__}: a name is a string, not {type(name).__name__}")
        if not name or "." in name:
            raise ArgumentError(f"{type(self).__name__}: {name!r} cannot name a part: it is empty or holds a dot")
        self.__dict__.pop(name, None)
        for part in (self._parameters, self._buffers, self._modules):
            if part is not own:
                cast("dict[str, Any]", part).pop(name, None)
        self._transient.discard(name)
        own[name] = value
        registered()

    def _claim(self, name: str, own: Mapping[str, Any]) -> None:
        """Raises: ArgumentError if something else bears that name, which the part would hide, or be hidden by."""
        if isinstance(name, str) and name not in own and hasattr(self, name):
            raise ArgumentError(f"{type(self).__name__}: attribute {name!r} is there already")

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Adds a parameter, or None as its place. Raises: ArgumentError, DtypeError."""
        if param is not None and not isinstance(param, Parameter):
            raise DtypeError(f"register_parameter({name!r}): expected a Parameter, got {type(param).__name__}")
        self._claim(name, self._parameters)
        self._place(name, param, self._parameters)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Adds a tensor that is state but not trained; `persistent` ones are in the state dict.

        Raises: ArgumentError, DtypeError.
        """
        if tensor is not None and not isinstance(tensor, Tensor):
            raise DtypeError(f"register_buffer({name!r}): expected a Tensor, got {type(tensor).__name__}")
        self._claim(name, self._buffers)
        self._place(name, tensor, self._buffers)
        (self._transient.discard if persistent else self._transient.add)(name)

    def register_module(self, name: str, module: Module | None) -> None:
        """Adds a child. Raises: ArgumentError, DtypeError."""
        self.add_module(name, module)

    def add_module(self, name: str, module: Module | None) -> None:
        """Adds a child. Raises: ArgumentError, DtypeError."""
        if module is not None and not isinstance(module, Module):
            raise DtypeError(f"add_module({name!r}): expected a Module, got {type(module).__name__}")
        self._claim(name, self._modules)
        self._place(name, module, self._modules)

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Parameters and persistent buffers by path, as tensors outside the graph that share their memory.

        destination: a dict to add to; prefix: before every path; keep_vars: the parameters and buffers themselves.
        """
        return _state.state_dict(self, {} if destination is None else destination, prefix, keep_vars)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _state.Incompatible:
        """Copies `state_dict` in, and returns what was missing and unexpected; nothing is copied if it raises.

        state_dict: paths and tensors, also PyTorch's or arrays
        assign: the given tensors become the module's, in their dtype and on their device, instead of being copied.

        Raises: StateDictError listing all missing and unexpected keys (if strict) and all sizes that differ.
        """
        return _state.load_state_dict(self, state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads this module's own part of a state dict, children apart: for subclasses to extend, as in PyTorch.

        state_dict: what begins with `prefix`, to read and to change
        missing_keys, unexpected_keys, error_msgs: where what does not fit goes

        A module that overrides this is loaded at once, also if other modules turn out not to fit.
        """
        before = len(error_msgs)
        given = state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        writes = _state.planned(self, *given)
        if len(error_msgs) == before:
            for write in writes:
                write()

    def get_extra_state(self) -> Any:
        """What the state dict should hold besides tensors; a subclass that defines it defines set_extra_state too."""
        raise NotImplementedError(f"{type(self).__name__} defines no get_extra_state()")

    def set_extra_state(self, state: Any) -> None:
        """Takes back what get_extra_state returned."""
        raise NotImplementedError(f"{type(self).__name__} defines no set_extra_state()")

    def train(self: M, mode: bool = True) -> M:
        """Training mode for this module and all below it, whose own train() is called. Raises: DtypeError."""
        if not isinstance(mode, bool):
            raise DtypeError(f"train: mode is True or False, not {mode!r}")
        self.training = mode
        for module in self.children():
            module.train(mode)
        return self

    def eval(self: M) -> M:
        """Evaluation mode for this module and all below it."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Turns the gradients of all parameters on or off."""
        for param in self.parameters():
            param.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the gradients of all parameters; not `set_to_none`: those that are there become zeros, and stay."""
        for param in self.parameters():
            clear_grad(param, set_to_none)

    def extra_repr(self) -> str:
        """What stands between the brackets of this module's text; subclasses define it."""
        return ""

    def _children_text(self) -> list[str]:
        return [f"({name}): {module!r}" for name, module in self._modules.items()]

    def __repr__(self) -> str:
        name, head, below = type(self).__name__, self.extra_repr(), self._children_text()
        lines = head.split("\n") if head else []
        if len(lines) < 2 and not below:
            return f"{name}({head})"
        return f"{name}(\n  " + "\n  ".join([*lines, *(each.replace("\n", "\n  ") for each in below)]) + "\n)"
