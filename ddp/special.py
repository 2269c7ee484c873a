"""Special functions, under PyTorch's names. Most are functions of `ddp`, too."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp._tensor.functions import digamma, erf, erfc, erfinv, exp2, expm1, lgamma, log1p, log_softmax, logit, logsumexp
from ddp._tensor.functions import sigmoid, softmax, xlogy

__all__ = ["digamma", "erf", "erfc", "erfinv", "exp2", "expit", "expm1", "gammaln", "log1p", "log_softmax", "logit"]
__all__ += ["logsumexp", "ndtr", "psi", "softmax", "xlogy"]

expit = sigmoid
gammaln = lgamma
psi = digamma


def ndtr(input: Tensor) -> Tensor:
    """The distribution function of the standard normal distribution."""
    return erfc(input * -(0.5**0.5)) / 2
