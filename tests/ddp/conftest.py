"""PyTorch for tests that compare with it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is the oracle here")
