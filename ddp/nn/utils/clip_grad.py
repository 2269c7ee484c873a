"""Clipping of gradients before an optimizer's step.

Gradients may be views of flat buckets, so they are changed in place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from numpy import errstate

from ddp._device import device, on, to_device
from ddp._engine import no_grad
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp.errors import ArgumentError
from ddp.ops import gradients

Tensors = Tensor | Iterable[Tensor]


def _by_device(tensors: Tensors) -> dict[device, list[Tensor]]:
    """The tensors by device, in order of first use. Warns if an iterator, such as a used one, is empty."""
    by_device: dict[device, list[Tensor]] = {}
    for x in [tensors] if isinstance(tensors, Tensor) else tensors:
        by_device.setdefault(x.device, []).append(x)
    if not by_device and isinstance(tensors, Iterator):
        warnings.warn(
            "`parameters` is an iterator that gives no parameter, so nothing is clipped: call model.parameters() anew "
            "each time, or keep a list",
            stacklevel=5,  # the caller is two decorators further up
        )
    return by_device


def norm_order(norm_type: float) -> float:
    """Returns `norm_type` as a float.

    Raises: ArgumentError for 0, -inf and nan; ValueError or TypeError if it is not a number.
    """
    order = float(norm_type)
    if order in (0, -math.inf) or math.isnan(order):
        raise ArgumentError(
            f"norm_type={norm_type}: there is no such norm to clip by; expected inf, or a number other than 0, as 2"
        )
    return order


def _buffers(parameters: list[Tensor]) -> list[Any]:
    """The arrays of the existing gradients.

    Makes no new `p.grad`. A caller might hold that tensor, so zero_grad would drop the memory of the gradient, and the
    next backward would allocate new memory.
    """
    full = [p for p in parameters if p.accumulate_grad is not None and p.accumulate_grad.grad_buffer.full]
    for p in full:
        if p.grad_view is not None or p.leaf.grad_buffer.read_error is not None:
            assert p.grad is not None  # raises ParallelError if `read_error` is set
    return [p.leaf.grad_buffer.array for p in full]


def _note_change(parameters: list[Tensor]) -> None:
    """Increments the version of each `p.grad` that a caller may hold, because its numbers have changed."""
    for p in parameters:
        if p.grad_view is not None and p.accumulate_grad is not None and p.accumulate_grad.grad_buffer.full:
            p.grad_view.version.count += 1


def _total(by_device: dict[device, list[Any]], p: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of the arrays of all devices together, on the first device."""
    norms = []
    for target, arrays in by_device.items():
        with on(target):
            norms.append(target.xp.asarray(gradients.total_norm(target.xp, arrays, p)))
    first_device = next(iter(by_device))
    total = norms[0]
    if len(norms) > 1:
        with on(first_device):
            total = first_device.xp.asarray(
                gradients.total_norm(first_device.xp, [to_device(norm, first_device) for norm in norms], p)
            )
    if error_if_nonfinite and not first_device.xp.isfinite(total):
        raise ArgumentError(
            f"the total norm of order {p} is {float(total)}, so gradients cannot be clipped by it; "
            "pass error_if_nonfinite=False to scale by it nevertheless"
        )
    return wrap(total, first_device)


@no_grad()
@errstate(all="ignore")
def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of all tensors together, as one vector: a 0-d tensor on the device of the first tensor.

    norm_type: inf, or a number other than 0. error_if_nonfinite: checks the norm, and so waits for a GPU. foreach:
    accepted, and ignored.

    Raises: ArgumentError for a norm_type of 0, -inf or nan, and with error_if_nonfinite for a norm that is infinite or
    nan; ValueError or TypeError if norm_type is not a number.
    """
    order = norm_order(norm_type)
    # A list, because `_by_device` warns of an empty iterator, which is not a mistake here.
    given = tensors if isinstance(tensors, Tensor) else list(tensors)
    by_device = {target: [x.array for x in group] for target, group in _by_device(given).items()}
    return _total(by_device, order, error_if_nonfinite) if by_device else zeros(())


@no_grad()
@errstate(all="ignore")
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scales all gradients by max_norm / (total_norm + 1e-6), if this factor is below 1 or nan.

    total_norm: 0-d, from get_total_norm. foreach: accepted, and ignored. On a GPU it takes one launch for each
    dtype, which reads the norm on the device. Warns if `parameters` is an empty iterator.

    Raises: ParallelError if each rank has only a part of the gradients (ZeroOptimizer).
    """
    for target, params in _by_device(parameters).items():
        _scale(target, params, max_norm, total_norm)


def _scale(target: device, params: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Scales the gradients of parameters that are all on one device."""
    total = to_device(total_norm.array, target)
    with on(target):
        gradients.scale_to_norm(target.xp, _buffers(params), total, max_norm)
    _note_change(params)


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

    Returns the norm before scaling, 0-d. norm_type: inf, or a number other than 0. error_if_nonfinite: checks the norm
    first, and so waits for a GPU. foreach: accepted, and ignored. On a GPU, the 2-norm takes a few launches for all
    gradients.

    Warns if `parameters` is an empty iterator, such as a generator that was used before.

    Raises: ArgumentError for a norm_type of 0, -inf or nan, and with error_if_nonfinite for a norm that is infinite or
    nan; ValueError or TypeError if norm_type is not a number; ParallelError if each rank has only a part of the
    gradients (ZeroOptimizer). If it raises, nothing has changed.
    Source: Pascanu et al. 2013, arXiv:1211.5063.
    """
    order = norm_order(norm_type)
    params = _by_device(parameters)
    by_device = {target: buffers for target, group in params.items() if (buffers := _buffers(group))}
    if not by_device:
        return zeros((), device=next(iter(params), None))
    total = _total(by_device, order, error_if_nonfinite)
    for target in by_device:
        _scale(target, params[target], max_norm, total)
    return total


@no_grad()
@errstate(all="ignore")
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clamps every element of the gradients to [-clip_value, clip_value], in place.

    foreach: accepted, and ignored. Warns if `parameters` is an empty iterator.

    Raises: ParallelError if each rank has only a part of the gradients (ZeroOptimizer).
    """
    for target, params in _by_device(parameters).items():
        with on(target):
            gradients.clamp_values(target.xp, _buffers(params), float(clip_value))
        _note_change(params)
