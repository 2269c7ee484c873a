"""Copies: who waits for them, pinned memory, what lives until they are done, and numbers that are fetched later."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

import ddp
from ddp._cuda import copies, stream_order
from tests.gpu import simulated

in_any_order = pytest.mark.parametrize("gpu", simulated(12), indirect=True)


class TestPinned:
    def test_by_method_and_by_argument(self, gpu: Any) -> None:
        x = ddp.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
        assert not x.is_pinned()
        y = x.pin_memory()
        assert y.is_pinned()
        assert y.pin_memory().is_pinned()
        assert y[0].is_pinned()
        assert y.tolist() == x.tolist()
        for made in (
            ddp.empty(2, pin_memory=True),
            ddp.full((2,), 3.0, pin_memory=True),
            ddp.randn(2, pin_memory=True),
            ddp.tensor([1, 2], dtype=ddp.bfloat16, pin_memory=True, requires_grad=True),
        ):
            assert made.is_pinned()
            assert made.is_cpu
        assert made.requires_grad
        assert made.tolist() == [1, 2]


class TestWaits:
    def test_up(self, gpu: Any) -> None:
        pageable = ddp.ones(8)
        pinned = ddp.ones(8).pin_memory()
        gpu.reset()
        pageable.cuda()
        pageable.to("cuda", non_blocking=True)
        pinned.to("cuda", non_blocking=True)
        pinned.cuda(non_blocking=True)
        assert not gpu.synchronizations
        pinned.cuda()  # as in PyTorch: the copy is done when this returns
        assert dict(gpu.synchronizations) == {"Stream.synchronize": 1}

    def test_down(self, gpu: Any) -> None:
        x = ddp.ones(8, device="cuda")
        gpu.reset()
        there = x.to("cpu", non_blocking=True)
        assert there.is_pinned()
        assert not gpu.synchronizations
        x.cpu()
        assert sum(gpu.synchronizations.values()) == 1


def by_others(gpu: Any, x: Any) -> Any:
    """x in page-locked memory that is not CuPy's, as another library or `cudaHostRegister` makes it."""
    array = x.numpy().copy(order="K")
    gpu.cupy.cuda.runtime.hostRegister(array.ctypes.data, array.nbytes)
    return ddp.from_numpy(array)


@pytest.mark.parametrize("gpu", simulated(6), indirect=True)
class TestPinnedByOthers:
    @pytest.mark.parametrize("staged", [1 << 20, 64], ids=["small", "large"])
    @pytest.mark.parametrize("whose", [lambda gpu, x: x.pin_memory(), by_others], ids=["ours", "theirs"])
    @pytest.mark.parametrize("turned", [False, True])
    def test_the_source_may_be_written_to(
        self, gpu: Any, staged: int, whose: Any, turned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(copies, "_MAX_STAGED", staged)
        x = whose(gpu, ddp.arange(96).float().reshape(8, 12))
        expected = (x.t() if turned else x).tolist()
        y = (x.t() if turned else x).cuda()
        z = ddp.empty(*y.shape, device="cuda")
        z.copy_(x.t() if turned else x)
        x.fill_(-1)
        assert y.tolist() == expected
        assert z.tolist() == expected


class TestOrder:
    @in_any_order
    def test_sources_and_targets_outlive_the_copy(self, gpu: Any) -> None:
        """Pinned memory that is let go is written to by the next who asks for it."""
        made = []
        sources = []
        for i in range(4):
            source = ddp.full((64,), float(i), pin_memory=True)
            sources.append(weakref.ref(source.array))
            made.append(source.to("cuda", non_blocking=True))
            del source
        down = [(x * 1).to("cpu", non_blocking=True) for x in made]
        dropped = made[0].to("cpu", non_blocking=True)
        del dropped
        ddp.full((64,), 9.0, pin_memory=True)
        ddp.cuda.synchronize()
        assert [x.tolist() for x in down] == [[float(i)] * 64 for i in range(4)]
        ddp.cuda.synchronize()
        assert not any(source() is not None for source in sources)
        assert not any(stream_order._pending.values())


class TestFetch:
    def test_on_the_cpu(self) -> None:
        x = ddp.tensor(3.0, requires_grad=True)
        handle = ddp.cuda.fetch(x)
        with ddp.no_grad():
            x.mul_(2)
        assert handle.ready()
        assert handle.value() == 3.0
        assert not handle.tensor().requires_grad


class TestInPlace:
    def test_between_pinned_memory_and_a_gpu_nobody_waits(self, gpu: Any) -> None:
        pinned = ddp.arange(8).float().pin_memory()
        there = ddp.empty(8, device="cuda")
        target = ddp.empty(8, pin_memory=True)
        gpu.reset()
        there.copy_(pinned, non_blocking=True)
        target.copy_(there * 2, non_blocking=True)
        assert not gpu.synchronizations
        assert gpu.mallocs <= 1  # of the product
        ddp.cuda.synchronize()
        assert target.tolist() == [2.0 * i for i in range(8)]
        there.copy_(pinned)  # as in PyTorch: done when this returns
        target.copy_(there)
        assert target.tolist() == pinned.tolist()
