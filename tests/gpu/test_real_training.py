"""On a real GPU: a training step makes CuPy wait for nothing, CUDA allocates nothing, and wrong indices are told of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from tests.gpu.test_bounds import WRONG, table
from tests.gpu.test_training import RUNS, WARM, Training, losses

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

each_run = pytest.mark.parametrize(("model", "optimizer", "scaled", "parallel"), RUNS)


@each_run
def test_nothing_waits_and_cuda_allocates_nothing(model: str, optimizer: str, scaled: bool, parallel: bool) -> None:
    import cupyx

    training = Training(model, optimizer, "cuda", scaled, parallel)
    for _ in range(WARM):
        loss = training.step()
    before = ddp.cuda.memory_stats()
    with cupyx.allow_synchronize(False):
        for _ in range(3):
            loss = training.step()
    after = ddp.cuda.memory_stats()
    assert np.isfinite(loss.item())
    assert [after[name] - before[name] for name in ("num_device_alloc", "num_device_free")] == [0, 0]


@each_run
def test_numbers_are_the_cpus(model: str, optimizer: str, scaled: bool, parallel: bool) -> None:
    there = losses(Training(model, optimizer, "cuda", scaled, parallel))
    here = losses(Training(model, optimizer, "cpu", False))
    np.testing.assert_allclose(there, here, rtol=3e-2 if scaled else 1e-3, atol=1e-2 if scaled else 1e-5)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_index_is_told_when_the_host_waits(name: str) -> None:
    run, error, message = WRONG[name]
    y: Any = run()
    with pytest.raises(error, match=message):
        y.sum().item()
    assert table().sum().item() == 66.0
