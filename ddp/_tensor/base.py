"""The state of a tensor: its array, its device, its place in the graph, its gradient.

`apply` runs every op on tensors: it unwraps their arrays, runs the forward, and records a node where needed.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ddp._device import CPU, device_of, on, to_device
from ddp._device import device as Device
from ddp._engine import Leaf, MultiOutputNode, Node, Version, Versions, modes, output_nodes, stream_sync
from ddp._engine.anomaly import user_line
from ddp._engine.grad_buffer import ZEROED
from ddp.errors import DeviceError, DtypeError, GraphError, InplaceError, ParallelError, ShapeError
from ddp.ops.arrays import BFLOAT16, Array
from ddp.ops.op import Op

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor as Tensor
else:
    Tensor = Any  # for annotations only: `core` imports this module

Tensors = tuple[Tensor, ...]
TensorFunction = Callable[..., Tensor]
Parameters = dict[str, Any]  # the parameters of an op, by name
Self = TypeVar("Self", bound="TensorBase")
F = TypeVar("F", bound=Callable[..., Any])


class TensorBase:
    """Storage, graph and gradient of a tensor; see `Tensor`."""

    # `__dict__` holds attributes that users set, as in `p.no_decay = True`. Python creates it with the first attribute.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_device",
        "_epoch",
        "accumulate_grad",
        "array",
        "edge",
        "grad_view",
        "version",
    )
    array: Array  # the raw array
    _device: Device
    edge: Node | Leaf | None  # where this tensor's gradient goes in backward; None if requires_grad is off
    accumulate_grad: Leaf | None  # where this tensor's gradient is accumulated; kept while requires_grad is off
    _epoch: int  # the epoch of `version` in which `edge` is valid; -1 for a detached tensor
    grad_view: Tensor | None  # the tensor over the gradient buffer that `grad` returns; None until there is one
    version: Version

    @property
    def device(self) -> Device:
        """The device that holds the memory."""
        return self._device

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes a gradient for this tensor, or passes through it."""
        return self.edge is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Turns the gradient of a leaf on or off, and returns the tensor.

        Raises: DtypeError if it is turned on and the tensor is not floating; GraphError if it is turned off on the
        result of an op.
        """
        if isinstance(self.edge, Node):
            if not requires_grad:
                raise GraphError("requires_grad_(False): this tensor is the result of an op; use detach()")
        elif requires_grad:
            if self.array.dtype.kind not in FLOATS:
                raise DtypeError(f"requires_grad: only floating tensors have gradients, not {self.array.dtype}")
            version = self.version
            if self.accumulate_grad is None and version.base is not None and version.base() is self:
                # Existing views become stale: they have no edge, so no gradient would flow through them.
                version.epoch = self._epoch = version.epoch + 1
            self.edge = self.leaf
        else:
            self.edge = None
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded op computed this tensor."""
        return not isinstance(self.edge, Node)

    @property
    def leaf(self) -> Leaf:
        if self.accumulate_grad is None:
            array = self.array
            self.accumulate_grad = Leaf(array.shape, array.dtype, self._device.xp, weakref.ref(self))
        return self.accumulate_grad

    @property
    def grad(self) -> Tensor | None:
        """The gradient: None if there is none, else a tensor of this shape that shares the gradient buffer's memory.

        Assigning a tensor copies it into the buffer; assigning None and `del` empty the buffer.

        Raises: ShapeError if a tensor of another shape is assigned; DtypeError if the value has another dtype or
        device, or is not a tensor; ParallelError on reading if each rank has a part of the gradient (ZeroOptimizer).
        """
        if self.accumulate_grad is None or not self.accumulate_grad.grad_buffer.full:
            return None
        buffer = self.accumulate_grad.grad_buffer
        if buffer.read_error is not None:
            raise ParallelError(buffer.read_error)
        buffer.lend()
        if self.grad_view is None or self.grad_view.array is not buffer.array:
            self.grad_view = wrap(buffer.array, self._device)
        return self.grad_view

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            clear_grad(self, True)
            return
        like = self.array.dtype, self._device
        if not isinstance(value, TensorBase) or (value.array.dtype, value._device) != like:
            got = f"{value.dtype} on {value.device}" if isinstance(value, TensorBase) else type(value).__name__
            raise DtypeError(f"grad: expected a tensor of {like[0]} on {like[1]}, got {got}")
        if value.array.shape != self.array.shape:
            raise ShapeError(f"grad: a tensor of shape {self.array.shape} was given one of {value.array.shape}")
        with on(self._device):
            self.leaf.grad_buffer.set(value.array)

    @grad.deleter
    def grad(self) -> None:
        clear_grad(self, True)

    def check_replaceable(self) -> None:
        """Checks that this tensor may get a new leaf. Raises: GraphError if its leaf has a gradient-ready hook."""
        if self.accumulate_grad is not None and self.accumulate_grad.ready_hook is not None:
            raise GraphError("a wrapped parameter cannot change shape, dtype or device; convert before wrapping")

    def replace_storage(self, array: Array, device: Device) -> None:
        """Makes `array`, which is on `device`, this leaf's memory, and converts its gradient to that dtype and device.

        array: of the same shape if the leaf has a gradient. Raises: GraphError if the leaf has a gradient-ready hook.
        """
        self.check_replaceable()
        leaf = self.accumulate_grad
        self.array = array
        self._device = device
        self.version = Version()
        self._epoch = 0
        self.accumulate_grad = self.grad_view = None
        if leaf is not None:
            if leaf.grad_buffer.full:
                self.leaf.grad_buffer.set(to_device(leaf.grad_buffer.array, device))
            if self.edge is not None:
                self.edge = self.leaf


