"""Backward under create_graph: each node's reference backward on recording arrays, so that gradients have a graph.

What a node saved returns to its place in the graph: an input behind the edge of that input, the result behind the node.
The residual is constant. Of an op whose residual changes with its inputs (`Op.derived`), the reference forward runs
again, recorded, and makes another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddp import _engine
from ddp._engine import Edge, Node, SelectOutput, Versions, enable_grad, modes
from ddp._engine.anomaly import check_gradients
from ddp._tensor.base import FLOATS, Tensor, TensorBase, apply, restore_tensors, root_of, seed_of, wrap
from ddp._tensor.recording import FULL, RecordingArray, as_operand, record, recording_numpy
from ddp.errors import GraphError, VersionError
from ddp.ops import arrays, attention, convolution, elementwise, fft, indexing, products, reduction, shape, special
from ddp.ops.op import OPS, Op, Upcast

Array = Any  # an array, a recording one, or None

# Functions of formulas that recording arrays cannot take, or that would take many steps.


def _where_or_zero(xp: Any, mask: Any, g: RecordingArray) -> RecordingArray:
    return record(elementwise.where, np.asarray(mask), g, np.zeros((), g.dtype))


def _add_rows_into(xp: Any, where: Any, g: Array, out: RecordingArray) -> None:
    out.write(record(indexing.index_add, out, g, places=(where, FULL)))


def _add_flat(xp: Any, x: RecordingArray, where: Any, g: Array) -> RecordingArray:
    return record(indexing.index_add, x, g.reshape(-1), places=(where.reshape(-1),))


def _join(xp: Any, parts: Sequence[Any], sizes: tuple[int, ...], dim: int, lengths: Any = None) -> RecordingArray:
    zero = np.zeros((), next(part.dtype for part in parts if part is not None))
    zeros = shape.cut(np, np.broadcast_to(zero, sizes), dim, lengths)
    some = [blank if part is None else part for part, blank in zip(parts, zeros, strict=True)]
    return record(shape.stack if lengths is None else shape.cat, *some, dim=dim)


def _cut(xp: Any, x: Array, dim: int, lengths: Any = None) -> list[RecordingArray]:
    parts = x.tensor.unbind(dim) if lengths is None else apply(shape.split, (x.tensor,), dim=dim, lengths=lengths)
    return [RecordingArray(part) for part in parts]


def _how(window: convolution.Window, groups: int) -> dict[str, Any]:
    return {"stride": window.stride, "padding": window.padding, "dilation": window.dilation, "groups": groups}


def _correlate(xp: Any, x: Array, w: Array, b: Array, sizes: convolution.Shape) -> RecordingArray:
    return record(convolution.conv2d, x, w, b, **_how(sizes.window, sizes.groups))


def _adjoint(xp: Any, g: Array, w: Array, x: Array, sizes: convolution.Shape) -> tuple[Any, Any]:
    dx = dw = None
    if w is not None:
        how = _how(sizes.window, sizes.groups)
        dx = record(convolution.conv_transpose2d, g, w, None, size=sizes.window.image, **how)
    if x is not None:
        dw = record(convolution.conv_filters, x, g, shape=sizes)
    return dx, dw


def _zeros_but(xp: Any, g: Array, sizes: tuple[int, ...], view: Callable[[Any, Any], Any]) -> RecordingArray:
    where = view(np, np.arange(math.prod(sizes)).reshape(sizes)).copy()
    zeros = np.zeros(math.prod(sizes), g.dtype)
    return record(indexing.setitem, zeros, g, steps=((where,),)).reshape(sizes)


arrays.where_or_zero.attach_recording_form(_where_or_zero)
fft.transformed.attach_recording_form(lambda xp, x, *transform: record(fft.fft, x, transform=transform))
shape.zeros_but.attach_recording_form(_zeros_but)
shape.diagonal_of.attach_recording_form(
    lambda xp, x, offset, dim0, dim1: record(shape.diagonal, x, offset=offset, dim0=dim0, dim1=dim1)
)
indexing.add_rows_into.attach_recording_form(_add_rows_into)
indexing.add_flat.attach_recording_form(_add_flat)
shape.join.attach_recording_form(_join)
shape.cut.attach_recording_form(_cut)
convolution.correlate.attach_recording_form(_correlate)
convolution.adjoint.attach_recording_form(_adjoint)
attention.score_bytes.attach_recording_form(lambda xp: 1 << 62)  # all heads at once: few steps
products.ones.attach_recording_form(lambda xp, n, dtype: np.ones(n, dtype))
reduction.moments.attach_recording_form(lambda xp, x: reduction.moments.__wrapped__(xp, x.astype("float64")))
for _function, _op in (
    (special.compute_erf, special.erf),
    (special.compute_erfc, special.erfc),
    (special.compute_digamma, special.digamma),
    (products.invert, products.inverse),
    (convolution.patches, convolution.im2col),
    (convolution.image_of_patches, convolution.col2im),
):
    _function.attach_recording_form(lambda xp, x, op=_op, **how: record(op, x, **how))


def recorded_gradients(
    tensors: Sequence[TensorBase], gradients: Sequence[Any], retain_graph: bool, wanted: Sequence[Edge]
) -> list[Tensor | None]:
    """The gradients of all `tensors` with respect to edges, as tensors with a graph; None where none arrived.

    What a collective computed that no gradient here was made of is behind all of them, with a gradient of zero: other
    ranks' gradients were made of it, and theirs lead to a collective in which this rank takes part.

    Raises: GraphError for tensors on a GPU, and for an op without a second derivative; GraphFreedError, VersionError.
    """
    sinks: dict[Edge, Any] = dict.fromkeys(wanted)
    for_others: list[Tensor] = []
    with _recorded():
        seeds = [_seed(x, g) for x, g in zip(tensors, gradients, strict=True)]
        _engine.backward([root_of(x) for x in tensors], seeds, retain_graph, sinks, partial(_run_node, for_others))
        found = map(sinks.get, wanted)
        return [apply(elementwise.flat, (g, *for_others)) if g is not None and for_others else g for g in found]


class _recorded(enable_grad):
    """Where gradients are recorded, in the dtypes of what they are gradients of: without autocast."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "autocast": None}


