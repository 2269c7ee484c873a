"""`Module`: a tree of layers, their parameters and buffers, walked in the order in which they were assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from ddp._tensor.base import clear_grad, see
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError
from ddp.nn import _state

M = TypeVar("M", bound="Module")


class Parameter(Tensor):
    """A tensor that a module trains: assigned as an attribute, it is found by `parameters()`.

    data: shares its memory, as in PyTorch. Raises: DtypeError if it should require grad but is not floating.
    """

    __slots__ = ()

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Parameter:
        self = super().__new__(cls)
        self._array, self._device = data._array, data._device
        see(self, data)
        self._edge = self._end = self._grad = None
        return self.requires_grad_(requires_grad)

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


class Module:
    """The base of layers and models: subclasses call `super().__init__()`, assign parts, and define `forward`."""

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _transient: set[str]

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
        return self.forward(*inputs, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: call super().__init__() before assigning {name!r}")
        if isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            self.add_module(name, value)
        elif name in self._parameters:
            if value is not None:
                raise DtypeError(f"{name!r} is a parameter; assign a Parameter or None, not {type(value).__name__}")
            self._parameters[name] = None
        elif name in self._buffers and (value is None or isinstance(value, Tensor)):
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

    def _claim(self, name: str, own: dict[str, Any]) -> None:
        """Makes room for `name` in `own`. Raises: ArgumentError if it cannot be part of a path."""
        if not name or "." in name:
            raise ArgumentError(f"{type(self).__name__}: {name!r} cannot name a part: it is empty or holds a dot")
        self.__dict__.pop(name, None)
        for part in (self._parameters, self._buffers, self._modules):
            if part is not own:
                cast("dict[str, Any]", part).pop(name, None)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Adds a parameter, or None as its place. Raises: ArgumentError, DtypeError."""
        if param is not None and not isinstance(param, Parameter):
            raise DtypeError(f"register_parameter({name!r}): expected a Parameter, got {type(param).__name__}")
        self._claim(name, self._parameters)
        self._parameters[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Adds a tensor that is state but not trained; `persistent` ones are in the state dict.

        Raises: ArgumentError, DtypeError.
        """
        if tensor is not None and not isinstance(tensor, Tensor):
            raise DtypeError(f"register_buffer({name!r}): expected a Tensor, got {type(tensor).__name__}")
        self._claim(name, self._buffers)
        self._buffers[name] = tensor
        (self._transient.discard if persistent else self._transient.add)(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Adds a child. Raises: ArgumentError, DtypeError."""
        if module is not None and not isinstance(module, Module):
            raise DtypeError(f"add_module({name!r}): expected a Module, got {type(module).__name__}")
        self._claim(name, self._modules)
        self._modules[name] = module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct children with their names, each once."""
        seen: set[int] = set()
        for name, module in self._modules.items():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def children(self) -> Iterator[Module]:
        """The direct children, each once."""
        return (module for _, module in self.named_children())

    def named_modules(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths, parents first; each once, unless asked otherwise."""
        return self._walk(prefix, set() if remove_duplicate else None)

    def _walk(self, prefix: str, seen: set[int] | None) -> Iterator[tuple[str, Module]]:
        if seen is not None:
            if id(self) in seen:
                return
            seen.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module._walk(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        """This module and all below it, parents first, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The parameters with their paths; a tied one once, under its first path, unless asked otherwise."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters, tied ones once."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers with their paths, each once unless asked otherwise."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        modules = self.named_modules(prefix, remove_duplicate) if recurse else [(prefix, self)]
        for path, module in modules:
            for name, value in getattr(module, kind).items():
                if value is None or (remove_duplicate and id(value) in seen):
                    continue
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by path, as tensors outside the graph that share their memory."""
        return _state.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> _state.Incompatible:
        """Copies `state_dict` in, and returns what was missing and unexpected; nothing is copied if it raises.

        Raises: StateDictError listing all missing and unexpected keys (if strict) and all sizes that differ.
        """
        return _state.load_state_dict(self, state_dict, strict)

    def train(self: M, mode: bool = True) -> M:
        """Training mode for this module and all below it."""
        for module in self.modules():
            module.training = mode
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

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Calls `fn` on every module below this one, children first, and on this one last."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    def to(self: M, *target: Any, dtype: Any = None, device: Any = None) -> M:
        """Parameters and buffers in another dtype (the floating ones) or on another device; each stays the same object.

        Raises: DtypeError, DeviceError; GraphError if a parameter is watched, as under DataParallel. Then nothing has
        changed.
        """

        def converted(tensor: Tensor) -> Tensor | None:
            before = tensor.detach()
            after = before.to(*target, dtype=dtype, device=device)
            if after.dtype != before.dtype and not (before.is_floating_point() and after.is_floating_point()):
                after = before.to(device=after.device)
            return None if after._array is before._array else after

        tensors = (*self.parameters(), *self.buffers())
        for tensor in tensors:
            if tensor._end is not None and tensor._end.watcher is not None and converted(tensor) is not None:
                tensor._check_replaceable()
        for tensor in tensors:  # one at a time, so that no second copy of the whole model is held
            after = converted(tensor)
            if after is not None:
                tensor._replace(after._array, after._device)
        return self

    def half(self: M) -> M:
        """Floating parameters and buffers as float16."""
        return self.to("float16")

    def float(self: M) -> M:
        """Floating parameters and buffers as float32."""
        return self.to("float32")

    def double(self: M) -> M:
        """Floating parameters and buffers as float64."""
        return self.to("float64")

    def extra_repr(self) -> str:
        """What stands between the brackets of this module's line; subclasses define it."""
        return ""

    def __repr__(self) -> str:
        lines = [f"({name}): {module!r}".replace("\n", "\n  ") for name, module in self._modules.items()]
        head = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({head})"
        return f"{type(self).__name__}({head}\n  " + "\n  ".join(lines) + "\n)"