def share_storage(self: Self, data: TensorBase) -> Self:
    """Makes the new object `self` a tensor over the memory of `data`, outside the graph, and returns it."""
    self.array = data.array
    self._device = data._device
    self.edge = self.accumulate_grad = self.grad_view = None
    alias(self, data)
    return self


def wrap(array: Array, device: Device, like: TensorBase | None = None) -> Tensor:
    """A tensor over `array`, outside the graph. like: a tensor over the same memory, whose version is shared."""
    cls = _plain[0]
    self = cls.__new__(cls)
    self.array = array
    self._device = device
    self.edge = self.accumulate_grad = self.grad_view = None
    if like is None:
        self.version = Version()
        self._epoch = 0
    else:
        alias(self, like)
    return self


def restore_tensors(arrays: Sequence[Any], edges: Sequence[Any], versions: Versions) -> list[Tensor | None]:
    """Makes tensors over the arrays that a node saved, with these edges; None for values that are not arrays.

    The tensors share the versions of the saved ones, so that a node that saves them again notices writes.
    """
    counters = {position: version for version, _, position in versions}
    restored: list[Tensor | None] = []
    for i, (array, edge) in enumerate(zip(arrays, edges, strict=True)):
        x = wrap(array, device_of(array)) if hasattr(array, "dtype") else None
        if x is not None:
            x.edge = edge
            x.version = counters.get(i, x.version)
            x._epoch = x.version.epoch
        restored.append(x)
    return restored


def alias(view: TensorBase, x: TensorBase) -> None:
    """Makes `view`, which shares the memory of `x`, share the version of `x`, too."""
    version = view.version = x.version
    if x._epoch < 0:  # from here on a recorded write into one of the two makes the other stale
        x._epoch = version.epoch
    view._epoch = x._epoch
    if version.base is None or version.base() is None:
        version.base = weakref.ref(x)


# The class of results, `Tensor`. `core` appends it: this module cannot import `core`, which imports this module.
_plain: list[type[Tensor]] = []


# A context in which NumPy does not warn of infinities and nan: they are values, as in PyTorch. Copying and entering a
# context takes less than a fifth of the time of `errstate`. This context begins empty: a copy of the context of the
# importing thread would keep the values of context variables alive, and show them to the ops of every thread.
_silent = contextvars.Context()
_silent.run(np.seterr, all="ignore")


