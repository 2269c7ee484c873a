"""Special functions, under PyTorch's names. All but expit, gammaln and psi are functions of `ddp`, too."""

from __future__ import annotations

from ddp._tensor.functions import (
    digamma,
    erf,
    erfc,
    erfinv,
    exp2,
    expm1,
    lgamma,
    log1p,
    log_softmax,
    logit,
    logsumexp,
    sigmoid,
    softmax,
    xlogy,
)

__all__ = ["digamma", "erf", "erfc", "erfinv", "exp2", "expit", "expm1", "gammaln", "log1p", "log_softmax", "logit"]
__all__ += ["logsumexp", "psi", "softmax", "xlogy"]

expit = sigmoid
gammaln = lgamma
psi = digamma
