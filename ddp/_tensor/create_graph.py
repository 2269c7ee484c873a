"""Backward under create_graph: runs each node's reference backward on recording arrays, so that gradients have a graph.

No op has a formula of its second derivative: each step of its backward is recorded as an op, and autograd
differentiates those. For that, saved values get their edges back: an input gets the edge that the node has for it, the
result gets the node itself. The residual gets no edge, and counts as constant. If it changes with the inputs
(`Op.derived`), the reference forward runs again, recorded, to compute it; or the gradients are computed through other
ops with the same result in fewer steps (`_COMPOSITES`).

The reference's backward takes the residual of a native kernel unchanged, unless the residual is computed again. A
device kernel's own backward runs if its formulas can be recorded; otherwise its residual is converted to that of the
reference (`Op.reference_residual`), and the reference's backward runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddp import _engine
from ddp._device import on
from ddp._engine import CollectiveNode, Edge, Node, SelectOutput, Versions, enable_grad, modes
from ddp._engine.anomaly import check_gradients
from ddp._tensor.base import (
    FLOATS,
    Parameters,
    Tensor,
    TensorBase,
    Tensors,
    apply,
    restore_tensors,
    root_of,
    seed_of,
    wrap,
)
from ddp._tensor.operands import convert
from ddp._tensor.recording import FULL, RecordingArray, as_operand, record, recording_module
from ddp.errors import GraphError, VersionError
from ddp.ops import (
    activation,
    arrays,
    attention,
    convolution,
    elementwise,
    fft,
    indexing,
    losses,
    memory_formats,
    normalization,
    products,
    reduction,
    shape,
    softmax_ops,
    special,
)
from ddp.ops.arrays import BFLOAT16, Array, Ints
from ddp.ops.op import OPS, Needs, Op, Upcast

Composite = Callable[..., Sequence[Tensor]]  # computes an op by other ops, from its inputs and parameters

# Ops whose ordinary backward uses compiled kernels, or sums in another order than the recorded backward: the two round
# differently. The ordinary backward runs, too, and its numbers are used: first derivatives have the same bits with
# and without a graph.
ROUNDED_APART = {
    "batch_norm",
    "channel_affine",
    "cross_entropy",
    "gelu",
    "group_norm",
    "gru",
    "layer_norm",
    "log_softmax",
    "lstm",
    "max_pool2d",
    "max_pool2d_with_indices",
    "rms_norm",
    "rnn",
    "scaled_dot_product_attention",
    "setitem",
    "silu",
    "softmax",
    "sync_batch_norm",
    "var",
}

# Recording kernels of functions that cannot run on recording arrays, or would take many steps.


def _join(xp: Any, parts: Sequence[Any], sizes: Ints, dim: int, lengths: Any = None) -> RecordingArray:
    zero = xp.module.zeros((), next(part.dtype for part in parts if part is not None))
    zeros = shape.cut(xp.module, xp.module.broadcast_to(zero, sizes), dim, lengths)
    filled = [blank if part is None else part for part, blank in zip(parts, zeros, strict=True)]
    return record(shape.stack if lengths is None else shape.cat, *filled, dim=dim)


def _cut(xp: Any, x: Array, dim: int, lengths: Any = None) -> list[RecordingArray]:
    parts = x.tensor.unbind(dim) if lengths is None else x.tensor.split_with_sizes(lengths, dim)
    return [RecordingArray(part) for part in parts]


def _how(sizes: convolution.Shape) -> dict[str, Any]:
    window = sizes.window
    return {"stride": window.stride, "padding": window.padding, "dilation": window.dilation, "groups": sizes.groups}


def _adjoint(xp: Any, g: Array, w: Array, x: Array, sizes: convolution.Shape) -> tuple[Any, Any]:
    dx = dw = None
    if w is not None:
        dx = record(convolution.conv_transpose2d, g, w, None, size=sizes.window.image, **_how(sizes))
    if x is not None:
        dw = record(convolution.conv_filters, x, g, shape=sizes)
    return dx, dw


def _zeros_but(xp: Any, g: Array, sizes: Ints, view: Callable[[Any, Any], Any]) -> RecordingArray:
    where = view(xp.module, xp.module.arange(math.prod(sizes)).reshape(sizes)).copy()
    zeros = xp.module.zeros(math.prod(sizes), g.dtype)
    return record(indexing.setitem, zeros, g, steps=((where,),)).reshape(sizes)


def _moments(xp: Any, x: Array) -> tuple[Any, Any]:
    n = max(x.size // max(x.shape[1], 1), 1)
    mean = x.sum(axis=(0, 2)) / n
    return mean, xp.square(x - mean[:, None]).sum(axis=(0, 2)) / n


arrays.where_or_zero.attach_recording_kernel(
    lambda xp, mask, g: record(elementwise.where, xp.module.asarray(mask), g, 0)
)
fft.transformed.attach_recording_kernel(lambda xp, x, *transform: record(fft.fft, x, transform=transform))
shape.zeros_but.attach_recording_kernel(_zeros_but)
shape.diagonal_of.attach_recording_kernel(
    lambda xp, x, offset, dim0, dim1: record(shape.diagonal, x, offset=offset, dim0=dim0, dim1=dim1)
)
indexing.add_rows_into.attach_recording_kernel(
    lambda xp, where, g, out: out.write(record(indexing.index_add, out, g, places=(where, FULL)))
)
indexing.add_flat.attach_recording_kernel(
    lambda xp, x, where, g: record(indexing.index_add, x, g.reshape(-1), places=(where.reshape(-1),))
)
shape.join.attach_recording_kernel(_join)
shape.cut.attach_recording_kernel(_cut)
memory_formats.as_format.attach_recording_kernel(lambda xp, x, last: x)
convolution.correlate.attach_recording_kernel(
    lambda xp, x, w, b, sizes: record(convolution.conv2d, x, w, b, **_how(sizes))
)
convolution.adjoint.attach_recording_kernel(_adjoint)
# As many heads at a time as on a GPU: this takes few steps, and draws the dropout masks in the same order as the
# forward on a GPU does.
attention.score_bytes.attach_recording_kernel(lambda xp: attention.DEVICE_SCORE_BYTES)
attention.drawn_masks.attach_recording_kernel(lambda xp, seed, p: attention.drawn_masks(xp.module, seed, p))
reduction.moments.attach_recording_kernel(_moments)
# Leaves out the reference's correction for float64 statistics: here statistics have the dtype of the recording array.
reduction.standardize.attach_recording_kernel(lambda xp, x, mean, rstd: (x - mean) * rstd)
# Called only by a forward that runs again to compute residuals: nothing reads its result.
normalization.channel_norm.attach_recording_kernel(lambda xp, x, *others: x)
products.column_sums.attach_recording_kernel(
    lambda xp, g, out=None: record(products.matmul, products.ones(xp.module, g.shape[0], g.dtype), g)
)
for _function, _op in (
    (activation.times_sigmoid_derivative, activation.sigmoid_gradient),
    (activation.times_tanh_derivative, activation.tanh_gradient),
    (special.compute_erf, special.erf),
    (special.compute_erfc, special.erfc),
    (special.compute_digamma, special.digamma),
    (products.invert, products.inverse),
    (convolution.patches, convolution.im2col),
    (convolution.image_of_patches, convolution.col2im),
):
    _function.attach_recording_kernel(lambda xp, *xs, op=_op, **how: record(op, *xs, **how))


def recorded_gradients(
    tensors: Sequence[TensorBase], gradients: Sequence[Any], retain_graph: bool, wanted: Sequence[Edge]
) -> list[Tensor | None]:
    """Returns the gradient of all `tensors` for each edge in `wanted`: a tensor with a graph, or None if none arrived.

    A collective's result on which no gradient here depends is added to the graph of every gradient, with the derivative
    0. Gradients of other ranks depend on that result, and differentiating them runs collectives in which this rank
    must take part.

    Raises: GraphError for an op without a second derivative; GraphFreedError, VersionError.
    """
    sinks: dict[Edge, Any] = dict.fromkeys(wanted)
    for_others: list[Tensor] = []
    with _recorded(), on(tensors[0].device):
        seeds = [_seed(x, g) for x, g in zip(tensors, gradients, strict=True)]
        _engine.backward([root_of(x) for x in tensors], seeds, retain_graph, sinks, partial(_run_node, for_others))
        results = map(sinks.get, wanted)
        return [apply(elementwise.flat, (g, *for_others)) if g is not None and for_others else g for g in results]


class _recorded(enable_grad):
    """Records ops without autocast: gradients have the dtypes of the inputs."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "autocast": None}