def apply(op: Op, inputs: Sequence[Any], **parameters: Any) -> Any:
    """Runs `op` on tensors and Python numbers. In grad mode, records a node if an input requires grad.

    Returns a tensor, or a tuple of tensors if the op has several results.

    Raises: DeviceError if the tensors are on different devices (see `to_common_device`); InplaceError if grad mode is
    on and a tensor is stale (see `stale_view`); DtypeError if no input is a tensor, or any is a NumPy array; and the
    op's errors.
    """
    state = modes.state
    if state.autocast is not None:
        inputs = state.autocast(op, inputs)
    enabled = state.enabled
    arrays: list[Array] = []
    device: Device | None = None
    recorded = wide = False
    for x in inputs:
        if isinstance(x, TensorBase):
            array = x.array
            arrays.append(array)
            if device is not x._device:
                if device is not None:
                    return apply(op, to_common_device(op.name, inputs), **parameters)
                device = x._device
            if enabled:
                if x.edge is not None:
                    recorded = True
                if x._epoch != x.version.epoch and x._epoch >= 0:
                    raise stale_view(op.name, x)
            if array.dtype is BFLOAT16:
                wide = True
        else:
            if isinstance(x, np.ndarray):
                device = None  # an array has no version, so backward would not notice a write
                break
            arrays.append(x)
    if device is None:
        raise DtypeError(f"{op.name}: expected tensors, got {', '.join(type(x).__name__ for x in inputs)}")
    xp = device.xp
    if device is not CPU:
        if device.watched and needs_guard(device):
            # No lambda: variables that a lambda closes over are slower in every call of this function.
            return guarded_run(op.name, device, arrays, partial(apply, op, inputs, **parameters))
        op = op.device_kernel
    run: Any = op.upcast if wide and not op.supports_bfloat16 else op
    if op.view or device is not CPU:  # views, and GPUs, never warn
        out, residual = run.forward(xp, *arrays, **parameters)
    else:
        out, residual = _silent.copy().run(run.forward, xp, *arrays, **parameters)
    if type(out) is tuple:
        results = tuple([wrap(y if isinstance(y, xp.ndarray) else xp.asarray(y), device) for y in out])
        if recorded:
            node = make_node(MultiOutputNode, op, run, xp, inputs, None, residual)
            if op.derived:
                keep_call(node, inputs, arrays, parameters)
            record(node, results)
        return results
    if not isinstance(out, xp.ndarray):
        out = xp.asarray(out)  # a 0-d result of NumPy is a scalar
    result = wrap(out, device)
    if op.view and xp.may_share_memory(out, arrays[0]):
        alias(result, inputs[0])
    if recorded and out.dtype.kind in FLOATS:  # integers and bool have no gradient
        if wide and run is op and not op.backward_supports_bfloat16:  # the op's backward cannot take bfloat16
            run = op.upcast
            residual = (residual, None)
        node = make_node(Node, op, run, xp, inputs, result, residual)
        if op.derived:
            keep_call(node, inputs, arrays, parameters)
        result.edge = node
        for observer in state.observers:
            observer(node)
    return result


def to_common_device(name: str, inputs: Sequence[Any]) -> list[Any]:
    """Puts the inputs of an op on one device: 0-d tensors on the CPU are copied to the GPU of the others.

    Raises: DeviceError if the other tensors are on different devices.
    """
    tensors = [x for x in inputs if isinstance(x, TensorBase)]
    big = [x for x in tensors if x._device.type != "cpu" or x.array.ndim]
    for x in big:
        if x._device is not big[0]._device:
            shapes = ", ".join(f"{tuple(x.array.shape)} on {x._device}" for x in tensors)
            raise DeviceError(f"{name}: one tensor is on {big[0]._device}, another on {x._device} ({shapes})")
    common = big[0]._device
    return [x.to(common) if isinstance(x, TensorBase) and x._device is not common else x for x in inputs]  # type: ignore[attr-defined]


FLOATS = "fV"  # the kinds of floating dtypes: "V" is bfloat16


