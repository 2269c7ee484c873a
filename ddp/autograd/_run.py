"""Backward from several tensors, and gradients that are returned instead of accumulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._device import on
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.gradients import run_backward, sink_gradients
from ddp.errors import ArgumentError, GraphError

Tensors = Tensor | Sequence[Tensor]


def as_list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def seeds_of(tensors: list[Tensor], gradients: Any) -> list[Any]:
    """Lists one gradient, or None, for each tensor. Raises: ArgumentError if their numbers differ."""
    seeds = [None] * len(tensors) if gradients is None else as_list(gradients)
    if len(seeds) != len(tensors):
        raise ArgumentError(f"{len(seeds)} gradients were given for {len(tensors)} tensors")
    return seeds


def backward(
    tensors: Tensors,
    grad_tensors: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
) -> None:
    """Adds the gradients of all `tensors` to the leaves they depend on, in one pass.

    grad_tensors: a gradient for each tensor, of its shape; None: 1, for tensors of one element. inputs: only these get
    a gradient. retain_graph, create_graph: as in Tensor.backward.

    Raises: as Tensor.backward; ArgumentError if `grad_tensors` has another length than `tensors`.
    """
    outputs = as_list(tensors)
    run_backward(outputs, seeds_of(outputs, grad_tensors), retain_graph, create_graph, inputs)


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs` with respect to `inputs`, one for each. No `grad` of a leaf is changed.

    The gradient of an input that no output depends on is zeros with `materialize_grads`, and None with `allow_unused`.
    With neither, `grad` raises GraphError. create_graph: gradients have a graph, so that they can be differentiated.
    retain_graph: keeps the graph for another backward; None: as create_graph.

    Raises: as Tensor.backward without `inputs`, and GraphError if an input does not require grad; ArgumentError if
    `grad_outputs` has another length than `outputs`, for only_inputs=False, for materialize_grads=True with
    allow_unused=False, and for is_grads_batched=True: call grad for each gradient instead.
    """
    if is_grads_batched:
        raise ArgumentError("grad(is_grads_batched=True): there is no vmap here; call grad for each gradient")
    if not only_inputs:
        raise ArgumentError("grad(only_inputs=False): call backward, which adds to the leaves")
    if materialize_grads and allow_unused is False:
        raise ArgumentError("grad: materialize_grads=True is for unused inputs, which allow_unused=False forbids")
    wanted = as_list(inputs)
    for i, x in enumerate(wanted):
        if x.edge is None:
            raise GraphError(f"grad: input {i} of shape {x.shape} does not require grad")
    tensors = as_list(outputs)
    results: list[Tensor | None] = []
    gradients = sink_gradients(tensors, seeds_of(tensors, grad_outputs), retain_graph, create_graph, wanted)
    for i, (x, g) in enumerate(zip(wanted, gradients, strict=True)):
        if g is None and materialize_grads:
            g = x.device.xp.zeros(x.shape)
        elif g is None and not allow_unused:
            raise GraphError(f"grad: no output depends on input {i} of shape {x.shape}; allow_unused=True gives None")
        if isinstance(g, Tensor):
            results.append(g.clone() if any(g is result for result in results) else g)
        elif g is None:
            results.append(None)
        else:  # a copy: the engine's array may be shared, broadcast or read-only
            with on(x.device):
                results.append(wrap(x.device.xp.array(g, x.dtype), x.device))
    return tuple(results)


def Variable(data: Tensor, requires_grad: bool = False) -> Tensor:
    """A tensor outside the graph that shares the memory of `data`: data.detach().requires_grad_(requires_grad).

    Raises: DtypeError for requires_grad=True unless `data` is floating-point.
    """
    return data.detach().requires_grad_(requires_grad)
