"""`Function`: the base class of the user's own ops. They are recorded as nodes, as the built-in ops are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ddp import _engine
from ddp._engine import MultiOutputNode, Node, Version, modes, no_grad, output_nodes
from ddp._tensor.base import TensorBase, check_current, record, restore_tensors, wrap, written_in_graph
from ddp._tensor.core import Tensor
from ddp._tensor.gradients import gradient_array, gradient_tensors
from ddp.errors import ArgumentError, DtypeError, GraphError


class FunctionContext:
    """The argument `ctx`, through which forward passes values to backward. Users may set attributes on it.

    needs_input_grad: a bool for each positional argument of `apply`
    """

    needs_input_grad: tuple[bool, ...]

    def __init__(self) -> None:
        self.materialize_grads = True
        self._to_save: tuple[Any, ...] = ()
        self._not_differentiable: tuple[Any, ...] = ()
        self._dirty: tuple[Any, ...] = ()
        self._restored: tuple[Any, ...] | None = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for backward, such as inputs and outputs. Backward raises if one of them was changed in place.

        Raises: DtypeError for values that are neither tensors nor None. Keep those as attributes of `ctx`.
        """
        for x in tensors:
            if x is not None and not isinstance(x, TensorBase):
                raise DtypeError(f"save_for_backward: expected tensors or None, got {type(x).__name__}")
        self._to_save = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors of save_for_backward, in its order. Raises: GraphError outside of backward."""
        if self._restored is None:
            raise GraphError("saved_tensors: they are there during backward, once, unless the graph is retained")
        return self._restored

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Marks outputs that get no gradient: for example, indices that are returned with values."""
        self._not_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Marks inputs that forward changed in place. Forward must return them."""
        self._dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Sets whether backward gets zeros (the default) or None for outputs without a gradient."""
        self.materialize_grads = value


