"""Ranks that train on fake GPUs: threads of this process, whose models compute on the streams of one `Machine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddp import _device
from ddp.ops.cuda import SOURCES
from tests.collectives.gpu import conftest as below
from tests.collectives.gpu.nccl_fake import FakeLibrary
from tests.ddp.parallel.gpu.cupy_fake import Cupy


class Rig(below.Rig):
    """`size` ranks, each with a GPU that tensors can be on: `tensor.to(f"cuda:{rank}")`."""

    cupy: Cupy

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, nccl: Any, seed: int = 0) -> None:
        super().__init__(monkeypatch, size, nccl, seed)
        self.cupy = Cupy(self.machine, size)
        monkeypatch.setattr(_device, "_known", {key: each for key, each in _device._known.items() if key[0] == "cpu"})
        monkeypatch.setattr(_device, "_cupy", lambda asked: self.cupy)
        for source in SOURCES.values():
            monkeypatch.setattr(source, "_kernels", {})  # which hold on to the module that they were made for


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """`rig(size, nccl, seed)` makes ranks with GPUs; nccl: a `FakeLibrary`, or None where there is none."""
    return lambda size=2, nccl=None, seed=0: Rig(monkeypatch, size, nccl, seed)


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()