def _seed(x: TensorBase, gradient: Any) -> Tensor:
    array = seed_of(x, gradient)
    return wrap(array, x.device) if gradient is None else apply(elementwise.cast, (gradient,), dtype=array.dtype)


def _run_node(for_others: list[Tensor], node: Node, g: Any, needs: Needs) -> Sequence[Any]:
    """Computes the gradients of a node's inputs. g: a tensor, or a list with a tensor or None for each result.

    for_others: this list gets the results of collectives that only the other ranks need
    """
    if isinstance(node.op, SelectOutput):
        return node.op.backward(None, g, needs, (), node.residual)
    if node.metadata is not None and node.metadata.recompute is not None:
        node.metadata.recompute()
    node.check_versions()
    if hasattr(node.op, "record_backward"):
        results = node.op.record_backward(node, g, needs)
        for_others += [x for x, need in zip(results, needs, strict=True) if x is not None and not need]
    elif node.op.name == "transfer":
        results = [g.to(node.residual)]
    elif type(node.op) in (Op, Upcast):
        results = run_reference(node, node.op, g, needs)
    else:
        raise GraphError(f"{node.op.name}: its gradient has no derivative, which create_graph=True asks for")
    is_function = type(node.op) not in (Op, Upcast) and type(node) is not CollectiveNode  # a Function may have any name
    if node.op.name in ROUNDED_APART and not is_function:
        values = node.run([*map(_array, g)] if isinstance(g, list) else _array(g), needs)
        # Copies: a backward may return the same memory twice, or that of g.
        copies = [None if x is None else node.xp.array(x) for x in values]
        results = restore_tensors(copies, [None if x is None else x.edge for x in results], ())
    if modes.state.anomaly:
        check_gradients(node, [*map(_array, results)])
    return results