class _FunctionBackward:
    """Runs the backward of one Function. Has the interface of an op, which the engine calls."""

    saves: tuple[str, ...] = ()
    grad_out = False

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.name = function.__name__

    def backward(self, xp: Any, g: Any, needs: Sequence[bool], saved: Sequence[Any], residual: Any) -> list[Any]:
        ctx, _, outputs, device, _ = residual
        grads = gradient_tensors(g, outputs, device, ctx.materialize_grads)
        with no_grad():
            gradients = self._call(residual, grads, [None if x is None else wrap(x, device) for x in saved], needs)
        return [None if dx is None else dx.array for dx in gradients]

    def record_backward(self, node: Node, g: Any, needs: Sequence[bool]) -> list[Any]:
        """Computes differentiable gradients. g: a tensor, or a list with a tensor or None for each result."""
        ctx, _, outputs, device, origins = node.residual
        grads = gradient_tensors([None] * len(outputs), outputs, device, ctx.materialize_grads)
        for i, grad in enumerate(g if isinstance(g, list) else [g]):
            grads[i] = grads[i] if grad is None else grad.clone()
        results = output_nodes(node) if isinstance(node, MultiOutputNode) else [node]
        edges = [results[origin] if isinstance(origin, int) else origin for origin in origins]
        return self._call(node.residual, grads, restore_tensors(node.saved, edges, node.versions), needs)

    def _call(self, residual: Any, grads: Sequence[Any], saved: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """Calls the user's backward. Returns its gradients, None where `needs` is False.

        Raises: ArgumentError, DtypeError, ShapeError if the gradients do not fit the inputs.
        """
        ctx, inputs = residual[:2]
        ctx._restored = tuple(saved)
        try:
            results = self.function.backward(ctx, *grads)
        finally:
            ctx._restored = None
        returned = list(results) if isinstance(results, tuple | list) else [results]
        if len(returned) > len(inputs) and all(extra is None for extra in returned[len(inputs) :]):
            returned = returned[: len(inputs)]
        if len(returned) != len(inputs):
            raise ArgumentError(
                f"{self.name}: backward returned {len(returned)} gradients, expected one for each of the {len(inputs)} "
                "arguments of forward (None for those that are no tensor)"
            )
        for i, (dx, like) in enumerate(zip(returned, inputs, strict=True)):
            array = gradient_array(f"{self.name}: backward, argument {i}", dx, like) if needs[i] else None
            returned[i] = None if array is None else dx.to(array.dtype)
        return returned


class Function:
    """The base class of your own ops. A subclass defines two static methods, and is called by its method `apply`.

    forward(ctx, *args, **kwargs) returns a tensor or a tuple. The ops in it are not recorded. With
    setup_context(ctx, inputs, output), forward has no parameter ctx. backward(ctx, *grads) returns a gradient or None
    for each positional argument of `apply`. Under create_graph, its ops on grads and saved tensors are recorded.

        class Exp(ddp.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x.exp()
                ctx.save_for_backward(y)
                return y

            @staticmethod
            def backward(ctx, g):
                (y,) = ctx.saved_tensors
                return g * y

    Raises, in backward: ArgumentError for a wrong number of gradients; ShapeError, DtypeError if one does not fit.
    """

    _op: _FunctionBackward

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._op = _FunctionBackward(cls)

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Computes the outputs; see the class."""
        raise NotImplementedError("a Function defines forward()")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Sets the attributes of ctx. Called after forward, which then has no parameter ctx; see the class."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Computes the gradients of the arguments; see the class."""
        raise NotImplementedError("a Function that is differentiated defines backward()")

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Runs forward, and records a node if grad mode is on and a positional argument requires grad.

        Raises: GraphError if an input was marked dirty, and was not returned or is a leaf that requires grad;
        InplaceError if an argument is a stale view; DtypeError if a node is to be recorded and forward returned no
        tensor.
        """
        tensors = [x for x in args if isinstance(x, TensorBase)]
        edges = tuple([x.edge if isinstance(x, TensorBase) else None for x in args])
        recorded = modes.state.enabled and any(edge is not None for edge in edges)
        if recorded:
            for x in tensors:
                check_current(cls.__name__, x)
        ctx = FunctionContext()
        ctx.needs_input_grad = tuple([recorded and edge is not None for edge in edges])
        with no_grad():
            if cls.setup_context is not Function.setup_context:
                result = cls.forward(*args, **kwargs)
                cls.setup_context(ctx, args, result)
            else:
                result = cls.forward(ctx, *args, **kwargs)
        single = not isinstance(result, tuple)
        outputs = [_output(cls, x, tensors, ctx) for x in ((result,) if single else result)]
        if not all(_is_in(x, outputs) for x in ctx._dirty):
            raise GraphError(f"{cls.__name__}: an input was marked dirty, but forward did not return it")
        if recorded:
            _record(cls, ctx, args, edges, outputs)
        ctx._to_save = ctx._not_differentiable = ctx._dirty = ()  # the node has the arrays: tensors would form cycles
        return outputs[0] if single else tuple(outputs)


def _is_in(x: Any, tensors: Sequence[Any]) -> bool:
    return any(x is y for y in tensors)


def _output(cls: type[Function], x: Any, inputs: Sequence[TensorBase], ctx: FunctionContext) -> Any:
    """Returns `x`, a result of forward. If `x` is an unchanged input, returns a view, which gets its own edge."""
    if isinstance(x, TensorBase):
        if _is_in(x, ctx._dirty):
            if modes.state.enabled and isinstance(x.edge, _engine.Leaf):
                raise GraphError(f"{cls.__name__}: a leaf that requires grad was changed in place")
            return x
        if _is_in(x, inputs):
            return wrap(x.array, x.device, x)
    return x


def _record(
    cls: type[Function], ctx: FunctionContext, args: Sequence[Any], edges: tuple[Any, ...], outputs: list[Any]
) -> None:
    tensors = [x for x in outputs if isinstance(x, TensorBase)]
    if not tensors:
        raise DtypeError(f"{cls.__name__}: forward returned no tensor")
    device = tensors[0].device
    for x in ctx._dirty:
        written_in_graph(x)
    saved = tuple([None if x is None else x.array for x in ctx._to_save])
    versions: list[tuple[Version, int, int]] = [
        (x.version, x.version.count, i) for i, x in enumerate(ctx._to_save) if x is not None
    ]
    inputs = [(x.array.shape, x.array.dtype) if isinstance(x, TensorBase) else None for x in args]
    shapes = [(x.array.shape, x.array.dtype) if isinstance(x, TensorBase) else ((), "float32") for x in outputs]
    # For each saved tensor: its number if it is a result of forward, otherwise its edge.
    origins = [next((i for i, y in enumerate(outputs) if y is x), None if x is None else x.edge) for x in ctx._to_save]
    residual = (ctx, inputs, shapes, device, origins)
    node_class = Node if len(outputs) == 1 else MultiOutputNode
    node = node_class(cls._op, device.xp, edges, ctx.needs_input_grad, saved, versions, residual)
    for x in outputs:
        if _is_in(x, ctx._to_save):
            x.version.saved_by = weakref.ref(node)
    record(node, [x if isinstance(x, TensorBase) and not _is_in(x, ctx._not_differentiable) else None for x in outputs])
