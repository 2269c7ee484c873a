"""What tests on the stand-in share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import dnn_fake


@pytest.fixture(params=["cudnn", "own"])
def path(request: pytest.FixtureRequest, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuDNN's fake, or None where there is no cuDNN."""
    if request.param == "cudnn":
        return dnn_fake.install(gpu, monkeypatch)
    return dnn_fake.absent(gpu, monkeypatch)
