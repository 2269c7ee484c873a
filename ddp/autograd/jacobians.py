"""Jacobians and Hessians of functions of tensors, and products with them.

`func` takes the inputs, a tensor or a tuple of tensors, as its arguments, and returns a tensor or a tuple. If `inputs`
is a tuple, so are results for the inputs. If `func` returns a tuple, so are results for the outputs.

v: tensors of the shapes of the inputs (jvp, vhp, hvp) or of the outputs (vjp); None: 1, for a single element
create_graph: results can be differentiated; None: only if they depend on an input or another tensor that requires grad
strict: if an output does not depend on an input, True raises GraphError, and False gives zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp._engine import enable_grad, leaves_of
from ddp._tensor.base import TensorBase, root_of
from ddp._tensor.core import Tensor
from ddp._tensor.functions import stack
from ddp.autograd._run import grad, seeds_of
from ddp.errors import DtypeError, GraphError

__all__ = ["hessian", "hvp", "jacobian", "jvp", "vhp", "vjp"]

Func = Callable[..., Any]
Tensors = Tensor | tuple[Tensor, ...]
Graph = bool | None


def vjp(func: Func, inputs: Tensors, v: Any = None, create_graph: Graph = False, strict: bool = False) -> Any:
    """Computes func(*inputs), and v^T @ J: the gradients of the inputs, if v are the gradients of the outputs.

    Raises: ShapeError if a tensor of v has a wrong shape, or if v is None and would need several elements;
    ArgumentError for another number of tensors in v; DtypeError if an input is not a floating-point tensor, or an
    output or v is not a tensor; GraphError if strict and an output does not depend on an input.
    """
    call = Call(func, inputs, create_graph)
    products = differentiate(call.outputs, call.inputs, v, call.create_graph, strict)
    return call.postprocess(call.outputs, call.result), call.postprocess(products, inputs)


def jvp(func: Func, inputs: Tensors, v: Any = None, create_graph: Graph = False, strict: bool = False) -> Any:
    """Computes func(*inputs), and J @ v: the derivative of the outputs as the inputs move along v.

    Runs two backwards: u^T @ J is linear in u, and the gradient of u^T @ J @ v for u is J @ v. Raises: as vjp.
    """
    call = Call(func, inputs, create_graph)
    us = [y.new_zeros(y.shape).requires_grad_() for y in call.outputs]
    products = differentiate(call.outputs, call.inputs, us, True, strict)
    changes = differentiate(products, us, v, call.create_graph, strict)
    return call.postprocess(call.outputs, call.result), call.postprocess(changes, call.result)


def vhp(func: Func, inputs: Tensors, v: Any = None, create_graph: Graph = False, strict: bool = False) -> Any:
    """Computes func(*inputs), which has a single element, and v^T @ H, where H is its Hessian. Raises: as vjp."""
    call = Call(func, inputs, create_graph)
    gradients = differentiate(call.outputs, call.inputs, None, True, strict)
    products = differentiate(gradients, call.inputs, v, call.create_graph, strict)
    return call.postprocess(call.outputs, call.result), call.postprocess(products, inputs)


hvp = vhp  # H @ v is the same, because a Hessian is symmetric


def jacobian(
    func: Func,
    inputs: Tensors,
    create_graph: Graph = False,
    strict: bool = False,
    vectorize: bool = False,
    strategy: str = "reverse-mode",
) -> Any:
    """The derivatives of every output with respect to every input: of shape (*output, *input).

    If `func` returns a tuple, the result is a tuple with one item per output. If `inputs` is a tuple, each item is a
    tuple with one tensor per input. Runs one backward per element of the outputs.
    vectorize, strategy: accepted, and change nothing. Raises: as vjp.
    """
    call = Call(func, inputs, create_graph)
    blocks = []
    for y in call.outputs:
        elements = [y.reshape(-1)[i] for i in range(y.numel())]
        rows = [differentiate([element], call.inputs, None, call.create_graph, strict) for element in elements]
        columns = [stack(column) for column in zip(*rows, strict=True)] or [x.new_zeros(0) for x in call.inputs]
        block = [column.reshape((*y.shape, *x.shape)) for column, x in zip(columns, call.inputs, strict=True)]
        blocks.append(call.postprocess(block, inputs))
    return tuple(blocks) if isinstance(call.result, tuple) else blocks[0]


def hessian(
    func: Func,
    inputs: Tensors,
    create_graph: Graph = False,
    strict: bool = False,
    vectorize: bool = False,
    outer_jacobian_strategy: str = "reverse-mode",
) -> Any:
    """The second derivatives of func(*inputs), which has a single element: of shape (*input, *input).

    A tuple of inputs gives a tuple of tuples. vectorize, outer_jacobian_strategy: accepted, and change nothing.
    Raises: as vjp.
    """

    def gradients(*given: Tensor) -> Any:
        return vjp(func, given if isinstance(inputs, tuple) else given[0], None, True, strict)[1]

    return jacobian(gradients, inputs, create_graph, strict)


class Call:
    """A call of `func` on new tensors that require grad and share the memory of the inputs.

    If an input requires grad and create_graph is not False, its new tensor is part of the input's graph.
    """

    def __init__(self, func: Func, inputs: Tensors, create_graph: Graph) -> None:
        self.inputs = []
        for x in _tensors(inputs):
            inside = create_graph is False or not x.requires_grad
            self.inputs.append(x.detach().requires_grad_() if inside else x.view_as(x))
        with enable_grad():
            self.result = func(*self.inputs)
        self.outputs = _tensors(self.result)
        own = [x.edge for x in self.inputs]
        leaves = leaves_of([root_of(y) for y in self.outputs if y.requires_grad])
        self.create_graph = any(leaf not in own for leaf in leaves) if create_graph is None else create_graph

    def postprocess(self, tensors: Sequence[Tensor], like: Any) -> Any:
        """Returns a tuple of `tensors` if `like` is a tuple, otherwise the first. Detaches them unless create_graph."""
        results = tuple([x if self.create_graph else x.detach() for x in tensors])
        return results if isinstance(like, tuple) else results[0]


def differentiate(
    outputs: list[Tensor], inputs: list[Tensor], v: Any, create_graph: bool, strict: bool = False
) -> list[Tensor]:
    """The gradients of the inputs, zeros for those that the outputs do not depend on.

    v: the gradients of the outputs. Raises: GraphError, if strict, instead of returning zeros.
    """
    seeds = seeds_of(outputs, v if v is None else _tensors(v))
    pairs = [(y, seed) for y, seed in zip(outputs, seeds, strict=True) if y.requires_grad]
    gradients: Sequence[Any] = [None] * len(inputs)
    if pairs:
        ys, weights = map(list, zip(*pairs, strict=True))
        gradients = grad(ys, inputs, weights, True, create_graph, allow_unused=True)
    if strict and (len(pairs) < len(outputs) or any(g is None for g in gradients)):
        raise GraphError("strict=True: an output does not depend on an input")
    return [x.new_zeros(x.shape) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


def _tensors(given: Any) -> list[Tensor]:
    tensors = list(given) if isinstance(given, tuple | list) else [given]
    for x in tensors:
        if not isinstance(x, TensorBase):
            raise DtypeError(f"autograd.functional: expected a tensor or a tuple of them, got {type(x).__name__}")
    return tensors
