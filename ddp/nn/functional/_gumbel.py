"""Drawing classes so that gradients pass."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty_like, zeros_like
from ddp._tensor.reductions import required_float


def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """softmax((logits + Gumbel noise) / tau) along `dim`: nearly one-hot samples of the classes of `logits`.

    hard: one-hot values, with the gradient of the soft ones. eps: accepted, and ignored.
    Raises: DtypeError, RangeError. Source: Jang et al. 2017, arXiv:1611.01144; Maddison et al. 2017, arXiv:1611.00712.
    """
    noise = -empty_like(required_float(logits, "gumbel_softmax")).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    sample = zeros_like(logits).scatter_(dim, soft.detach().argmax(dim, keepdim=True), 1.0)
    return sample - soft.detach() + soft