def _array(x: Tensor | None) -> Any:
    return None if x is None else x.array


def run_reference(node: Node, op: Op | Upcast, g: Any, needs: Needs) -> Sequence[Tensor | None]:
    """Computes the gradients of a node's inputs by the reference of `op`; see `_run_node`."""
    run, residual = _recordable(node, op, g)
    xp: Any = recording_module(node.xp)
    edges: Sequence[Any] = node.edges or ()
    places = (*edges, node)
    plan = op.plan(needs)  # only what the wanted gradients read
    kept = [None if i is None else x for x, i in zip(node.saved, plan, strict=True)]
    saved = _recording(kept, [None if i is None else places[i] for i in plan], node.versions)
    read = saved
    if node.call is not None:
        arrays, versions, parameters = node.call
        for version, count, i in versions:
            if version.count != count:
                raise VersionError(f"{node.op.name}: input {i}, which create_graph=True reads, was changed in place")
        inputs = _recording(arrays, edges, versions)
        if op.name in _COMPOSITES and inputs[0].size and not parameters.get("smoothing"):
            return _run_composite(_COMPOSITES[op.name], inputs, parameters, g, needs)
        if "tell" in parameters:
            parameters = {**parameters, "tell": None}  # the first forward has updated the running statistics
        _, residual = run.forward(xp, *inputs, **parameters)
        read = [*saved, *inputs]
    if isinstance(g, list):
        boxed: Any = [None if x is None else RecordingArray(x) for x in g]
    else:
        boxed = RecordingArray(g)
    results = run.backward(xp, boxed, needs, saved, residual)
    return [_result(x, read) if need else None for x, need in zip(results, needs, strict=True)]


def _recordable(node: Node, op: Op | Upcast, g: Any) -> tuple[Any, Any]:
    """Returns the op that runs on recording arrays in place of `op`, and the residual for its backward."""
    reference = OPS[op.name].reference
    if type(op) is not Op:
        return reference.upcast, node.residual
    if op.reference is op and node.call is None:
        return op, node.residual
    convert = op.reference_residual
    residual = node.residual if convert is None else convert(node.xp, node.residual)
    # A device kernel accepts bfloat16; its reference may not.
    if op.backward_supports_bfloat16 and any(x is not None and x.dtype is BFLOAT16 for x in (g, *node.saved)):
        return reference.upcast, (residual, None)
    return reference, residual


