"""Patches of images as columns, and columns added up into images: each is the other's gradient."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, working
from ddp.ops.windows import Walk, frame


def _unfold(xp: Any, x: Array, walk: Walk) -> Array:
    seen = walk.view(xp, frame(xp, x, walk, 0), 2).transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(x.shape[0], x.shape[1] * walk.elements, walk.out[0] * walk.out[1])


def _fold(xp: Any, columns: Array, walk: Walk) -> Array:
    n, channels = columns.shape[0], columns.shape[1] // walk.elements
    columns = columns.reshape(n, channels, walk.elements, *walk.out)
    back = xp.zeros((n, channels, *walk.framed), working(columns))
    for element, (rows, across) in enumerate(walk.shifts()):
        back[..., rows, across] += columns[:, :, element]
    return back[..., walk.inside[0], walk.inside[1]].astype(columns.dtype)


# z[n,(c,i,j),(p,q)] = x[n,c,p*s+i*d,q*s+j*d] (x framed with zeros);  dx = g added up where it was read
def _im2col(xp: Any, x: Array, walk: Walk) -> tuple[Array, Any]:
    return _unfold(xp, x, walk), walk


def _im2col_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_fold(xp, g, walk),)


im2col = Op("im2col", _im2col, _im2col_backward, inputs=("x",))


# z[n,c,p*s+i*d,q*s+j*d] = sum of x[n,(c,i,j),(p,q)];  dx = g where it was added
def _col2im(xp: Any, x: Array, walk: Walk) -> tuple[Array, Any]:
    return _fold(xp, x, walk), walk


def _col2im_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_unfold(xp, g, walk),)


col2im = Op("col2im", _col2im, _col2im_backward, inputs=("x",))
