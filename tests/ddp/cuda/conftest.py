"""The emulation has no cuBLASLt: products are made by the kernel of ours, so that every case that has one runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp.ops.cuda import products


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        return None

    monkeypatch.setattr(products, "door", SimpleNamespace(gemm=none, fused=none))