def _recording(arrays: Sequence[Any], edges: Sequence[Any], versions: Versions) -> list[Any]:
    """Makes recording arrays, with these edges, of arrays that a node saved; keeps numbers and integer arrays."""
    tensors = restore_tensors(arrays, edges, versions)
    return [
        x if tensor is None or x.dtype.kind not in FLOATS else RecordingArray(tensor)
        for x, tensor in zip(arrays, tensors, strict=True)
    ]


def _run_composite(
    compose: Composite, inputs: Sequence[Any], parameters: Parameters, g: Any, needs: Needs
) -> Sequence[Tensor | None]:
    """Computes the gradients of an op's inputs through other ops with the same result, which `compose` calls.

    The forward of the op does not run again, since its residual is not needed.
    """
    # The backward below ends at these tensors. Each input gets a node of its own, even if two inputs are one tensor.
    ends: list[Any] = [None if x is None else apply(elementwise.flat, (x.tensor,)) for x in inputs]
    # In float32 at least, so that each gradient is rounded once.
    wide = [x if x is None else convert(x, np.promote_types(x.array.dtype, "float32")) for x in ends]
    outs = compose(*wide, **parameters)
    grads = g if isinstance(g, list) else [g]
    used = [i for i, grad in enumerate(grads) if grad is not None]
    wanted = [x.edge for x, need in zip(ends, needs, strict=True) if need]
    results = iter(recorded_gradients([outs[i] for i in used], [grads[i] for i in used], True, wanted))
    return [next(results) if need else None for need in needs]


# Recurrent ops, one time step after the other. The reference writes the states of all steps into one array, and each
# recorded write would copy the whole array. A step returns the next states. a, e: the linear terms of the input and of
# the previous state.


def _rnn_step(a: Tensor, e: Tensor, h: Tensor, relu: bool) -> Tensors:
    return ((a + e).relu() if relu else (a + e).tanh(),)


def _lstm_step(a: Tensor, e: Tensor, h: Tensor, c: Tensor, w_hr: Tensor | None) -> Tensors:
    i, f, u, o = (a + e).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * u.tanh()
    m = o.sigmoid() * c.tanh()
    return m if w_hr is None else apply(products.linear, (m, w_hr, None)), c


def _gru_step(a: Tensor, e: Tensor, h: Tensor) -> Tensors:
    a_r, a_z, a_n = a.chunk(3, 1)
    e_r, e_z, e_n = e.chunk(3, 1)
    z = (a_z + e_z).sigmoid()
    n = (a_n + (a_r + e_r).sigmoid() * e_n).tanh()
    return (n + z * (h - n),)


def _run_steps(step: Composite, count: int, *inputs: Any, reverse: bool, **how: Any) -> Sequence[Tensor]:
    """Runs `step` for all time steps. Returns the first state at every step, and all states after the last step.

    count: the number of states, which follow the input sequence in `inputs`
    """
    states: Sequence[Tensor] = inputs[1 : 1 + count]
    w_ih, w_hh, b_ih, b_hh, *others = inputs[1 + count :]
    order = -1 if reverse else 1
    hs = []
    for a in apply(products.linear, (inputs[0], w_ih, b_ih)).unbind(0)[::order]:
        states = step(a, apply(products.linear, (states[0], w_hh, b_hh)), *states, *others, **how)
        hs.append(states[0])
    return [apply(shape.stack, hs[::order], dim=0), *states]


_COMPOSITES: dict[str, Composite] = {
    "cross_entropy": lambda x, smoothing, float32_loss=False, **how: [
        apply(losses.nll_loss, (apply(softmax_ops.log_softmax, (x,), dim=1),), **how)
    ],
    "gru": partial(_run_steps, _gru_step, 1),
    "lstm": partial(_run_steps, _lstm_step, 2),
    "rnn": partial(_run_steps, _rnn_step, 1),
}


def _result(x: Any, read: Sequence[Any]) -> Tensor | None:
    """Returns a gradient as a tensor, whose graph has all values that it depends on.

    read: the values that the backward read. Values that were compared are added to the graph with the derivative 0. If
    the gradient has no graph, all values are added.
    """
    if x is None:
        return None
    result: Tensor = as_operand(x)
    others = [
        y.tensor
        for y in read
        if type(y) is RecordingArray and (y.compared or result.edge is None) and y.tensor.edge is not None
    ]
    return apply(elementwise.flat, (result, *others)) if others else result
