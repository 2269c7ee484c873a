"""`Module`: the base of layers and models. It holds parameters, buffers and child modules, and finds them by path.

Hooks are in hooks.py, state dicts in state_dict.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar, cast

from ddp._tensor.base import clear_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp._tensor.dtypes import is_float
from ddp._tensor.storage import conversion_target, move_to_shared_memory
from ddp.errors import ArgumentError, DtypeError
from ddp.nn.hooks import HasHooks
from ddp.nn.parameter import Buffer, Parameter
from ddp.nn.state_dict import HasStateDict
from ddp.ops.memory_formats import memory_format, preserve_format

M = TypeVar("M", bound="Module")

_registrations = 0


def note_registration() -> None:
    """Adds one to `registration_count`: a module got a new parameter, buffer or child, or a new list of children."""
    global _registrations
    _registrations += 1


def registration_count() -> int:
    """The number of times that parameters, buffers or children were registered in modules, or replaced there.

    Not counted: load_state_dict(assign=True), assigning None or a plain tensor to an existing name, and removals. But a
    removal from a Sequential or a ModuleList counts, because it registers the remaining children again.
    """
    return _registrations


class Module(HasStateDict, HasHooks):
    """The base of layers and models: subclasses call `super().__init__()`, assign parts, and define `forward`."""

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _non_persistent_buffers_set: set[str]  # names of buffers that are not in the state dict
    # The settings that `repr` shows, separated by spaces; "name=" shows a setting with its name.
    _shown: ClassVar[str] = ""
    # Settings by name, with their usual values: `repr` shows a setting only if it has another value.
    _usual: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        parts: dict[str, Any] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
        self.__dict__.update(training=True, **parts, _non_persistent_buffers_set=set())

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Computes the result of a call. Subclasses define it. Raises: NotImplementedError if they do not."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        try:
            if self._hooks_ is None:
                return self.forward(*inputs, **options)
            return self._call_with_hooks(self.forward, inputs, options)
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
        if name in self._computed():
            raise ArgumentError(f"{name!r} is computed: assign to what it is computed of, in `parametrizations`")
        if isinstance(value, Parameter):
            self._put(name, value, self._parameters)
        elif isinstance(value, Module):
            self._put(name, value, self._modules)
        elif isinstance(value, Buffer):
            self._put(name, value, self._buffers)
            self._set_persistent(name, value.persistent)
        elif name in self._parameters or name in self._buffers or name in self._modules:
            for attribute, word, wanted in _PARTS:
                if name in self.__dict__[attribute]:
                    if value is not None and not (word == "buffer" and isinstance(value, Tensor)):
                        message = f"{name!r} is a {word}; assign a {wanted.__name__} or None"
                        raise DtypeError(f"{message}, not {type(value).__name__}")
                    self.__dict__[attribute][name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not plain attributes.
        own = self.__dict__
        if "_parameters" in own:
            for part in (own["_parameters"], own["_buffers"], own["_modules"]):
                if name in part:
                    return part[name]
            if name in (computed := self._computed()):
                return computed[name]()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _computed(self) -> Any:
        """The parametrizations of this module's tensors, by name: see nn.utils.parametrize."""
        return self.__dict__["_modules"].get("parametrizations", ())

    def __delattr__(self, name: str) -> None:
        for part in (self._parameters, self._buffers, self._modules):
            if name in part:
                del part[name]
                self._non_persistent_buffers_set.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> Iterable[str]:
        parts = (*self._parameters, *self._buffers, *self._modules)
        return sorted({*super().__dir__(), *(name for name in parts if not name[0].isdigit())})

    def _put(self, name: str, value: Any, own: Any) -> None:
        """Puts a part under `name`, in place of the previous one. Raises: ArgumentError, DtypeError for a bad name."""
        if not isinstance(name, str):
            raise DtypeError(f"{type(self).__name__}: a name is a string, not {type(name).__name__}")
        if not name or "." in name:
            raise ArgumentError(f"{type(self).__name__}: {name!r} cannot name a part: it is empty or holds a dot")
        self.__dict__.pop(name, None)
        for part in (self._parameters, self._buffers, self._modules):
            if part is not own:
                cast("dict[str, Any]", part).pop(name, None)
        self._non_persistent_buffers_set.discard(name)
        own[name] = value
        note_registration()

    def _register(self, function: str, cls: type, name: str, value: Any, own: Any) -> None:
        """Adds a part. Raises: DtypeError unless it is a `cls` or None; ArgumentError for a bad name, or one in use."""
        if value is not None and not isinstance(value, cls):
            raise DtypeError(f"{function}({name!r}): expected a {cls.__name__}, got {type(value).__name__}")
        if isinstance(name, str) and name not in own and hasattr(self, name):
            raise ArgumentError(f"{type(self).__name__}: attribute {name!r} exists already")
        self._put(name, value, own)

    def _set_persistent(self, name: str, persistent: bool) -> None:
        names = self._non_persistent_buffers_set
        (names.discard if persistent else names.add)(name)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Adds a parameter, or None as a placeholder.

        Raises: DtypeError for another type; ArgumentError for a name that is empty, has a dot or belongs to another
        attribute.
        """
        self._register("register_parameter", Parameter, name, param, self._parameters)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Adds a tensor that is state but not trained, or None as a placeholder.

        persistent: whether the state dict holds the tensor. Raises: as register_parameter.
        """
        self._register("register_buffer", Tensor, name, tensor, self._buffers)
        self._set_persistent(name, persistent)

    def register_module(self, name: str, module: Module | None) -> None:
        """Adds a child, or None as a placeholder. Raises: as register_parameter."""
        self.add_module(name, module)

    def add_module(self, name: str, module: Module | None) -> None:
        """Adds a child, or None as a placeholder. Raises: as register_parameter."""
        self._register("add_module", Module, name, module, self._modules)

    registration_count = staticmethod(registration_count)  # for packages that must not import ddp.nn

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

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths, parents first. remove_duplicate: yields each module once.

        memo: a set, used only with remove_duplicate. A module in it is not yielded, and its children are not searched.
        Every module that is yielded is added to the set.
        """
        seen = set() if memo is None else memo
        if remove_duplicate:
            if self in seen:
                return
            seen.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                path = f"{prefix}.{name}" if prefix else name
                yield from module.named_modules(seen, path, remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """This module and all below it, parents first, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The parameters with their paths. remove_duplicate: yields a tied parameter once, with its first path."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters, tied ones once."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers with their paths. remove_duplicate: yields each buffer once."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, attribute: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]
        for path, module in modules:
            for name, value in getattr(module, attribute).items():
                if value is None or (remove_duplicate and id(value) in seen):
                    continue
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value

    def get_submodule(self, target: str) -> Module:
        """The module at path `target`, like "encoder.0"; "": this module. Raises: AttributeError if there is none."""
        module: Module = self
        for name in target.split(".") if target else ():
            below = module._modules.get(name)
            if below is None:
                raise AttributeError(f"{type(self).__name__} has no module {target!r}: {name!r} is not there")
            module = below
        return module

    def get_parameter(self, target: str) -> Parameter:
        """The parameter at the path `target`. Raises: AttributeError if there is none."""
        return self._get("_parameters", "parameter", target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer at the path `target`. Raises: AttributeError if there is none."""
        return self._get("_buffers", "buffer", target)

    def _get(self, attribute: str, word: str, target: str) -> Any:
        path, _, name = target.rpartition(".")
        member = getattr(self.get_submodule(path), attribute).get(name)
        if member is None:
            raise AttributeError(f"{type(self).__name__} has no {word} {target!r}")
        return member

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Calls `fn` on every module below this module, children first, and then on this module."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    def train(self: M, mode: bool = True) -> M:
        """Sets training mode (False: evaluation mode), and calls train() of the children.

        Raises: DtypeError unless `mode` is True or False.
        """
        if not isinstance(mode, bool):
            raise DtypeError(f"train: mode is True or False, not {mode!r}")
        self.training = mode
        for module in self.children():
            module.train(mode)
        return self

    def eval(self: M) -> M:
        """Sets evaluation mode for this module and all below it."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Sets `requires_grad` of all parameters.

        Raises: DtypeError if it is set to True for a parameter that is not floating.
        """
        for param in self.parameters():
            param.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all parameters; set_to_none=False: sets existing gradients to zero instead."""
        for param in self.parameters():
            clear_grad(param, set_to_none)

    def to(
        self: M,
        *target: Any,
        dtype: Any = None,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: memory_format = preserve_format,
    ) -> M:
        """Changes dtype, device, or both of parameters and buffers, in place: to("cuda"), to(ddp.float64), to(tensor).

        Only floating tensors change their dtype. Gradients are converted, too.
        non_blocking: accepted, and ignored: copies between host and device are always ordered with computations.
        memory_format: accepted, and ignored: parameters keep their order in memory, which buckets and updates rely on.
        For convolutions with channels last, convert the images: a convolution copies its filters, which are small, to
        the format of its images.

        Raises: DtypeError unless the dtype is floating; DeviceError; GraphError if a parameter that would change
        has a gradient-ready hook, as under DataParallel. If it raises one of these errors, nothing has changed.
        """
        dtype, device = conversion_target(target, dtype, device)
        if dtype is not None and not is_float(dtype):
            raise DtypeError(f"{type(self).__name__}: expected a floating dtype, got {dtype}")

        def converted(tensor: Tensor) -> Tensor | None:
            before = tensor.detach()
            after = before.to(dtype=dtype if before.is_floating_point() else None, device=device)
            return None if after.array is before.array else after

        tensors = (*self.parameters(), *self.buffers())
        for tensor in tensors:
            leaf = tensor.accumulate_grad
            if leaf is not None and leaf.ready_hook is not None and converted(tensor) is not None:
                tensor.check_replaceable()
        for tensor in tensors:  # one at a time, so that no second copy of the whole model is held
            after = converted(tensor)
            if after is not None:
                tensor.replace_storage(after.array, after.device)
        return self

    def share_memory(self: M) -> M:
        """Moves parameters and buffers on the CPU into one block of shared memory. Those in shared memory stay there.

        Other processes can map the block. Tied parameters stay tied; gradients stay in private memory.

        Raises: SharingError if the system gives no memory.
        """
        move_to_shared_memory([*self.parameters(), *self.buffers()])
        return self

    def type(self: M, dst_type: Any) -> M:
        """Converts floating parameters and buffers to `dst_type`. Raises: as `to`."""
        return self.to(dtype=dst_type)

    def half(self: M) -> M:
        """Converts floating parameters and buffers to float16."""
        return self.to(dtype="float16")

    def bfloat16(self: M) -> M:
        """Converts floating parameters and buffers to bfloat16."""
        return self.to(dtype="bfloat16")

    def float(self: M) -> M:
        """Converts floating parameters and buffers to float32."""
        return self.to(dtype="float32")

    def double(self: M) -> M:
        """Converts floating parameters and buffers to float64."""
        return self.to(dtype="float64")

    def cpu(self: M) -> M:
        """Moves parameters and buffers to the CPU."""
        return self.to(device="cpu")

    def cuda(self: M, device: Any = None) -> M:
        """Moves parameters and buffers to a CUDA device. device: the device or its index; None: the current one.

        Raises: DeviceError if there is none; GraphError as in `to`.
        """
        return self.to(device=f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def extra_repr(self) -> str:
        """The text between the brackets of the module's `repr`: the settings in `_shown` and `_usual`."""
        texts = []
        for word in (*self._shown.split(), *(f"{name}=" for name in self._usual)):
            name, named, _ = word.partition("=")
            value = getattr(self, name)
            if name == "bias":
                value = value is not None and value is not False
            usual = self._usual.get(name, self)  # a setting that `_usual` lacks is always shown
            if value not in (usual, (usual,), (usual,) * 2, (usual,) * 3):  # or a tuple with `usual` for each dimension
                texts.append(f"{name}={value}" if named else f"{value}")
        return ", ".join(texts)

    def _children_text(self) -> list[str]:
        return [f"({name}): {module!r}" for name, module in self._modules.items()]

    def __repr__(self) -> str:
        name = type(self).__name__
        head = self.extra_repr()
        below = self._children_text()
        lines = head.split("\n") if head else []
        if len(lines) < 2 and not below:
            return f"{name}({head})"
        return f"{name}(\n  " + "\n  ".join([*lines, *(text.replace("\n", "\n  ") for text in below)]) + "\n)"


# For each kind of part: the attribute of a module that holds it, its name in messages, and its class.
_PARTS = (("_parameters", "parameter", Parameter), ("_buffers", "buffer", Tensor), ("_modules", "module", Module))


class _SettingsSignature:
    """The descriptor of `__signature__`: makes `help` and editors show the arguments of the layer's function."""

    def __get__(self, layer: Any, owner: type[FunctionModule]) -> inspect.Signature:
        if owner.__init__ is not FunctionModule.__init__:
            raise AttributeError("__signature__")  # without it, `inspect` reads the signature of __init__
        return owner._signature()


class Layer(Module):
    """The base of layers. Keywords of a class statement set ClassVars: `class PReLU(Layer, shown=...)` sets _shown."""

    def __init_subclass__(cls, **named: Any) -> None:
        annotations = {
            name: str(annotation) for base in cls.__mro__ for name, annotation in inspect.get_annotations(base).items()
        }
        own = {name: named.pop(name) for name in tuple(named) if "ClassVar" in annotations.get(f"_{name}", "")}
        super().__init_subclass__(**named)
        for name, value in own.items():
            setattr(cls, f"_{name}", staticmethod(value) if name == "function" else value)

    def _register_empty(self, device: Any, dtype: Any, **shapes: tuple[int, ...] | None) -> None:
        """Registers an uninitialized parameter for each shape, and None as the parameter if the shape is None."""
        for name, shape in shapes.items():
            parameter = None if shape is None else Parameter(empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)


class FunctionModule(Layer):
    """A layer without parameters: keeps its settings as attributes, and calls its function with inputs and settings.

    A subclass is made with `function=`. Its settings are the arguments of the function after the inputs, in their
    order, without the omitted ones. If PyTorch's layer takes other arguments, the subclass has its own `__init__`,
    which passes them to `_init`.

    inputs: number of arguments of the function that come with each call; omitted: arguments that the layer lacks
    """

    _function: ClassVar[Callable[..., Any]]
    _inputs: ClassVar[int] = 1
    _omitted: ClassVar[tuple[str, ...]] = ("out",)
    _settings: tuple[str, ...]
    __signature__ = _SettingsSignature()

    def __init__(self, *settings: Any, **named: Any) -> None:
        bound = self._signature().bind(*settings, **named)
        bound.apply_defaults()
        self._init(**bound.arguments)

    @classmethod
    def _signature(cls) -> inspect.Signature:
        arguments = list(inspect.signature(cls._function).parameters.values())[cls._inputs :]
        return inspect.Signature([argument for argument in arguments if argument.name not in cls._omitted])

    def _init(self, **settings: Any) -> None:
        super().__init__()
        self._settings = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """inputs: see the class for their shapes."""
        return self._function(*inputs, **named, **{name: getattr(self, name) for name in self._settings})

    def extra_repr(self) -> str:
        return (
            super().extra_repr()
            if self._shown
            else ", ".join(f"{name}={getattr(self, name)}" for name in self._settings)
        )
