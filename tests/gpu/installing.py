"""Puts a stand-in in the place of `cupy`, and takes it out again with all that remembers it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddp import _device
from ddp._cuda import device_checks, memory_pool, stream_order
from ddp._cuda.raw_kernel import KERNEL_SOURCES as SOURCES
from ddp._engine import stream_sync
from tests.collectives.backends.device.machine import Machine
from tests.gpu import capturing, cublaslt_fake, cudnn_fake
from tests.gpu.standin import Cupy


class Real:
    """A GPU of this machine, for tests that ask for nothing but its CuPy."""

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        if not self.cupy.cuda.is_available():
            pytest.skip("no CUDA device")

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """In the body the host may not wait for the device, as far as CuPy sees it."""
        import cupyx

        with cupyx.allow_synchronize(False):
            yield


class Gpu:
    """What a test sees of the stand-in."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int | None = None, devices: int = 2, machine: Machine | None = None
    ) -> None:
        self.machine = Machine(seed or 0, eager=seed is None) if machine is None else machine
        self.cupy = Cupy(self.machine, devices)
        self.put = self.cupy.put
        cuda = self.cupy.cuda
        modules = {"cupy": self.cupy, "cupy.cuda": cuda}
        for name in ("runtime", "memory"):
            modules[f"cupy.cuda.{name}"] = getattr(cuda, name)
        for name in ("fft", "linalg", "random", "lib"):
            modules[f"cupy.{name}"] = getattr(self.cupy, name)
        for name in [each for each in sys.modules if each.split(".")[0] in ("cupy", "cupyx", "cupy_backends")]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        forget()
        MADE.append(self)
        for install in LIBRARIES:
            install(self, monkeypatch)

    def __getattr__(self, name: str) -> Any:  # synchronizations, waits, launches, copies_up, mallocs, frees
        return getattr(self.cupy.record, name)

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """In the body the host may not wait for the device."""
        self.reset()
        yield
        assert self.waits == []

    def reset(self) -> None:
        """Forgets all that was counted."""
        self.cupy.record.reset()
        self.machine.log.clear()

    def launch(self, stream: int, kind: str, work: Callable[[], None]) -> None:
        """Puts work of a library's stand-in on a stream, and counts it."""
        self.launches[kind] += 1
        self.put(stream, kind, work)


def forget() -> None:
    """Lets go of the module that devices, generators and kernels were made with."""
    for made in MADE:
        for arena in made.cupy.arenas:
            arena.clear()
        made.machine.memory.clear()
    MADE.clear()
    for each in _device._known.values():
        for name in {"xp", "watched"}.intersection(_set_slots(each) if each.type == "cuda" else ()):
            delattr(each, name)
    stream_sync.switch.on = stream_sync.switch.blocking = stream_sync.switch.several_gpus = False
    for where in [stream for stream in _device._random.streams if stream.type == "cuda"]:
        del _device._random.streams[where]
    for source in SOURCES.values():
        source._kernels.clear()
    for held in (device_checks._error_flags, stream_order._pending, stream_order._users, memory_pool._installed):
        held.clear()
    for each in FORGETTING:
        each()


#: Not empty since a stand-in was made, until `forget` is called after that test, whoever made it.
MADE: list[Gpu] = []

#: More to call when the module goes: what else keeps something of it.
FORGETTING: list[Callable[[], None]] = [cublaslt_fake.forget]

#: What puts the stand-in of a library in its place.
LIBRARIES: list[Callable[[Gpu, pytest.MonkeyPatch], None]] = [
    cublaslt_fake.install,
    capturing.install,
    cudnn_fake.absent,
]


def _set_slots(x: Any) -> list[str]:
    return [name for name in type(x).__slots__ if _is_set(x, name)]


def _is_set(x: Any, name: str) -> bool:
    try:
        type(x).__dict__[name].__get__(x)
    except AttributeError:
        return False
    return True