def keep_call(node: Node, inputs: Sequence[Any], arrays: list[Any], parameters: Parameters) -> None:
    """Stores the inputs and parameters of a `derived` op in its node, so that create_graph can run the forward again.

    Stores nothing if the node saved no tensor: the inputs would keep memory alive that backward does not read.
    """
    if node.versions:
        versions = [(x.version, x.version.count, i) for i, x in enumerate(inputs) if isinstance(x, TensorBase)]
        node.call = arrays, versions, parameters


def record(node: Node, results: Sequence[TensorBase | None]) -> None:
    """Makes `node` the edge of its result. Results without a gradient, such as integers, get no edge.

    node: for several results, a `MultiOutputNode`. The edge of each result is then a new `SelectOutput` node
    """
    nodes: Sequence[Node] = (node,)
    if isinstance(node, MultiOutputNode):
        node.outputs = len(results)
        nodes = output_nodes(node)
    for result, edge in zip(results, nodes, strict=True):
        if result is not None and result.array.dtype.kind in FLOATS:
            result.edge = edge
    for observer in modes.state.observers:
        observer(node)


def make_node(
    node_class: type[Node], op: Any, run: Any, xp: Any, inputs: Sequence[Any], result: TensorBase | None, residual: Any
) -> Node:
    """Makes the node of an op that ran, with its edges and the inputs and results that its backward reads."""
    # One loop, not two comprehensions, which are calls before Python 3.12: see `benchmarks.train_step --only small`.
    edges: list[Node | Leaf | None] = []
    needs: list[bool] = []
    for x in inputs:
        edge = x.edge if isinstance(x, TensorBase) else None
        edges.append(edge)
        needs.append(edge is not None)
    wanted = tuple(needs)
    plan = op.plan(wanted)
    values = (*inputs, result)
    saved: list[Any] = []
    versions: list[tuple[Version, int, int]] = []
    for position in plan:
        x = None if position is None else values[position]
        if isinstance(x, TensorBase):
            versions.append((x.version, x.version.count, len(saved)))
            x = x.array
        saved.append(x)
    node = node_class(run, xp, tuple(edges), wanted, tuple(saved), versions, residual)
    if result is not None and len(inputs) in plan:
        result.version.saved_by = weakref.ref(node)
    return node


def written_in_graph(x: TensorBase) -> None:
    """Counts a write into `x` that autograd records: other views of its memory are stale from now on."""
    x.version.count += 1
    x.version.epoch = x._epoch = x.version.epoch + 1


def check_current(name: str, x: TensorBase) -> None:
    """Raises: InplaceError if ops are recorded and `x` is stale: a view that is older than a change of its base."""
    if modes.state.enabled and x._epoch != x.version.epoch and x._epoch >= 0:
        raise stale_view(name, x)


def stale_view(name: str, x: TensorBase) -> InplaceError:
    """Returns the error for a stale view `x`, whose memory was changed in place after the view was made."""
    return InplaceError(
        f"{name}: a tensor of shape {x.array.shape} shares memory with one that was changed in place inside the graph "
        "after this view was made, so its place in the graph is not true any more: make the view after the change, or "
        "use the out-of-place form"
    )


def clear_grad(x: TensorBase, set_to_none: bool) -> None:
    """Drops the gradient of `x`; without `set_to_none`, sets an existing one to zero instead."""
    if x.accumulate_grad is None:
        return
    buffer = x.accumulate_grad.grad_buffer
    if set_to_none:
        buffer.clear()
        x.grad_view = None
        return
    buffer.read_error = None  # zeros are the same on every rank
    if x.grad is not None:
        x.grad.edge = None  # zeros have no graph
        x.grad.zero_()
        buffer.state = ZEROED


def copy_if_needed(array: Array, *readers: Any) -> Array:
    """Returns `array`, or a copy if backward will read it for the gradient of one of `readers`.

    Other code may write to `array` before backward reads it. An index, a class target or a plain array has no version
    by which backward could notice a write.
    """
    for x in readers:
        if isinstance(x, TensorBase) and x.edge is not None and modes.state.enabled:
            with on(device_of(array)):  # CuPy copies to the current GPU
                return array.copy()
    return array


