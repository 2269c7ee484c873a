"""What a tensor is apart from its mathematics: an array, the device it is on, its place in the graph, its gradient.

`apply` is the one door between tensors and ops: it unwraps, runs the forward, and records a node where needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ddp import _engine
from ddp._device import device, place
from ddp._engine import Leaf, Node, Version, modes
from ddp.errors import ArgumentError, DeviceError, DtypeError, GraphError, ShapeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op

Array = Any
Self = TypeVar("Self", bound="TensorBase")


class TensorBase:
    """Storage, graph and gradient of a tensor; see `Tensor`."""

    __slots__ = ("__weakref__", "_array", "_device", "_edge", "_end", "_grad", "_version")
    _array: Array  # the raw array
    _device: device
    _edge: Node | Leaf | None  # where a gradient goes from here; None if none is wanted
    _end: Leaf | None  # the graph's end for this tensor, kept while requires_grad is off
    _grad: Tensor | None  # the tensor around the slot's buffer, made when `grad` is first read
    _version: Version

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes a gradient for this tensor, or passes through it."""
        return self._edge is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Turns the gradient of a leaf on or off, and returns it.

        Raises: DtypeError unless floating; GraphError to turn it off on the result of an op.
        """
        if isinstance(self._edge, Node):
            if not requires_grad:
                raise GraphError("requires_grad_(False): this tensor is the result of an op; use detach()")
        elif requires_grad:
            if self._array.dtype.kind != "f":
                raise DtypeError(f"requires_grad: only floating tensors have gradients, not {self._array.dtype}")
            self._edge = self._leaf
        else:
            self._edge = None
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded op made this tensor."""
        return not isinstance(self._edge, Node)

    @property
    def _leaf(self) -> Leaf:
        if self._end is None:
            array = self._array
            self._end = Leaf(array.shape, array.dtype, self._device.xp)
        return self._end

    @property
    def grad(self) -> Tensor | None:
        """The gradient: None if there is none, else a tensor of this shape that shares the slot's memory.

        Assigning a tensor copies it in; None empties the slot. Raises: ShapeError, DtypeError, DeviceError if the
        assigned tensor is unlike this one.
        """
        if self._end is None or not self._end.slot.full:
            return None
        buffer = self._end.slot.buffer
        if self._grad is None or self._grad._array is not buffer:
            self._grad = wrap(buffer, self._device)
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            if self._end is not None:
                self._end.slot.clear()
            return
        if not isinstance(value, TensorBase):
            raise DtypeError(f"grad: expected a Tensor or None, got {type(value).__name__}")
        if value._array.shape != self._array.shape:
            raise ShapeError(f"grad: a tensor of shape {self._array.shape} was given one of {value._array.shape}")
        if value._array.dtype != self._array.dtype:
            raise DtypeError(f"grad: a tensor of {self._array.dtype} was given one of {value._array.dtype}")
        if value._device is not self._device:
            raise DeviceError(f"grad: a tensor on {self._device} was given one on {value._device}")
        self._leaf.slot.set(value._array)

    def backward(
        self, gradient: TensorBase | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Adds the gradients of this tensor with respect to all leaves it depends on to their `grad`.

        gradient: of this tensor's shape; 1 for a tensor of one element. retain_graph: keeps the graph for another
        backward. create_graph: not supported, and raises, because differentiation is first order.

        Raises: GraphError, GraphFreedError, VersionError; ShapeError if `gradient` does not fit.
        """
        if create_graph:
            raise GraphError("backward(create_graph=True): differentiation is first order here; compute it by hand")
        _engine.backward([root_of(self)], [seed_of(self, gradient)], retain_graph)

    def detach(self) -> Tensor:
        """The same memory outside the graph; in-place changes of either are seen by both, and by backward."""
        return wrap(self._array, self._device, self._version)

    def _check_replaceable(self) -> None:
        """Raises: GraphError if somebody watches the leaf, who would be left with the old memory."""
        if self._end is not None and self._end.watcher is not None:
            raise GraphError("a wrapped parameter cannot change dtype or device; convert before wrapping")

    def _replace(self, array: Array, where: device) -> None:
        """Puts this leaf on another array of the same shape, gradient included: how modules change dtype and device.

        Raises: GraphError if somebody watches the leaf.
        """
        self._check_replaceable()
        end = self._end
        self._array, self._device, self._version = array, where, Version()
        self._end = self._grad = None
        if end is not None:
            if end.slot.full:
                self._leaf.slot.set(place(end.slot.buffer, where))
            if self._edge is not None:
                self._edge = self._leaf


def wrap(array: Array, where: device, version: Version | None = None) -> Tensor:
    """A tensor around `array`, outside the graph; with `version`, one more view of that memory."""
    kind = _plain[0]
    self = kind.__new__(kind)
    self._array = array
    self._device = where
    self._edge = self._end = self._grad = None
    self._version = version or Version()
    return self


# The class of results. Tensor is made of the mixins that call `apply`, so it can only be put here once it exists.
_plain: list[type[Tensor]] = []


def apply(op: Op, inputs: Sequence[Any], **parameters: Any) -> Tensor:
    """Runs `op` on tensors, or on Python numbers in their place, and records a node if a gradient will be wanted.

    Raises: DeviceError if the tensors are on different devices.
    """
    arrays: list[Array] = []
    where: device | None = None
    recorded = False
    for x in inputs:
        if isinstance(x, TensorBase):
            arrays.append(x._array)
            if where is not x._device:
                if where is not None:
                    raise DeviceError(f"{op.name}: one tensor is on {where}, another on {x._device}")
                where = x._device
            if x._edge is not None:
                recorded = True
        else:
            arrays.append(x)
    assert where is not None, f"{op.name} was applied to no tensor"
    xp = where.xp
    out, residual = op.forward(xp, *arrays, **parameters)
    if not isinstance(out, xp.ndarray):
        out = xp.asarray(out)  # a 0-d result of NumPy is a scalar
    result = wrap(out, where)
    if op.view and xp.may_share_memory(out, arrays[0]):
        result._version = inputs[0]._version
    if recorded and modes.state.enabled and out.dtype.kind == "f":  # integers and bool have no gradient
        edges = tuple([x._edge if isinstance(x, TensorBase) else None for x in inputs])
        needs = tuple([edge is not None for edge in edges])
        saved: list[Any] = []
        versions: list[tuple[Version, int, int]] = []
        for position in op.plan(needs):
            if position is None:
                saved.append(None)
                continue
            x = inputs[position] if position < len(inputs) else result
            if isinstance(x, TensorBase):
                versions.append((x._version, x._version.count, len(saved)))
                saved.append(x._array)
            else:
                saved.append(x)
        result._edge = Node(op, xp, edges, needs, tuple(saved), versions, residual)
    return result


def clear_grad(x: TensorBase, set_to_none: bool) -> None:
    """Empties the gradient of `x`, or with `set_to_none` off fills it with zeros if there is one."""
    if set_to_none:
        x.grad = None
    elif x.grad is not None:
        x.grad.zero_()


def borrowed(array: Array, *readers: Any) -> Array:
    """`array`, whose memory somebody else may write to; a copy where backward will read it for one of `readers`.

    An index, a class target or a plain array has no version that would tell of the write.
    """
    if modes.state.enabled and any(isinstance(x, TensorBase) and x._edge is not None for x in readers):
        return array.copy()
    return array


def root_of(x: TensorBase) -> Node | Leaf:
    """Where a backward from `x` starts. Raises: GraphError if nothing it came from requires grad."""
    if x._edge is None:
        raise GraphError("backward: this tensor does not require grad, and nothing it was made of does")
    return x._edge


def seed_of(x: TensorBase, gradient: TensorBase | None) -> Array:
    """The array that a backward from `x` starts with. Raises: ShapeError, ArgumentError, DeviceError."""
    if gradient is None:
        if x._array.size != 1:
            raise ShapeError(f"backward: shape {x._array.shape} needs a gradient of that shape; sum() it first")
        return x._device.xp.ones(x._array.shape, x._array.dtype)
    if not isinstance(gradient, TensorBase):
        raise ArgumentError(f"backward: gradient is a Tensor, not {type(gradient).__name__}")
    if gradient._array.shape != x._array.shape:
        raise ShapeError(f"backward: gradient of shape {gradient._array.shape} for a tensor of {x._array.shape}")
    if gradient._device is not x._device:
        raise DeviceError(f"backward: gradient on {gradient._device} for a tensor on {x._device}")
    return gradient._array.astype(x._array.dtype, copy=False)
