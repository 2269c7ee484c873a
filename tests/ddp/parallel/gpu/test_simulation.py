"""Training on GPUs whose streams run in random order gives the numbers of the CPU, for every seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from collectives.backends.device.device_communicator import DeviceArrays, DeviceWork
from collectives.engine.call import Work
from ddp.errors import ParallelError
from ddp.parallel.comm_hooks.hook_exchange import HookStream
from tests.collectives.backends.device.fake_nccl import FakeLibrary
from tests.ddp.cuda import emulation
from tests.ddp.parallel.gpu.conftest import Rig, seeds
from tests.ddp.parallel.gpu.training import (
    WAYS,
    Between,
    assert_numbers_of_the_cpu,
    train,
    train_layers,
    train_penalized,
)


def simulate(rig: Callable[..., Rig], nccl: Any, seed: int, program: Any = train, **options: Any) -> None:
    def run(comm: Any, device: str, between: Between) -> dict[str, Any]:
        return program(comm, device, seed, between, **options)

    assert_numbers_of_the_cpu(rig, nccl, 2 + seed % 2, seed, run)


pytestmark = pytest.mark.timeout(1500)  # the full counts take minutes


def twice_around(bucket: Any) -> Any:
    """A hook of two calls, with kernels and memory of its own before, between and behind its collectives."""
    share = bucket.buffer * bucket.scale
    total = yield bucket.comm.all_reduce(share, async_op=True)
    del share
    quarter = total * 0.25
    del total
    rows = yield bucket.comm.all_gather(quarter[None], lengths="equal", async_op=True)
    del quarter
    bucket.buffer[...] = rows[0] * 4.0


OPTIONS = {**WAYS, "hook": {"hook": lambda: twice_around}}


#: Library hooks launch as `twice_around` does, and test_zero.py has more of ZeRO: with --long.
SPARED = ("bf16", "low rank", "top k", "zero")


@pytest.mark.parametrize(
    ("way", "nccl"),
    [
        pytest.param(way, nccl, id=f"{way}-{name}", marks=[pytest.mark.long] if way in SPARED else [])
        for way in ("", "hook", *SPARED)
        for name, nccl in (("staged", None), ("nccl", FakeLibrary()))
    ],
)
@seeds(10)
def test_every_order_that_cuda_allows_gives_the_numbers_of_the_cpu(
    rig: Callable[..., Rig], nccl: Any, way: str, seed: int
) -> None:
    simulate(rig, nccl, seed, **OPTIONS[way])


@pytest.mark.skipif(emulation.COMPILER is None, reason="the kernels need g++ to run on the CPU")
@pytest.mark.parametrize(
    ("program", "nccl"),
    [
        pytest.param(train_layers, None, id="layers-staged", marks=pytest.mark.long),
        pytest.param(train_layers, FakeLibrary(), id="layers-nccl"),
        pytest.param(train_penalized, FakeLibrary(), id="penalties-nccl"),
    ],
)
@seeds(5)
def test_layers_with_kernels_and_statistics_over_ranks(
    rig: Callable[..., Rig], program: Any, nccl: Any, seed: int
) -> None:
    simulate(rig, nccl, seed, program)


def skip_wait_in(caller: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What this function waits for is there on the host, but the stream does not wait."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = DeviceWork.wait

        def wait(self: Any, timeout: float | None = None) -> Any:
            run = Work.wait if sys._getframe(1).f_code.co_name == caller else whole
            return run(self, timeout)

        monkeypatch.setattr(DeviceWork, "wait", wait)

    return plant


def forget_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceArrays, "begin", lambda self, stream: setattr(self, "_stream", stream))


def forget(edge: str) -> Callable[[pytest.MonkeyPatch], None]:
    assert hasattr(HookStream, edge)
    return lambda monkeypatch: monkeypatch.setattr(HookStream, edge, lambda self, *mark: None)


# A simulation that cannot find a planted bug would prove nothing: an edge between streams that is missing, and where.
PLANTED = [
    pytest.param(forget_ready, "", id="a bucket is reduced before its kernels"),
    pytest.param(skip_wait_in("finish"), "", id="gradients are used before they are reduced"),
    *[
        pytest.param(plant, way, id=bug, marks=pytest.mark.long)
        for plant, way, bug in (
            (forget_ready, "zero", "a bucket is scattered before its kernels"),
            (skip_wait_in("finish"), "zero", "parts of gradients are used before they are there"),
            (skip_wait_in("step"), "zero", "parameters are used before they are gathered"),
            (forget("after"), "hook", "a hook reads the bucket before its kernels"),
            (forget("join"), "hook", "gradients are used before the hook has ended"),
        )
    ],
]


@pytest.mark.parametrize(("plant", "way"), PLANTED)
def test_a_planted_bug_is_found(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], way: str
) -> None:
    plant(monkeypatch)
    for seed in range(100):
        try:
            simulate(rig, FakeLibrary(), seed, **OPTIONS[way])
        except (AssertionError, ParallelError):  # wrong numbers, or the check of consistency
            return
    pytest.fail("100 runs never met it")
