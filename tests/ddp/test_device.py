"""Devices are values, CuPy stays away until it computes, and random numbers are per thread."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import ddp
from ddp import _device
from ddp.errors import ArgumentError, DeviceError, DtypeError


def test_forms_and_repr() -> None:
    assert repr(ddp.device("cpu")) == "device(type='cpu')"
    assert repr(ddp.device("cuda:1")) == "device(type='cuda', index=1)"
    assert str(ddp.device("cuda:1")) == "cuda:1"
    assert (ddp.device("cuda:1").type, ddp.device("cuda:1").index) == ("cuda", 1)
    assert ddp.device("cuda").index is None
    assert ddp.device(1) is ddp.device(np.int64(1)) is ddp.device("cuda:1")
    assert type(ddp.device("cuda", np.int64(7)).index) is int
    assert ddp.device("cpu:0") is ddp.device("cpu", 0) is ddp.device("cpu")


def test_equality_is_identity() -> None:
    one = ddp.device("cuda:1")
    assert ddp.device("cuda", 1) is one
    assert ddp.device(one) is one
    assert ddp.device("cuda:0") != one
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(one) is one
    assert {one: "found"}[ddp.device("cuda:1")] == "found"


@pytest.mark.parametrize("text", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", ""])
def test_malformed(text: str) -> None:
    with pytest.raises(ArgumentError, match="device"):
        ddp.device(text)


@pytest.mark.parametrize("index", ["1", 1.0, [1]])
def test_an_index_that_is_no_integer(index: Any) -> None:
    with pytest.raises(DtypeError, match=r"device\('cuda', index=.*\): expected an integer"):
        ddp.device("cuda", index)


def test_state_of_all_streams() -> None:
    ddp.manual_seed(3)
    ddp.rand(2)
    state = _device.random_state()
    first = ddp.rand(4).tolist()
    ddp.manual_seed(4)
    _device.set_random_state(state)
    assert ddp.rand(4).tolist() == first
    assert ddp.initial_seed() == 3


def test_a_stream_of_another_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="on cpu cannot come from a generator on cuda:1"):
        _device.generator(_device.CPU, ddp.Generator("cuda:1"))


def test_an_unseeded_thread_knows_its_seed() -> None:
    seeds: list[int] = []
    thread = threading.Thread(target=lambda: seeds.append(ddp.initial_seed()) or seeds.append(ddp.rand(1).item()))
    thread.start()
    thread.join(timeout=10)
    ddp.manual_seed(seeds[0])
    assert ddp.rand(1).item() == seeds[1]


def test_random_numbers_are_per_thread() -> None:
    drawn: dict[str, list[float]] = {}
    turn = threading.Barrier(2, timeout=10)

    def draw(name: str, seed: int) -> None:
        ddp.manual_seed(seed)
        turn.wait()
        drawn[name] = ddp.rand(5).tolist()

    threads = [threading.Thread(target=draw, args=(f"thread {seed}", seed)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    for seed in (1, 2):
        ddp.manual_seed(seed)
        assert drawn[f"thread {seed}"] == ddp.rand(5).tolist()
    assert drawn["thread 1"] != drawn["thread 2"]
