"""`gumbel_softmax`: random, so its values are counted, and its gradient is that of a softmax."""

from __future__ import annotations

import numpy as np
import pytest

import ddp
from ddp.errors import DtypeError
from ddp.nn import functional as F


def test_hard_samples_follow_the_probabilities() -> None:
    ddp.manual_seed(0)
    share = [0.5, 0.3, 0.2]
    samples = F.gumbel_softmax(ddp.tensor(share).log().expand(20000, 3), tau=0.5, hard=True)
    np.testing.assert_allclose(samples.numpy().max(1), 1, 1e-6)
    np.testing.assert_allclose(samples.numpy().mean(0), share, atol=0.02)


@pytest.mark.parametrize("hard", [False, True])
def test_gradients_are_the_soft_ones(hard: bool) -> None:
    logits = ddp.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    ddp.manual_seed(3)
    y = F.gumbel_softmax(logits, 2.0, hard, dim=1)
    (y * ddp.tensor([1.0, 2.0, 3.0])).sum().backward()
    ddp.manual_seed(3)
    soft = F.gumbel_softmax(logits.detach(), 2.0, dim=1).numpy()[0]
    weights = np.array([1.0, 2.0, 3.0])
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy()[0], soft * (weights - (soft * weights).sum()) / 2, 1e-5)


def test_integers_are_refused() -> None:
    with pytest.raises(DtypeError, match="gumbel_softmax: expected a floating tensor, got int64"):
        F.gumbel_softmax(ddp.zeros(2, 3, dtype=ddp.int64))
