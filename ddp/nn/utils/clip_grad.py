"""Gradients held within bounds before an optimizer's step.

They may be views of flat buckets: what is read is each gradient once, and what is written stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy import errstate

from ddp._device import device, on, place
from ddp._engine import no_grad
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp.errors import ArgumentError
from ddp.ops import gradients

Tensors = Tensor | Iterable[Tensor]


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _grads(parameters: Tensors) -> list[Tensor]:
    return [g for g in (p.grad for p in _listed(parameters)) if g is not None]


def _on_each(tensors: list[Tensor]) -> dict[device, list[Tensor]]:
    """The tensors of each device, the first one's first."""
    found: dict[device, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.device, []).append(x)
    return found


def _buffers(parameters: list[Tensor]) -> list[Any]:
    """The existing gradients, as arrays: their memory stays reserved for the next step."""
    full = [p for p in parameters if p.maybe_leaf is not None and p.maybe_leaf.grad_buffer.full]
    for p in full:
        if p.grad_view is not None or p.leaf.grad_buffer.withheld is not None:
            assert p.grad is not None  # or it says why it cannot be seen
    return [p.leaf.grad_buffer.array for p in full]


def _note_change(parameters: list[Tensor]) -> None:
    """Notes in the gradients that callers hold that these have changed."""
    for p in parameters:
        if p.grad_view is not None and p.maybe_leaf is not None and p.maybe_leaf.grad_buffer.full:
            p.grad_view.version.count += 1


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
    if not found:
        return zeros(())
    shares = {where: [x.array for x in share] for where, share in _on_each(found).items()}
    return _total(shares, float(norm_type), error_if_nonfinite)


def _total(shares: dict[device, list[Any]], p: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of all arrays, those of each device being its share: on the first device."""
    where = next(iter(shares))
    norms = [place(_norm_on(each, arrays, p), where) for each, arrays in shares.items()]
    with on(where):
        total = _joined(where.xp, norms, p)
    if error_if_nonfinite and not where.xp.isfinite(total):
        raise ArgumentError(
            f"the total norm of order {p} is {float(total)}, so gradients cannot be clipped by it; "
            "pass error_if_nonfinite=False to scale by it nevertheless"
        )
    return wrap(total, where)


def _norm_on(where: device, arrays: list[Any], p: float) -> Any:
    if where.type == "cuda":
        with on(where):
            return gradients.total_norm(where.xp, arrays, p)
    return _joined(where.xp, [_norm(where.xp, x, p) for x in arrays], p)


def _joined(xp: Any, norms: list[Any], p: float) -> Any:
    return xp.asarray(norms[0] if len(norms) == 1 else _norm(xp, xp.stack(norms), p))


@no_grad()
@errstate(all="ignore")
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scales all gradients by max_norm / total_norm where that is below 1. total_norm: 0-d, of get_total_norm.

    On a GPU it is one launch, which reads the norm there.
    """
    for where, params in _on_each(_listed(parameters)).items():
        _scale(where, params, max_norm, total_norm)


def _scale(where: device, params: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Scales the gradients of parameters that are all on one device."""
    if where.type == "cuda":
        total = place(total_norm.array, where)
        with on(where):
            gradients.scale_to_norm(where.xp, _buffers(params), total, max_norm)
        _note_change(params)
        return
    scale = np.asarray(np.minimum(float(max_norm) / (place(total_norm.array, where) + 1e-6), 1.0))
    if scale >= 1:
        return
    for grad in _grads(params):
        grad.array *= scale.astype(grad.array.dtype)
        grad.version.count += 1


@no_grad()
@errstate(all="ignore")
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients in place so that their norm, taken together as one vector, is at most `max_norm`.

    Returns the norm that they had, 0-d. norm_type: a number, or inf. foreach: accepted, and changes nothing.
    On a GPU it is two launches for all gradients, and nothing waits but `error_if_nonfinite`.

    Raises: ArgumentError for a norm that is infinite or nan, if asked to; nothing has changed then.
    Source: Pascanu et al. 2013, arXiv:1211.5063.
    """
    each = _on_each(_listed(parameters))
    shares = {}
    for where, params in each.items():
        found = [g.array for g in _grads(params)] if where.type == "cpu" else _buffers(params)
        if found:
            shares[where] = found
    if not shares:
        return zeros((), device=next(iter(each), None))
    total = _total(shares, float(norm_type), error_if_nonfinite)
    for where in shares:
        _scale(where, each[where], max_norm, total)
    return total


@no_grad()
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Holds every element of the gradients within [-clip_value, clip_value], in place.

    foreach: accepted, and changes nothing.
    """
    bound = float(clip_value)
    for where, params in _on_each(_listed(parameters)).items():
        if where.type == "cuda":
            with on(where):
                gradients.clamp_values(where.xp, _buffers(params), bound)
            _note_change(params)
            continue
        for grad in _grads(params):
            grad.clamp_(-bound, bound)
