"""The emulation has no cuBLASLt: products are made by the kernel of ours, so that every case that has one runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ddp._cuda
from ddp._cuda import device_checks, matmul_kernels

ddp._cuda.load()  # the device forms, which a process without CuPy never attaches


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        return None

    monkeypatch.setattr(matmul_kernels, "gemm", SimpleNamespace(gemm=none))
    flag = np.zeros(4, np.int64)  # the emulation has no pinned memory
    monkeypatch.setattr(device_checks, "flag_address", lambda xp: int(flag.ctypes.data))
