"""Error feedback: the part of a gradient that a compressor leaves out (the residual) is added to the next gradient.

Without error feedback, a compressor that always drops the same directions never trains them. With error feedback, the
whole gradient arrives, some of it later. A residual and the gradient that it is added to must have the same scale, but
the scale of buckets changes: a bucket holds a SUM of gradients, and its divisor may differ from step to step. So
residuals are parts of means: rank r contributes m_r = scale * buffer to the step's mean, and

    sent      M_r = m_r + e_r                       compressed, and summed over ranks: the step's gradient
    left out  e_r = M_r - (the part that was sent)  kept on rank r

    sum over steps of the gradients + sum over ranks of e_r = sum over steps of the true means

The last line holds for any scales, up to rounding. A parameter that no rank uses in a step gets no gradient, so nothing
of its residual counts as sent. Memory: one array as large as the gradients, in float32 for 16-bit gradients.

Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddp._device import CPU, device_of, to_device
from ddp._tensor import base
from ddp._tensor.creation import from_foreign
from ddp.errors import DtypeError, StateDictError

Array = Any  # numpy.ndarray or cupy.ndarray


def add_residual(residuals: dict[str, Array], name: str, gradient: Array, scale: float) -> Array:
    """Computes M_r, in the gradient's shape and its `working_dtype`, and stores it in `residuals`.

    The result is the stored array itself. The caller subtracts in place the part that was sent, which leaves e_r.

    residuals: the arrays e_r by the parameters' names, which stay the same when the plan changes
    """
    dtype = working_dtype(gradient)
    xp = device_of(gradient).xp
    scaled = xp.empty(gradient.shape, dtype)  # without `out`, the product of a 0-d gradient is a scalar
    xp.multiply(gradient, scale, out=scaled, dtype=dtype)
    if name not in residuals:
        residuals[name] = scaled
        return scaled
    left = residuals[name] = to_device(residuals[name], device_of(gradient)).astype(dtype, copy=False)
    # After a step with infinities or NaN, which the optimizer should skip, the residual may contain some.
    xp.nan_to_num(left, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    left += scaled
    return left


def working_dtype(gradient: Array) -> Any:
    """The dtype in which a gradient is compressed: float32 for a 16-bit gradient, else the gradient's dtype.

    Raises: DtypeError for a complex gradient.
    """
    if gradient.dtype.kind == "c":
        raise DtypeError(f"only real gradients are compressed, these are {gradient.dtype}")
    return gradient.dtype if gradient.dtype.itemsize > 2 else np.dtype(np.float32)


def tensors(state: Mapping[str, Array]) -> dict[str, Any]:
    """Copies the arrays to tensors, which `ddp.save` can save."""
    return {name: base.wrap(array.copy(), device_of(array)) for name, array in state.items()}


def check_keys(hook: str, state: Any, keys: Sequence[str]) -> None:
    """Checks that the state of a hook is a dict with just these keys. Raises: StateDictError if not."""
    if not isinstance(state, Mapping) or set(state) != set(keys):
        given = list(state) if isinstance(state, Mapping) else state
        raise StateDictError(f"{hook}: expected a dict of {', '.join(keys)}, got {given!r:.60}")


def arrays(name: str, state: Any) -> dict[str, Array]:
    """Copies of tensors or arrays, on the host. A hook moves them to its device when it first uses them.

    They are not copied to the device at once, because that memory would belong to another stream than the hook's.

    Raises: StateDictError, with `name`, unless the state is a dict of tensors or arrays.
    """
    if not isinstance(state, Mapping) or not all(hasattr(value, "__dlpack__") for value in state.values()):
        raise StateDictError(f"{name}: expected a dict of tensors, got {state!r:.60}")
    return {name: to_device(from_foreign(value).array, CPU).copy() for name, value in state.items()}


def reshard_hook_state(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """A hook's state for rank `rank` of `size`. states: the `state_dict` of each rank that saved, in rank order

    The "errors" of saved rank r are added to those of rank r % size. Everything else is equal on all ranks, so it is
    taken from the first state.
    """
    errors: dict[str, Any] = {}
    for state in states[rank::size]:
        for name, left in state["errors"].items():
            errors[name] = errors[name] + left if name in errors else left
    return {**states[0], "errors": errors}
