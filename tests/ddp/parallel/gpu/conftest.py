"""Ranks that train on fake GPUs: threads of this process, whose models compute on the streams of one `Machine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.collectives.backends.device import conftest as below
from tests.ddp.cuda import emulation
from tests.gpu.installing import Gpu, forget
from tests.gpu.standin import Cupy


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Ranks have a time limit, and compilers none: the kernels that training launches are made before."""
    emulation.prepare_kernels("float64", "int64", "bool")


def seeds(count: int) -> pytest.MarkDecorator:
    """The first of so many seeds; the others with --long."""
    others = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, count)]
    return pytest.mark.parametrize("seed", [0, *others])


class Rig(below.Rig):
    """`size` ranks, each with a GPU that tensors can be on: `tensor.to(f"cuda:{rank}")`."""

    def make_cupy(self, monkeypatch: pytest.MonkeyPatch) -> Cupy:
        return Gpu(monkeypatch, devices=self.size, machine=self.machine).cupy


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """`rig(size, nccl, seed)` makes ranks with GPUs; nccl: a `FakeLibrary`, or None where there is none."""
    with below.ending(lambda size=2, nccl=None, seed=0: Rig(monkeypatch, size, nccl, seed)) as make:
        yield make
    forget()