def required_edge(x: TensorBase, name: str) -> Node | Leaf:
    """The edge of `x`. Raises: GraphError if it has none."""
    if x.edge is None:
        raise GraphError(f"{name}: this tensor does not require grad, and nothing it was made of does")
    return x.edge


def root_of(x: TensorBase) -> Node | Leaf:
    """The edge from which a backward of `x` starts. Raises: GraphError if it has none; InplaceError if it is stale."""
    edge = required_edge(x, "backward")
    if x._epoch != x.version.epoch and x._epoch >= 0:
        raise stale_view("backward", x)
    return edge


def seed_of(x: TensorBase, gradient: TensorBase | None) -> Array:
    """The gradient with which a backward of `x` starts, as an array. Raises: ShapeError, DtypeError, DeviceError."""
    if gradient is None:
        if x.array.size != 1:
            raise ShapeError(f"backward: shape {x.array.shape} needs a gradient of that shape; sum() it first")
        device = x._device
        with on(device):
            return device.xp.ones(x.array.shape, x.array.dtype)
    if not isinstance(gradient, TensorBase):
        raise DtypeError(f"backward: expected a tensor or None as the gradient, got {type(gradient).__name__}")
    if gradient._device is not x._device:
        raise DeviceError(f"backward: expected a gradient on {x._device}, as this tensor is, got {gradient._device}")
    if gradient.array.shape != x.array.shape:
        raise ShapeError(f"backward: gradient of shape {gradient.array.shape} for a tensor of {x.array.shape}")
    with on(x._device):
        return gradient.array.astype(x.array.dtype, copy=False)


# The device guard: an op launches on the GPU of its tensors, whichever GPU is current. With CUDA_LAUNCH_BLOCKING=1 the
# host waits for every op, and an error names its op.


def needs_guard(device: Device) -> bool:
    """Whether an op must run in `guarded_run`; False if it already does. device: one whose `watched` is not 0"""
    if modes.state.guarded:
        return False
    if device.watched == 2:
        return True
    stream_sync.switch.several_gpus = True
    return bool(device.xp.cuda.runtime.getDevice() != device.index)


def guarded_function(function: F) -> F:
    """Wraps a function that launches without `apply`: it runs on the device of the first tensor in its arguments."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, TensorBase):
                if x._device.watched and needs_guard(x._device):
                    arrays = [y.array for y in (*args, *kwargs.values()) if isinstance(y, TensorBase)]
                    return guarded_run(function.__name__, x._device, arrays, partial(function, *args, **kwargs))
                break
        return function(*args, **kwargs)

    cast(Any, inner).guarded = True
    return cast(F, inner)


def guard_methods(tensor_class: type, names: str) -> None:
    """Wraps methods that launch without `apply`: they run on their tensor's device. Called when CUDA is first used."""
    for name in names.split():
        owner = next(cls for cls in tensor_class.__mro__ if name in vars(cls))
        method = vars(owner)[name]
        if not hasattr(method, "guarded"):
            setattr(owner, name, guarded_function(method))


def guarded_run(name: str, device: Device, arrays: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Calls `run`, which launches the op `name` on `arrays`, with `device` as the current device.

    With CUDA_LAUNCH_BLOCKING=1, waits for the op; if it fails, raises a CudaError that names it.
    """
    from ddp._cuda import cuda_errors, device_checks, stream_order

    blocking = cuda_errors.blocking()
    stream_sync.enable(blocking)
    before = modes.state.guarded
    modes.state.guarded = True
    try:
        with on(device):
            result = run()
            stream = stream_order.current(device.xp)
            if blocking and not stream.capturing:
                stream.cupy_stream.synchronize()
                device_checks.raise_pending()
            return result
    except Exception as error:
        if blocking:
            inputs = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in arrays if hasattr(x, "shape"))
            named = cuda_errors.attribute_to_op(error, name, inputs or "numbers", f"it ran at {user_line()}")
            if named is not error:
                raise named from error
        raise
    finally:
        modes.state.guarded = before
