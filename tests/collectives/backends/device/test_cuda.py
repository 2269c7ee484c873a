"""Which GPU a rank takes where no launcher gave it one."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import BackendError
from collectives.backends.device import cuda
from tests.collectives.backends.device.machine import Machine
from tests.gpu.standin import Cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    """Four GPUs, and no rank has chosen one."""
    fake = Cupy(Machine(0), 4)
    monkeypatch.setattr(cuda, "_has_several_gpus", lambda: True)
    monkeypatch.setattr(cuda, "why_absent", lambda: None)
    monkeypatch.setattr(cuda, "load", lambda index=None: cuda.Cuda(fake, fake.local.device))
    fake.cuda.Device(0).use()
    return fake


@pytest.mark.parametrize(("local_rank", "device"), [(0, 0), (3, 3), (5, 1)])
def test_each_rank_of_a_node_takes_a_gpu(cupy: Cupy, local_rank: int, device: int) -> None:
    cuda.take_local_gpu(local_rank, {})
    assert cupy.local.device == device


@pytest.mark.parametrize("visible", ["2", "", "-1", "GPU-8f2a"])
def test_who_is_shown_one_gpu_keeps_it_and_cupy_is_not_asked(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setattr(cuda, "load", None)
    cuda.take_local_gpu(3, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_cupy_that_does_not_work_is_no_error_of_init(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int | None = None) -> Any:
        raise BackendError("no kernel image")

    monkeypatch.setattr(cuda, "load", broken)
    cuda.take_local_gpu(1, {})
