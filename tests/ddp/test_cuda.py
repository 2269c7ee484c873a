"""`ddp.cuda` where there is no GPU: questions have answers, and what needs a device says that there is none."""

from __future__ import annotations

from typing import Any

import pytest

import ddp
from ddp.errors import DeviceError

pytestmark = pytest.mark.skipif(ddp.cuda.is_available(), reason="there is a GPU")


def test_the_usual_line_of_every_script() -> None:
    device = ddp.device("cuda" if ddp.cuda.is_available() else "cpu")
    assert device.type == "cpu"
    assert ddp.cuda.device_count() == 0
    assert ddp.cuda.memory_allocated() == 0


def test_seeds_and_caches_are_nobodys() -> None:
    before = ddp.get_rng_state().tolist()
    ddp.cuda.manual_seed(3)
    ddp.cuda.manual_seed_all(3)
    ddp.cuda.seed_all()
    ddp.cuda.empty_cache()
    assert ddp.get_rng_state().tolist() == before


NEEDING = [
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "synchronize",
]


@pytest.mark.parametrize("name", NEEDING)
def test_what_needs_a_device_says_so(name: str) -> None:
    call: Any = getattr(ddp.cuda, name)
    with pytest.raises(DeviceError, match=r"CuPy is not installed|no CUDA device"):
        call()


def test_a_default_device_is_of_a_thread_and_a_scope() -> None:
    with ddp.device("cpu") as where:
        assert where is ddp.device("cpu")
        assert ddp.zeros(1).is_cpu
    with pytest.raises(DeviceError, match="device cuda:1: CuPy"), ddp.device("cuda:1"):
        ddp.zeros(1)
    assert ddp.zeros(1).is_cpu
