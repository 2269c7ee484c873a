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


@pytest.mark.parametrize("name", ["current_device", "get_device_name", "synchronize"])
def test_what_needs_a_device_says_so(name: str) -> None:
    call: Any = getattr(ddp.cuda, name)
    with pytest.raises(DeviceError, match=r"CuPy is not installed|no CUDA device"):
        call()
