"""The contract of device arrays among ranks that are threads, through host memory and over a fake NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.collectives.backends.device.conftest import MakeRig
from tests.collectives.backends.device.contract import CHECKS
from tests.collectives.backends.device.fake_nccl import FakeLibrary


@pytest.mark.parametrize(
    ("nccl", "size"),
    [(None, 1), (None, 3), (FakeLibrary(), 3)],
    ids=["single", "staged 3", "nccl 3"],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(rig: MakeRig, check: Callable[[Any, Any], None], nccl: Any, size: int) -> None:
    rig(size, nccl, seed=size).run(check)
