"""Parameters as one vector, and back."""

from __future__ import annotations

from collections.abc import Iterable

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.functions import cat
from ddp.errors import ShapeError


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Joins the elements of all parameters in one vector, (n,). Backward passes gradients on to the parameters."""
    return cat([p.reshape(-1) for p in parameters])


@no_grad()
def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Copies the elements of a vector (n,) into parameters, in their order. Raises: ShapeError unless they fit."""
    params = list(parameters)
    total = sum(p.numel() for p in params)
    if vec.ndim != 1 or vec.numel() != total:
        raise ShapeError(f"vector_to_parameters: a vector of shape {vec.shape} for {total} elements of parameters")
    offset = 0
    for p in params:
        p.copy_(vec[offset : offset + p.numel()].reshape(p.shape))
        offset += p.numel()
