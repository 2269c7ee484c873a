"""`Variable`, which tensors were wrapped in before they had gradients of their own."""

from __future__ import annotations

from ddp._tensor.core import Tensor


def Variable(data: Tensor, requires_grad: bool = False) -> Tensor:
    """`data` outside the graph, sharing its memory: data.detach().requires_grad_(requires_grad)."""
    return data.detach().requires_grad_(requires_grad)
