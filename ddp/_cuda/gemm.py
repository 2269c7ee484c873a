"""The one door of matrix products on a GPU: `gemm` for two arrays as they lie, `fused` with an epilogue.

What a product needs (see gemm_plan) is found once for all that lie alike, and kept: from then on it is a look-up, an
allocation and a call. Everything goes to the current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._cuda import capture, cublaslt
from ddp._cuda.gemm_plan import (
    ALIGNMENTS,
    MOST,
    LtMatmul,
    MatmulSpec,
    MatrixLayout,
    MatrixSpec,
    UnsupportedMatmul,
    elements,
    matrix_layout,
    one_stride,
    strided_batch,
)
from ddp._precision import matmul as precision

Array = Any

KEPT = 4096  # plans; a network whose shapes change all the time forgets the oldest half

_recipes: dict[Any, MatmulPlan] = {}


def gemm(xp: Any, a: Array, b: Array, out: Array | None = None, accumulate: bool = False) -> Array | None:
    """a @ b, as NumPy's matmul has it, into `out` if given; with `accumulate`, added to what is there.

    None if cuBLASLt does not do it: for dtypes that it lacks, and where there is no cuBLASLt.
    """
    at_a, at_b = a.data, b.data
    key: Any
    if out is None:
        key = (
            *(a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, at_a.device_id, precision.tf32),
            *(ALIGNMENTS[at_a.ptr & 255], ALIGNMENTS[at_b.ptr & 255]),
        )
    else:
        key = (
            *(a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, at_a.device_id, precision.tf32),
            *(ALIGNMENTS[at_a.ptr & 255], ALIGNMENTS[at_b.ptr & 255], ALIGNMENTS[out.data.ptr & 255]),
            *(out.shape, out.strides, out.dtype, accumulate),
        )
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = _keep(key, _found(xp, a, b, out, accumulate))
    launch = recipe.launch
    if launch is None:
        return None if recipe.made is None else recipe.made(xp, a, b, out, accumulate)
    if out is None:
        out = xp.ndarray(recipe.shape, recipe.dtype)
    stream = xp.cuda.get_current_stream().ptr
    space = workspace(xp, at_a.device_id, stream) if recipe.room else 0
    if not recipe.starts:
        launch(at_b.ptr, at_a.ptr, out.data.ptr, 0, 0, space, stream)
        return out
    first, second, third = at_a.ptr, at_b.ptr, out.data.ptr
    for start_a, start_b, start_out in recipe.starts:
        launch(second + start_b, first + start_a, third + start_out, 0, 0, space, stream)
    return out


def fused(
    xp: Any,
    a: Array,
    b: Array,
    out: Array,
    epilogue: str,
    vector: Array | None = None,
    aux: Array | None = None,
    aux_lead: int = 0,
    accumulate: bool = False,
) -> bool:
    """out = a @ b with one of cuBLASLt's epilogues, for matrices. False, and nothing done, if it cannot.

    vector: a bias of out.shape[1] elements, or where the bias gradient goes; aux: what the epilogue writes for its
    backward, or reads there, with rows of `aux_lead` of its elements (bits for ReLU). accumulate: out is added to.
    """
    at_a = a.data
    key = (
        *(epilogue, a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, at_a.device_id, precision.tf32),
        *(ALIGNMENTS[at_a.ptr & 255], ALIGNMENTS[b.data.ptr & 255], ALIGNMENTS[out.data.ptr & 255]),
        *(out.shape, out.strides, out.dtype, 0 if vector is None else ALIGNMENTS[vector.data.ptr & 255], aux_lead),
        accumulate,
    )
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = _keep(key, _found_fused(xp, a, b, out, epilogue, vector, aux_lead, accumulate))
    if recipe.launch is None:
        return False
    stream = xp.cuda.get_current_stream().ptr
    space = workspace(xp, at_a.device_id, stream) if recipe.room else 0
    bias = 0 if vector is None else vector.data.ptr
    recipe.launch(b.data.ptr, at_a.ptr, out.data.ptr, bias, 0 if aux is None else aux.data.ptr, space, stream)
    return True


def _keep(key: Any, recipe: MatmulPlan) -> MatmulPlan:
    if len(_recipes) >= KEPT:
        for old in list(_recipes)[: KEPT // 2]:
            _recipes.pop(old, None)
    _recipes[key] = recipe
    return recipe


def forget() -> None:
    """Drops every plan: another library is in the place of the one that made them."""
    _recipes.clear()


def _found(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> MatmulPlan:
    """The recipe for arrays that lie as these do."""
    if a.ndim == 1 or b.ndim == 1:
        return MatmulPlan((), a.dtype, None, _of_vectors)
    library = cublaslt.library(xp)
    dtype = a.dtype if out is None else out.dtype
    if library is None or not takes(a.dtype, b.dtype, dtype):
        return MatmulPlan((), dtype, None)
    (m, k), (inner, n) = a.shape[-2:], b.shape[-2:]
    assert k == inner, (a.shape, b.shape)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, m, n)
    assert out is None or out.shape == shape, (out.shape, shape)
    if not m or not n or not k or 0 in lead:
        return MatmulPlan(shape, dtype, None, _of_nothing)
    if max(m, n, k) > MOST:
        return MatmulPlan(shape, dtype, None)
    size = a.dtype.itemsize
    a_strides, b_strides = broadcast_strides(a, len(lead)), broadcast_strides(b, len(lead))
    out_strides = contiguous_strides(shape, dtype.itemsize) if out is None else out.strides
    lies_a = matrix_layout_of(a, size)
    lies_b = matrix_layout_of(b, size)
    lies_out = MatrixLayout(False, n) if out is None else matrix_layout_of(out, dtype.itemsize)
    if lies_out is not None and lies_out.across:
        return MatmulPlan(shape, dtype, None, _turned)
    sized = (a_strides, size), (b_strides, size), (out_strides, dtype.itemsize)
    steps = [elements(strides[: len(lead)], each) for strides, each in sized]
    whole = [each for each in steps if each is not None]
    together = strided_batch(lead, whole) if len(whole) == 3 else None
    if lies_a is None or lies_b is None or lies_out is None or together is None:
        return MatmulPlan(shape, dtype, None, _by_copies(lies_a, lies_b, lies_out, lead, steps))
    starts = [in_bytes(start, size, size, dtype.itemsize) for start in together.starts]
    aligned = [alignment(x, [start[i] for start in starts]) for i, x in enumerate((a, b, out))]
    spec = MatmulSpec(
        *(n, m, k, together.many),
        a=MatrixSpec(b.dtype.name, lies_b.across, lies_b.lead, together.steps[1], aligned[1]),
        b=MatrixSpec(a.dtype.name, lies_a.across, lies_a.lead, together.steps[0], aligned[0]),
        d=MatrixSpec(dtype.name, False, lies_out.lead, together.steps[2], aligned[2]),
        tf32=precision.tf32,
        added=accumulate,
        room=workspace_size(xp, a.data.device_id),
    )
    try:
        plan = LtMatmul(library, library.handle(a.data.device_id), spec)
    except UnsupportedMatmul as error:
        warnings.warn(f"a slow kernel multiplies instead: {error}", RuntimeWarning, stacklevel=3)
        return MatmulPlan(shape, dtype, None)
    recipe = MatmulPlan(shape, dtype, plan)
    if len(starts) > 1:
        recipe.starts = tuple(starts)
    return recipe


def _found_fused(
    xp: Any, a: Array, b: Array, out: Array, epilogue: str, vector: Array | None, aux_lead: int, accumulate: bool
) -> MatmulPlan:
    library = cublaslt.library(xp)
    none = MatmulPlan(out.shape, out.dtype, None)
    if library is None or not takes(a.dtype, b.dtype, out.dtype) or not (out.size and a.size):
        return none
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k, (a.shape, b.shape)
    assert out.shape == (m, n), (out.shape, m, n)
    lies_a, lies_b, lies_out = (matrix_layout_of(x, x.dtype.itemsize) for x in (a, b, out))
    if lies_a is None or lies_b is None or lies_out is None or lies_out.across or max(m, n, k) > MOST:
        return none
    spec = MatmulSpec(
        *(n, m, k, 1),
        a=MatrixSpec(b.dtype.name, lies_b.across, lies_b.lead, 0, alignment(b)),
        b=MatrixSpec(a.dtype.name, lies_a.across, lies_a.lead, 0, alignment(a)),
        d=MatrixSpec(out.dtype.name, False, lies_out.lead, 0, alignment(out)),
        tf32=precision.tf32,
        added=accumulate,
        epilogue=epilogue,
        bias_aligned=0 if vector is None else alignment(vector),
        aux_lead=aux_lead,
        room=workspace_size(xp, a.data.device_id),
    )
    try:
        return MatmulPlan(out.shape, out.dtype, LtMatmul(library, library.handle(a.data.device_id), spec))
    except UnsupportedMatmul:
        return none  # not every epilogue exists for every dtype and layout: the parts do the same


def _of_vectors(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> Array | None:
    """A vector is a matrix of one row on the left, of one column on the right."""
    left, right = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*lead, *(() if a.ndim == 1 else a.shape[-2:-1]), *(() if b.ndim == 1 else b.shape[-1:]))
    if out is not None:
        assert out.shape == shape, (out.shape, shape)
        if a.ndim == 1 and b.ndim == 1:
            into = out.reshape(1, 1)
        else:
            into = out[..., None, :] if a.ndim == 1 else out[..., None]
        return None if gemm(xp, left, right, into, accumulate) is None else out
    made = gemm(xp, left, right)
    return None if made is None else made.reshape(shape)


def _of_nothing(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> Array:
    """A product without elements, or a sum of none."""
    if out is None:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return xp.zeros((*lead, a.shape[-2], b.shape[-1]), a.dtype)
    if not accumulate and out.size:
        out.fill(0)
    return out


def _turned(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> Array | None:
    """Into an array whose columns lie side by side: the transpose of all."""
    assert out is not None
    turned = gemm(xp, b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2), accumulate)
    return None if turned is None else out


def _by_copies(
    lies_a: MatrixLayout | None,
    lies_b: MatrixLayout | None,
    lies_out: MatrixLayout | None,
    lead: tuple[int, ...],
    steps: list[Any],
) -> Made:
    """The product after what the library cannot take as it lies was copied."""
    if lies_a is None or lies_b is None or lies_out is None:  # the rest is seen when these lie well
        single = [True, True, True]
    else:
        single = [
            each is not None and one_stride(lead, each) is not None and min(each, default=0) >= 0 for each in steps
        ]

    def copied(xp: Any, x: Array, lies: MatrixLayout | None, ok: bool) -> Array:
        if not ok:  # a stride that is none, or a factor that is broadcast along some of several axes
            x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
            return xp.array(x, order="C")
        return x if lies is not None else xp.array(x, order="C")

    def made(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> Array | None:
        a, b = copied(xp, a, lies_a, single[0]), copied(xp, b, lies_b, single[1])
        if lies_out is not None and single[2]:
            return gemm(xp, a, b, out, accumulate)
        assert out is not None
        found = gemm(xp, a, b)
        if found is None:
            return None
        if accumulate:
            out += found
        else:
            out[...] = found
        return out

    return made


# How products of arrays that lie alike are made, and what is to be known of arrays for that.

Made = Callable[[Any, Array, Array, "Array | None", bool], "Array | None"]


class MatmulPlan:
    """How to make products of arrays that lie alike. launch: None where `made` has to do it in another way

    starts: where the operands of each product begin, in bytes; empty if there is but one, at the beginning
    """

    __slots__ = ("dtype", "launch", "made", "plan", "room", "shape", "starts")

    def __init__(self, shape: tuple[int, ...], dtype: Any, plan: LtMatmul | None, made: Made | None = None) -> None:
        self.shape, self.dtype, self.plan, self.made = shape, dtype, plan, made
        self.launch = None if plan is None else plan.launch
        self.room = plan is not None and plan.room
        self.starts: tuple[tuple[int, ...], ...] = ()


def takes(a: Any, b: Any, out: Any) -> bool:
    """Whether the library multiplies these dtypes; what is of 16 bits may also be added up in a float32 result."""
    return bool(a == b and a.name in cublaslt.TYPES and (out == a or (out.name == "float32" and a.itemsize == 2)))


def matrix_layout_of(x: Array, size: int) -> MatrixLayout | None:
    """How the matrices of x lie, None if they must be copied. size: bytes of an element"""
    strides = elements(x.strides[-2:], size)
    return None if strides is None else matrix_layout(x.shape[-2:], strides)


def broadcast_strides(x: Array, lead: int) -> tuple[int, ...]:
    """Strides in bytes of x with `lead` leading axes, 0 where it is broadcast."""
    own = [0 if size == 1 else stride for size, stride in zip(x.shape[:-2], x.strides[:-2], strict=True)]
    return (*(0,) * (lead - len(own)), *own)


def contiguous_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of a new array."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


def in_bytes(start: tuple[int, ...], *sizes: int) -> tuple[int, ...]:
    """Where operands begin, by the sizes of their elements."""
    return tuple([each * size for each, size in zip(start, sizes, strict=True)])


def alignment(x: Array | None, starts: list[int] | None = None) -> int:
    """The alignment in bytes that all of `starts` have; fresh memory has the best."""
    at = 0 if x is None else x.data.ptr
    return min(ALIGNMENTS[(at + start) & 255] for start in starts or [0])


# Scratch memory for products: some algorithms of cuBLASLt add up parts, which need a place.
#
# Each stream has its own, since products of two streams may run at once. A CUDA graph gets some of its own as well: it
# may be replayed on any stream, beside any other work.

PER_THREAD = 2  # the handle of CUDA's per-thread default stream: one number for as many streams as there are threads
WORKSPACES = 16  # streams that have some; a program that makes ever new streams gives back the oldest's

Rooms = dict[tuple[int, int, int], Any]
_shared: Rooms = {}
_captured: weakref.WeakKeyDictionary[capture.Capture, Rooms] = weakref.WeakKeyDictionary()
_sizes: dict[int, int] = {}


def workspace_size(xp: Any, device: int) -> int:
    """Bytes of scratch on a device: PyTorch's choice, 32 MiB from Hopper on, 8 MiB before."""
    found = _sizes.get(device)
    if found is None:
        capability = int(xp.cuda.Device(device).compute_capability)
        found = _sizes[device] = (32 if capability >= 90 else 8) << 20
    return found


def workspace(xp: Any, device: int, stream: int) -> int:
    """The address of the scratch memory of a stream, from the pool when it is first asked for, and kept."""
    graph = capture.now()
    rooms = _shared if graph is None else _captured.setdefault(graph, {})
    key = device, stream, threading.get_ident() if stream == PER_THREAD else 0
    found = rooms.get(key)
    if found is None:
        if len(rooms) >= WORKSPACES:  # back to its stream's arena, in whose order it is used next
            rooms.pop(next(iter(rooms)), None)
        found = rooms[key] = xp.empty(workspace_size(xp, device), "uint8")
        if graph is not None:
            graph.keep(found)
    return int(found.data.ptr)


def free_workspaces() -> None:
    """Lets go of all scratch memory: of tests whose devices are gone."""
    _shared.clear()
    _sizes.clear()
