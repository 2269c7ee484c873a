"""Gradients held within bounds before an optimizer's step.

They may be views of flat buckets: what is read is each gradient once, and what is written stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from numpy import errstate

from ddp._device import place
from ddp._engine import no_grad
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp.errors import ArgumentError

Tensors = Tensor | Iterable[Tensor]


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _grads(parameters: Tensors) -> list[Tensor]:
    return [g for g in (p.grad for p in _listed(parameters)) if g is not None]


def _norm(xp: Any, x: Any, p: float) -> Any:
    """The p-norm of all elements, 0-d. Half types are added up in float32."""
    if x.dtype.itemsize == 2:
        x = x.astype("float32")
    x = x.reshape(-1)
    if p == 2:
        return xp.sqrt(xp.dot(x, x))
    if p == math.inf:
        return xp.abs(x).max() if x.size else xp.zeros((), x.dtype)
    if p == 1:
        return xp.abs(x).sum()
    return (xp.abs(x) ** p).sum() ** (1 / p)


@no_grad()
@errstate(all="ignore")
def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of all elements of all tensors together, as one vector; a 0-d tensor on the first one's device.

    norm_type: a number, or inf. foreach: accepted, and changes nothing. Raises: ArgumentError for a norm that is
    infinite or nan, if asked to, which waits for a GPU.
    """
    found = _listed(tensors)
    p = float(norm_type)
    if not found:
        return zeros(())
    where = found[0]._device
    xp = where.xp
    norms = [place(x._device.xp.asarray(_norm(x._device.xp, x._array, p)), where) for x in found]
    total = xp.asarray(norms[0] if len(norms) == 1 else _norm(xp, xp.stack(norms), p))
    if error_if_nonfinite and not xp.isfinite(total):
        raise ArgumentError(
            f"the total norm of order {p} is {float(total)}, so gradients cannot be clipped by it; "
            "pass error_if_nonfinite=False to scale by it nevertheless"
        )
    return wrap(total, where)


@no_grad()
@errstate(all="ignore")
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scales all gradients by max_norm / total_norm where that is below 1. total_norm: 0-d, of get_total_norm."""
    grads = _grads(parameters)
    xp = total_norm._device.xp
    scale = xp.asarray(xp.minimum(float(max_norm) / (total_norm._array + 1e-6), 1.0))
    if total_norm._device.type == "cpu" and scale >= 1:
        return  # nothing changes; asking a GPU would wait for it
    for grad in grads:
        grad._array *= place(scale, grad._device).astype(grad._array.dtype)
        grad._version.count += 1


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients in place so that their norm, taken together as one vector, is at most `max_norm`.

    Returns the norm that they had, 0-d. norm_type: a number, or inf. foreach: accepted, and changes nothing.

    Raises: ArgumentError for a norm that is infinite or nan, if asked to; nothing has changed then.
    Source: Pascanu et al. 2013, arXiv:1211.5063.
    """
    params = _listed(parameters)
    total = get_total_norm(_grads(params), norm_type, error_if_nonfinite)
    clip_grads_with_norm_(params, max_norm, total)
    return total


@no_grad()
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Holds every element of the gradients within [-clip_value, clip_value], in place.

    foreach: accepted, and changes nothing.
    """
    bound = float(clip_value)
    for grad in _grads(parameters):
        grad.clamp_(-bound, bound)
