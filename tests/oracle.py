"""PyTorch, with whose results many tests compare. A test, or a file of tests, that imports it is skipped without it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
