"""Cross entropy over a large vocabulary under autocast: the logits are read as they are, and never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.nn import functional as F


@pytest.mark.parametrize("dtype", [ddp.bfloat16, ddp.float16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum", "ignore_index": 3}])
def test_the_loss_is_that_of_float32_and_the_logits_stay(gpu: Any, dtype: Any, options: dict[str, Any]) -> None:
    numbers, target = np.random.default_rng(0).standard_normal((6, 50)), ddp.arange(6, device="cuda")
    logits = ddp.tensor(numbers, dtype=dtype, device="cuda")
    results = []
    for spared in (True, False):
        x = logits.clone().requires_grad_()
        if spared:
            with ddp.amp.autocast("cuda", dtype):
                gpu.reset()
                loss = F.cross_entropy(x, target, **options)
            assert gpu.launches["astype"] == 0
        else:
            loss = F.cross_entropy(x.float(), target, **options)
        assert loss.dtype == ddp.float32
        loss.backward()
        assert x.grad.dtype == dtype
        results.append((float(loss), x.grad.float().cpu().numpy()))
    (loss, slope), (expected, expected_slope) = results
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_allclose(slope, expected_slope, rtol=1e-2, atol=1e-4)
