"""gradcheck and gradgradcheck: compare gradients with central differences, which need no backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp._device import CPU, on
from ddp._engine import enable_grad, no_grad
from ddp._tensor.core import Tensor
from ddp.autograd._run import as_list, grad
from ddp.errors import ArgumentError, DtypeError, GradcheckError


def gradcheck(
    func: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    fast_mode: bool = False,
) -> bool:
    """Whether the gradients of `func(*inputs)` agree with central differences, for every differentiable output.

    Outputs are weighted by fixed random numbers and summed, so that one backward checks all of them.

    inputs: those that require grad must be float64 leaves; their elements are moved by `eps` and put back
    raise_exception: if False, returns False instead of raising GradcheckError
    nondet_tol, check_undefined_grad, check_grad_dtypes, fast_mode: accepted, and change nothing: one backward runs, and
    every element is checked

    Raises: GradcheckError naming the input, the element and both values, or if no output requires grad; DtypeError for
    an input that requires grad and is not float64; ArgumentError if no input requires grad, or if an input that
    requires grad is not a leaf or repeats elements in memory.
    """
    tensors = [x for x in as_list(inputs) if isinstance(x, Tensor)]
    try:
        with on(tensors[0].device if tensors else CPU):
            return _agree(func, inputs, eps, atol, rtol)
    except GradcheckError:
        if raise_exception:
            raise
        return False


def gradgradcheck(
    func: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    grad_outputs: Tensor | Sequence[Any] | None = None,
    **options: Any,
) -> bool:
    """Whether the gradients of the gradients of `func(*inputs)` agree with central differences of the gradients.

    inputs, options: as for `gradcheck`. grad_outputs: the gradients of the differentiable outputs, float64; those that
    require grad are checked like inputs. None: random numbers, all of which are checked.

    Raises: as `gradcheck`, whose errors number grad_outputs after the inputs; ArgumentError if the number or a shape of
    grad_outputs is wrong; GraphError if backward cannot run with create_graph.
    """
    arguments = as_list(inputs)
    if grad_outputs is None:
        outputs = _differentiable(func(*arguments))
        random = np.random.default_rng(0)
        grad_outputs = [y.new_tensor(random.uniform(0.5, 1.5, y.shape)).requires_grad_() for y in outputs]
    weights = as_list(grad_outputs)

    def gradients(*tensors: Any) -> tuple[Tensor, ...]:
        given = tensors[: len(arguments)]
        seeds = tensors[len(arguments) :]
        with enable_grad():
            outputs = _differentiable(func(*given))
            results = grad(outputs, _differentiable(given), seeds, create_graph=True, allow_unused=True)
        return tuple([g for g in results if g is not None])

    return gradcheck(gradients, [*arguments, *weights], **options)


def _differentiable(outputs: Any) -> list[Tensor]:
    return [y for y in as_list(outputs) if isinstance(y, Tensor) and y.requires_grad]


def _agree(fn: Callable[..., Any], inputs: Tensor | Sequence[Any], eps: float, atol: float, rtol: float) -> bool:
    arguments = as_list(inputs)
    checked = [(i, x) for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.requires_grad]
    if not checked:
        raise ArgumentError("gradcheck: no input requires grad")
    for i, x in checked:
        if x.dtype != np.float64:
            raise DtypeError(f"gradcheck: input {i} is {x.dtype}; differences need float64")
        if not x.is_leaf or 0 in [s for s, n in zip(x.array.strides, x.shape, strict=True) if n > 1]:
            raise ArgumentError(f"gradcheck: input {i} is not a leaf, or repeats elements in memory")
    outputs = {i: y for i, y in enumerate(as_list(fn(*arguments))) if isinstance(y, Tensor) and y.requires_grad}
    if not outputs:
        raise GradcheckError("gradcheck: no output depends on the inputs that require grad")
    random = np.random.default_rng(0)
    weights = {i: y.device.xp.asarray(random.uniform(0.5, 1.5, y.shape)) for i, y in outputs.items()}
    seeds = [y.detach().clone().copy_(weights[i]) for i, y in outputs.items()]
    leaves = [x for _, x in checked]
    analytic = grad(list(outputs.values()), leaves, seeds, allow_unused=True)

    def value() -> float:
        with no_grad():
            results = as_list(fn(*arguments))
            return sum(float((results[i].array * w).sum()) for i, w in weights.items())

    for (i, x), g in zip(checked, analytic, strict=True):
        for index in np.ndindex(x.shape):
            kept = x.array[index].copy()
            try:
                x.array[index] = kept + eps
                above = value()
                x.array[index] = kept - eps
                below = value()
            finally:
                x.array[index] = kept
            numeric = (above - below) / (2 * eps)
            analytic_value = 0.0 if g is None else float(g.array[index])
            if not abs(analytic_value - numeric) <= atol + rtol * abs(numeric):
                raise GradcheckError(
                    f"gradcheck: input {i} of shape {x.shape}, element {list(index)}: "
                    f"backward gives {analytic_value:.9g}, differences give {numeric:.9g}"
                )
    return True
