"""Ranks with fake GPUs: threads of this process on one `Machine`, over the host's transport or a fake NCCL."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives import BackendError, run_threads
from collectives.backends.device import cuda, nccl_transport, negotiation
from tests.collectives.backends.device.fake_nccl import FakeNccl, Hub
from tests.collectives.backends.device.machine import Machine
from tests.gpu.standin import Cupy

TIMEOUT = 20.0  # s


class Rig:
    """`size` ranks, each with a GPU.

    cupy: the fake module of all ranks; machine: their devices; hub: what NCCL was asked for
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, nccl: Any, seed: int = 0) -> None:
        self.size = size
        self.machine = Machine(seed)
        self.cupy = self.make_cupy(monkeypatch)
        self.hub = Hub(self.machine)
        self.hub.captures = self.cupy.captures
        self.ends = self.hub.ends

        def load_library() -> Any:
            if nccl is None:
                raise BackendError("there is no NCCL here")
            return nccl

        def connect(nccl: Any, unique_id: bytes, rank: int, size: int, *, timeout: float, **_: Any) -> FakeNccl:
            return FakeNccl(self.hub, nccl, unique_id, rank, size, timeout)

        def load(index: int | None = None) -> cuda.Cuda:
            return cuda.Cuda(self.cupy, self.cupy.local.device if index is None else index)

        monkeypatch.setattr(cuda, "why_absent", lambda: None)
        monkeypatch.setattr(cuda, "load", load)
        monkeypatch.setattr(negotiation.library, "load", load_library)
        monkeypatch.setattr(negotiation, "unique_id", self.hub.unique_id)
        monkeypatch.setattr(negotiation.NcclCommunicator, "connect", connect)
        monkeypatch.setattr(nccl_transport, "_issuers", {})
        monkeypatch.setattr(negotiation, "_logged", set())

    def make_cupy(self, monkeypatch: pytest.MonkeyPatch) -> Cupy:
        return Cupy(self.machine, self.size)

    def run(self, fn: Callable[[Any, Any], Any]) -> list[Any]:
        """Calls `fn(comm, cupy)` on every rank, on a stream of its own."""

        def rank(comm: Any) -> Any:
            self.cupy.cuda.Device(comm.rank).use()
            self.cupy.cuda.Stream(non_blocking=True, name=f"user {comm.rank}.").use()
            self.cupy.naming = lambda device: f"comm {device}."
            return fn(comm, self.cupy)

        try:
            results = run_threads(rank, self.size, timeout=TIMEOUT)
        except BaseException:
            self.machine.end()
            raise
        self.machine.settle()
        return results


MakeRig = Callable[..., Rig]


@contextlib.contextmanager
def ending(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`make`, whose rigs' machines end with it: no thread asks for ever for what a test has left undone."""
    made = weakref.WeakSet[Any]()

    def makes(*args: Any, **options: Any) -> Any:
        rig = make(*args, **options)
        made.add(rig.machine)
        return rig

    yield makes
    for machine in made:
        machine.end()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """`rig(size, nccl, seed)` makes ranks with GPUs; nccl: a `FakeLibrary`, or None where there is none."""
    with ending(lambda size=2, nccl=None, seed=0: Rig(monkeypatch, size, nccl, seed)) as make:
        yield make
