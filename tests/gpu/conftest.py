"""What tests on the stand-in share."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from tests.gpu import cudnn_fake
from tests.gpu.installing import Real

_REAL = [pytest.param(f"real {name}", marks=pytest.mark.gpu) for name in ("cudnn", "formulas")]


@pytest.fixture
def cudnn(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> cudnn_fake.Fake:
    """cuDNN's fake on the stand-in."""
    return cudnn_fake.install(gpu, monkeypatch)


@pytest.fixture(params=["cudnn", "formulas", *_REAL])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By cuDNN or by the array formulas, on the stand-in or on a GPU. Returns: cuDNN's fake; None; "real"."""
    if not request.param.startswith("real"):
        result = request.getfixturevalue("cudnn" if request.param == "cudnn" else "gpu")
        return result if request.param == "cudnn" else None
    Real()
    switches = ddp.backends.cudnn
    if request.param == "real cudnn" and not switches.is_available():
        pytest.skip("cuDNN is not installed")
    monkeypatch.setattr(switches, "enabled", request.param == "real cudnn")
    monkeypatch.setattr(switches, "allow_tf32", False)
    return "real"
