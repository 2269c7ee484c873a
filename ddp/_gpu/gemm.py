"""The one door of matrix products on a GPU: `gemm` for two arrays as they lie, `fused` with an epilogue.

What a product needs (see gemm_plan) is found once for all that lie alike, and kept: from then on it is a look-up, an
allocation and a call. Everything goes to the current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ddp._gpu import lt
from ddp._gpu.gemm_layout import ALIGNMENTS, MOST, Lying, batch, elements, one_stride
from ddp._gpu.gemm_plan import Plan, Side, Spec, Unsupported
from ddp._gpu.gemm_recipe import (
    Made,
    Recipe,
    alignment,
    broadcast_strides,
    contiguous_strides,
    how_it_lies,
    in_bytes,
    takes,
)
from ddp._gpu.gemm_room import room, room_size
from ddp._precision import matmul as precision

Array = Any

KEPT = 4096  # plans; a network whose shapes change all the time forgets the oldest half

_recipes: dict[Any, Recipe] = {}


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
    space = room(xp, at_a.device_id, stream) if recipe.room else 0
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
    space = room(xp, at_a.device_id, stream) if recipe.room else 0
    bias = 0 if vector is None else vector.data.ptr
    recipe.launch(b.data.ptr, at_a.ptr, out.data.ptr, bias, 0 if aux is None else aux.data.ptr, space, stream)
    return True


def _keep(key: Any, recipe: Recipe) -> Recipe:
    if len(_recipes) >= KEPT:
        for old in list(_recipes)[: KEPT // 2]:
            _recipes.pop(old, None)
    _recipes[key] = recipe
    return recipe


def forget() -> None:
    """Drops every plan: another library is in the place of the one that made them."""
    _recipes.clear()


def _found(xp: Any, a: Array, b: Array, out: Array | None, accumulate: bool) -> Recipe:
    """The recipe for arrays that lie as these do."""
    if a.ndim == 1 or b.ndim == 1:
        return Recipe((), a.dtype, None, _of_vectors)
    library = lt.library(xp)
    dtype = a.dtype if out is None else out.dtype
    if library is None or not takes(a.dtype, b.dtype, dtype):
        return Recipe((), dtype, None)
    (m, k), (inner, n) = a.shape[-2:], b.shape[-2:]
    assert k == inner, (a.shape, b.shape)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, m, n)
    assert out is None or out.shape == shape, (out.shape, shape)
    if not m or not n or not k or 0 in lead:
        return Recipe(shape, dtype, None, _of_nothing)
    if max(m, n, k) > MOST:
        return Recipe(shape, dtype, None)
    size = a.dtype.itemsize
    a_strides, b_strides = broadcast_strides(a, len(lead)), broadcast_strides(b, len(lead))
    out_strides = contiguous_strides(shape, dtype.itemsize) if out is None else out.strides
    lies_a = how_it_lies(a, size)
    lies_b = how_it_lies(b, size)
    lies_out = Lying(False, n) if out is None else how_it_lies(out, dtype.itemsize)
    if lies_out is not None and lies_out.across:
        return Recipe(shape, dtype, None, _turned)
    sized = (a_strides, size), (b_strides, size), (out_strides, dtype.itemsize)
    steps = [elements(strides[: len(lead)], each) for strides, each in sized]
    whole = [each for each in steps if each is not None]
    together = batch(lead, whole) if len(whole) == 3 else None
    if lies_a is None or lies_b is None or lies_out is None or together is None:
        return Recipe(shape, dtype, None, _by_copies(lies_a, lies_b, lies_out, lead, steps))
    starts = [in_bytes(start, size, size, dtype.itemsize) for start in together.starts]
    aligned = [alignment(x, [start[i] for start in starts]) for i, x in enumerate((a, b, out))]
    spec = Spec(
        *(n, m, k, together.many),
        a=Side(b.dtype.name, lies_b.across, lies_b.lead, together.steps[1], aligned[1]),
        b=Side(a.dtype.name, lies_a.across, lies_a.lead, together.steps[0], aligned[0]),
        d=Side(dtype.name, False, lies_out.lead, together.steps[2], aligned[2]),
        tf32=precision.tf32,
        added=accumulate,
        room=room_size(xp, a.data.device_id),
    )
    try:
        plan = Plan(library, library.handle(a.data.device_id), spec)
    except Unsupported as error:
        warnings.warn(f"a slow kernel multiplies instead: {error}", RuntimeWarning, stacklevel=3)
        return Recipe(shape, dtype, None)
    recipe = Recipe(shape, dtype, plan)
    if len(starts) > 1:
        recipe.starts = tuple(starts)
    return recipe


def _found_fused(
    xp: Any, a: Array, b: Array, out: Array, epilogue: str, vector: Array | None, aux_lead: int, accumulate: bool
) -> Recipe:
    library = lt.library(xp)
    none = Recipe(out.shape, out.dtype, None)
    if library is None or not takes(a.dtype, b.dtype, out.dtype) or not (out.size and a.size):
        return none
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k, (a.shape, b.shape)
    assert out.shape == (m, n), (out.shape, m, n)
    lies_a, lies_b, lies_out = (how_it_lies(x, x.dtype.itemsize) for x in (a, b, out))
    if lies_a is None or lies_b is None or lies_out is None or lies_out.across or max(m, n, k) > MOST:
        return none
    spec = Spec(
        *(n, m, k, 1),
        a=Side(b.dtype.name, lies_b.across, lies_b.lead, 0, alignment(b)),
        b=Side(a.dtype.name, lies_a.across, lies_a.lead, 0, alignment(a)),
        d=Side(out.dtype.name, False, lies_out.lead, 0, alignment(out)),
        tf32=precision.tf32,
        added=accumulate,
        epilogue=epilogue,
        bias_aligned=0 if vector is None else alignment(vector),
        aux_lead=aux_lead,
        room=room_size(xp, a.data.device_id),
    )
    try:
        return Recipe(out.shape, out.dtype, Plan(library, library.handle(a.data.device_id), spec))
    except Unsupported:
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
    lies_a: Lying | None, lies_b: Lying | None, lies_out: Lying | None, lead: tuple[int, ...], steps: list[Any]
) -> Made:
    """The product after what the library cannot take as it lies was copied."""
    if lies_a is None or lies_b is None or lies_out is None:  # the rest is seen when these lie well
        single = [True, True, True]
    else:
        single = [
            each is not None and one_stride(lead, each) is not None and min(each, default=0) >= 0 for each in steps
        ]

    def copied(xp: Any, x: Array, lies: Lying | None, ok: bool) -> Array:
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