def _seed(x: TensorBase, gradient: Any) -> Tensor:
    if x.device.type != "cpu":
        raise GraphError("create_graph=True: gradients have a graph on the CPU only, and this tensor is on a GPU")
    array = seed_of(x, gradient)
    return wrap(array, x.device) if gradient is None else apply(elementwise.cast, (gradient,), dtype=array.dtype)


def _run_node(for_others: list[Tensor], node: Node, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
    """The gradients of a node's inputs. g: a tensor, or a list with a tensor or None for each result.

    for_others: is given what a collective computed that is not wanted here
    """
    if isinstance(node.op, SelectOutput):
        return node.op.backward(None, g, needs, (), node.residual)
    if node.metadata is not None and node.metadata.recompute is not None:
        node.metadata.recompute()
    node.check_versions()
    if hasattr(node.op, "record_backward"):
        results = node.op.record_backward(node, g, needs)
        for_others += [x for x, need in zip(results, needs, strict=True) if x is not None and not need]
    elif isinstance(node.op, Op | Upcast) and node.op.name != "transfer":
        results = run_reference(node, node.op, g, needs)
    else:
        raise GraphError(f"{node.op.name}: its gradient has no derivative, which create_graph=True asks for")
    if modes.state.anomaly:
        check_gradients(node, [None if x is None else x.array for x in results])
    return results


def run_reference(node: Node, op: Op | Upcast, g: Any, needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
    """As `_run_node`, by the reference of `op`."""
    reference = OPS[op.name].reference
    run: Any = Upcast(reference) if isinstance(op, Upcast) else reference
    edges: Sequence[Any] = node.edges or ()
    of_saved = dict(zip((*reference.inputs, "out"), (*edges, node), strict=False))
    saved = _recording(node.saved, [of_saved[name] for name in node.op.saves], node.versions)
    residual = node.residual
    read = saved
    if node.call is not None:
        arrays, versions, parameters = node.call
        for version, count, i in versions:
            if version.count != count:
                raise VersionError(f"{node.op.name}: input {i}, which create_graph=True reads, was changed in place")
        inputs = _recording(arrays, edges, versions)
        if reference.name in STATES and len(inputs[0]) > 1:
            return _run_stepwise(reference, inputs, parameters, g, needs)
        if "tell" in parameters:
            parameters = {**parameters, "tell": None}  # statistics are told once
        _, residual = run.forward(recording_numpy, *inputs, **parameters)
        read = [*saved, *inputs]
    g = [None if x is None else RecordingArray(x) for x in g] if isinstance(g, list) else RecordingArray(g)
    results = run.backward(recording_numpy, g, needs, saved, residual)
    return [_result(x, read) if need else None for x, need in zip(results, needs, strict=True)]


def _recording(arrays: Sequence[Any], edges: Sequence[Any], versions: Versions) -> list[Any]:
    """What a node kept, where it stood in the graph; numbers and integers as they are."""
    tensors = restore_tensors(arrays, edges, versions)
    return [
        x if tensor is None or x.dtype.kind not in FLOATS else RecordingArray(tensor)
        for x, tensor in zip(arrays, tensors, strict=True)
    ]


STATES = {"rnn": 1, "gru": 1, "lstm": 2}  # recurrent ops, and how many of the inputs behind the first are states


def _run_stepwise(
    op: Op, inputs: list[Any], parameters: dict[str, Any], g: Sequence[Any], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of a recurrent op's inputs, by the op at one step of time after the other.

    The reference writes the states of all steps into one array: recorded, each write would be a copy of all of them.
    """
    # Nodes of their own to end at, also where two inputs are one tensor.
    ends: list[Any] = [None if x is None else apply(shape.reshape, (x.tensor,), shape=x.shape) for x in inputs]
    state, weights = ends[1 : 1 + STATES[op.name]], ends[1 + STATES[op.name] :]
    order = -1 if parameters["reverse"] else 1
    hs = []
    for x in ends[0].split(1)[::order]:
        h, *state = apply(op, (x, *state, *weights), **{**parameters, "reverse": False})
        hs.append(h)
    outs = apply(shape.cat, hs[::order], dim=0), *state
    used = [i for i, each in enumerate(g) if each is not None]
    wanted = [x.edge for x, need in zip(ends, needs, strict=True) if need]
    found = iter(recorded_gradients([outs[i] for i in used], [g[i] for i in used], True, wanted))
    return [next(found) if need else None for need in needs]


def _result(x: Any, read: Sequence[Any]) -> Tensor | None:
    """A gradient as a tensor. Its gradient for what was only compared is 0, as PyTorch's, and not None."""
    if x is None:
        return None
    result: Tensor = as_operand(x)
    arrays = [y for y in read if isinstance(y, RecordingArray) and (y.compared or result.edge is None)]
    others = [y.tensor for y in arrays if y.tensor.requires_grad]
    return apply(elementwise.flat, (result, *others)) if others else result
