"""The stub libnccl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.collectives.backends.nccl.stub.build import build


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The stub's file: `stub()`, or `stub(minor=12)` for an older NCCL."""
    directory = tmp_path_factory.mktemp("stub")
    return lambda minor=32: build(directory, minor)
