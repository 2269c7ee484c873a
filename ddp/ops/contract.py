"""Einstein's sums of two factors, as one batched matrix product: labels are what `np.einsum` names by letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved
from ddp.ops.products import product

Labels = tuple[int, ...]

# Whether axes of a batch are taken together first, which copies where they lie apart: the door of a GPU takes them as
# they lie.
JOINED = {"numpy": True, "cupy": False}


def contract(xp: Any, x: Array, of_x: Labels, y: Array, of_y: Labels, of_out: Labels) -> Array:
    """The product of x and y, summed over the labels that `of_out` lacks.

    Each of the three names a label once; those that only one factor has are in the result.
    """
    batch = [k for k in of_out if k in of_x and k in of_y]
    rows = [k for k in of_out if k in of_x and k not in of_y]
    across = [k for k in of_out if k in of_y and k not in of_x]
    inner = [k for k in of_x if k in of_y and k not in of_out]
    size = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_y, y.shape, strict=True))}

    stacks = [batch] if JOINED[xp.__name__] else [[k] for k in batch]

    def matrix(array: Array, labels: Labels, *groups: Sequence[int]) -> Array:
        order = [labels.index(k) for group in groups for k in group]
        return array.transpose(order).reshape([math.prod([size[k] for k in group]) for group in groups])

    out = product(xp, matrix(x, of_x, *stacks, rows, inner), matrix(y, of_y, *stacks, inner, across))
    made = (*batch, *rows, *across)
    return out.reshape([size[k] for k in made]).transpose([made.index(k) for k in of_out])


# z = sum x*y over the labels that z lacks;  dx = sum g*y over those that x lacks, dy = sum x*g over those that y lacks
def _einsum(xp: Any, x: Array, y: Array, labels: tuple[Labels, Labels, Labels]) -> tuple[Array, Any]:
    return contract(xp, x, labels[0], y, labels[1], labels[2]), labels


def _einsum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, labels: Any) -> Gradients:
    y, x = saved
    of_x, of_y, of_out = labels
    return (
        contract(xp, g, of_out, y, of_y, of_x) if needs[0] else None,
        contract(xp, g, of_out, x, of_x, of_y) if needs[1] else None,
    )


einsum = Op("einsum", _einsum, _einsum_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)})
einsum.launches(_einsum, _einsum_backward, native=True)


def _diagonals(xp: Any, x: Array, labels: Labels) -> Array:
    """x with labels that stand twice taken once, along the diagonal: a view, axes in order of first appearance."""
    once = tuple(dict.fromkeys(labels))
    shape = [x.shape[labels.index(k)] for k in once]
    strides = [sum(s for s, k in zip(x.strides, labels, strict=True) if k == label) for label in once]
    return xp.lib.stride_tricks.as_strided(x, shape, strides)


# z_i.. = x_i..i..;  dx = g on the diagonal, 0 elsewhere
def _take_diagonals(xp: Any, x: Array, labels: Labels) -> tuple[Array, Any]:
    return _diagonals(xp, x, labels).copy(), (x.shape, labels)


def _take_diagonals_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, labels = residual
    dx = xp.zeros(shape, g.dtype)
    _diagonals(xp, dx, labels)[...] = g
    return (dx,)


diagonals = Op("diagonals", _take_diagonals, _take_diagonals_backward, inputs=("x",))
