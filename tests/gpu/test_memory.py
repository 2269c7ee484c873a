"""GPU memory on the stand-in: what is counted, what is limited, and what a full device says."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

import ddp
from ddp._cuda import memory_pool
from ddp.cuda import memory
from ddp.errors import ArgumentError, DeviceError, OutOfMemoryError

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _no_allocator_of_other_tests() -> Any:
    memory_pool._installed.clear()
    yield
    memory_pool._installed.clear()


def floats(nbytes: int, device: str = "cuda") -> Any:
    return ddp.empty(nbytes // 4, device=device)


def test_calls_of_cuda_and_bytes_are_counted(gpu: Any) -> None:
    x = floats(MIB)
    stats = ddp.cuda.memory_stats()
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (gpu.mallocs, gpu.frees) == (1, 0)
    assert stats["reserved_bytes.all.current"] == stats["allocated_bytes.all.current"] == MIB
    del x
    assert (ddp.cuda.memory_allocated(), ddp.cuda.memory_reserved()) == (0, MIB)
    x = floats(MIB)
    assert ddp.cuda.memory_stats()["num_device_alloc"] == 1, "out of the pool"
    text = ddp.cuda.memory_summary()
    assert "cuda:0, memory by 'pool': 8.00 GiB of 8.00 GiB free" in text
    assert "allocated_bytes.all.current" in text
    del x
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved() == 0
    assert ddp.cuda.memory_stats()["num_device_free"] == gpu.frees == 1
    assert ddp.cuda.max_memory_reserved() == MIB
    assert not gpu.synchronizations


def test_each_device_has_its_counts(gpu: Any) -> None:
    one = floats(MIB, "cuda:1")
    assert (ddp.cuda.memory_allocated(0), ddp.cuda.memory_allocated(one.device)) == (0, MIB)
    assert ddp.cuda.mem_get_info(1)[0] == ddp.cuda.mem_get_info(0)[0] - MIB
    with pytest.raises(DeviceError, match="device cuda:2: there are 2 CUDA devices"):
        ddp.cuda.memory_allocated(2)
    with pytest.raises(DeviceError, match="expected a CUDA device"):
        ddp.cuda.memory_allocated("cpu")
    del one
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved(1) == 0, "of every device, whichever is current"


def test_the_peak_is_exact_from_the_first_reset_on(gpu: Any) -> None:
    warm = [floats(MIB) for _ in range(4)]
    del warm
    assert ddp.cuda.max_memory_allocated() == 4 * MIB, "seen when the pool grew"
    ddp.cuda.reset_peak_memory_stats()
    assert (ddp.cuda.max_memory_allocated(), ddp.cuda.max_memory_reserved()) == (0, 4 * MIB)
    some = [floats(MIB) for _ in range(3)]
    del some
    one = floats(MIB)
    assert (ddp.cuda.max_memory_allocated(), ddp.cuda.memory_allocated()) == (3 * MIB, MIB)
    ddp.cuda.reset_peak_memory_stats()
    del one
    assert ddp.cuda.max_memory_allocated() == MIB
    assert gpu.mallocs == 4


def test_private_pools_are_counted_and_freed_when_they_are_dropped(gpu: Any) -> None:
    floats(512)
    pool = memory_pool.allocator(gpu.cupy).private_pool()
    with gpu.cupy.cuda.using_allocator(pool.malloc):
        x = floats(MIB)
        kept = floats(MIB)
    assert (ddp.cuda.memory_allocated(), ddp.cuda.memory_reserved()) == (2 * MIB, 2 * MIB + 512)
    del x
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved() == 2 * MIB, "a graph may write there"
    del pool
    gc.collect()
    assert ddp.cuda.memory_reserved() == MIB, "the graph is gone"
    assert ddp.cuda.memory_allocated() == MIB, "and CuPy's pool stays as long as an array of it"
    del kept
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved() == gpu.cupy.held[0] == 0


class TestLimits:
    def test_in_bytes(self, gpu: Any) -> None:
        ddp.cuda.set_per_process_memory_limit(2 * MIB)
        x = floats(MIB)
        with pytest.raises(OutOfMemoryError, match=r"limited to 2\.00 MiB") as caught:
            floats(2 * MIB)
        assert caught.value.limit == 2 * MIB
        assert "What helps: a higher limit." in str(caught.value)
        y = floats(MIB)
        del x, y
        z = floats(2 * MIB)
        assert z.numel(), "what the pool kept made room"
        assert ddp.cuda.memory_stats()["num_alloc_retries"] > 0
        ddp.cuda.set_per_process_memory_limit(None)
        assert floats(4 * MIB).numel()

    def test_a_fraction(self, gpu: Any) -> None:
        total = ddp.cuda.mem_get_info()[1]
        ddp.cuda.set_per_process_memory_fraction(0.25)
        assert ddp.cuda.get_per_process_memory_fraction() == 0.25
        assert ddp.cuda.get_per_process_memory_fraction(1) == 1.0
        with pytest.raises(OutOfMemoryError):
            floats(total // 2)
        ddp.cuda.set_per_process_memory_fraction(1)
        assert ddp.cuda.get_per_process_memory_fraction() == 1.0

    def test_refused(self, gpu: Any) -> None:
        for wrong in (0, -1, 1.5, "1G"):
            with pytest.raises(ArgumentError, match="positive number of bytes"):
                ddp.cuda.set_per_process_memory_limit(wrong)  # type: ignore[arg-type]
        for part in (-0.1, 1.5):
            with pytest.raises(ArgumentError, match=r"in \[0, 1\]"):
                ddp.cuda.set_per_process_memory_fraction(part)

    def test_cupys_own_limit_ends_in_our_error(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", str(MIB))
        floats(512)
        memory_pool.allocator(gpu.cupy)._pool.set_limit(size=MIB)  # as CuPy does where the variable is set
        with pytest.raises(OutOfMemoryError, match=r"no memory for another 2\.00 MiB"):
            floats(2 * MIB)


class TestFull:
    def test_the_error(self, gpu: Any) -> None:
        gpu.cupy.capacity = 8 * MIB
        p = ddp.ones(512, 1024, device="cuda", requires_grad=True)
        (p * 1).sum().backward()
        gc.collect()
        with pytest.raises(OutOfMemoryError) as caught:
            floats(6 * MIB)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert type(error) is ddp.cuda.OutOfMemoryError
        assert (error.device, error.requested, error.total) == ("cuda:0", 6 * MIB, 8 * MIB)
        assert error.reserved == error.allocated, "what the pool kept was given back first"
        assert "cuda:0 has no memory for another 6.00 MiB: of 8.00 MiB, tensors of this process hold 4.00 MiB" in str(
            error
        )
        assert p.grad is not None
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.device, again.requested) == (str(error), "cuda:0", 6 * MIB)

    def test_cached_blocks_and_garbage_are_freed_before(self, gpu: Any) -> None:
        gpu.cupy.capacity = 8 * MIB
        some = [floats(MIB) for _ in range(7)]
        del some
        one = floats(8 * MIB)
        stats = ddp.cuda.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_device_free"]) == (1, 0, 7)
        gc.disable()
        try:
            cycle: list[Any] = [one]
            cycle.append(cycle)
            del cycle, one
            assert floats(4 * MIB).numel()
        finally:
            gc.enable()
        assert ddp.cuda.memory_stats()["num_alloc_retries"] == 3

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: ddp.zeros(4 * MIB, device="cuda"),
            lambda x: x + 1,
            lambda x: ddp.cat([x, x]),
            lambda x: ddp.randn(2 * MIB, device="cuda"),
            lambda x: ddp.ones(2 * MIB).to("cuda"),
            lambda x: (x.requires_grad_() * 2).sum().backward(),
        ],
    )
    def test_every_way_ends_in_our_error(self, gpu: Any, call: Any) -> None:
        gpu.cupy.capacity = 8 * MIB
        ddp.rand(1, device="cuda")  # the generator's state
        before, x = ddp.cuda.memory_allocated(), floats(5 * MIB)
        with pytest.raises(OutOfMemoryError, match="has no memory for another"):
            call(x)
        gc.collect()
        assert ddp.cuda.memory_allocated() == before + 5 * MIB

    def test_nothing_is_freed_while_a_graph_is_captured(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        some = [floats(MIB) for _ in range(7)]
        del some
        gpu.cupy.capacity = 8 * MIB
        monkeypatch.setattr("ddp._cuda.capture.stream_is_capturing", lambda xp: True)
        with pytest.raises(OutOfMemoryError):
            floats(8 * MIB)
        stats = ddp.cuda.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_device_free"]) == (0, 0), "cudaFree would end the capture"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"requested": 5, "allocated": 60, "reserved": 60, "free": 15}, "a higher limit"),
        ({"requested": 5, "allocated": 10, "reserved": 78, "free": 2}, "in pieces"),
        ({"requested": 5, "allocated": 10, "reserved": 10, "free": 2}, "the other processes"),
        ({"requested": 9, "allocated": 78, "reserved": 78, "free": 2}, "a smaller batch"),
    ],
)
def test_what_helps(figures: dict[str, int], words: str) -> None:
    limit = 60 * GIB if words == "a higher limit" else None
    sizes = {name: size * GIB for name, size in figures.items()}
    text = str(memory_pool.out_of_memory(2, total=80 * GIB, limit=limit, **sizes))
    assert words in text.partition("What helps: ")[2]
    assert text.startswith(f"cuda:2 has no memory for another {figures['requested']}.00 GiB: of 80.00 GiB")


class TestChoosing:
    def test_before_the_first_tensor_only(self, gpu: Any) -> None:
        memory.use("pool")
        floats(512)
        memory.use("pool")
        with pytest.raises(DeviceError, match=r"has tensors on a GPU already, or has had some, by 'pool'"):
            memory.use("async")
        with pytest.raises(ArgumentError, match="expected 'pool', 'async' or an allocator"):
            memory.use("best")

    @pytest.mark.parametrize("by", ["ddp", "cupy"])
    def test_an_allocator_of_the_users(self, gpu: Any, by: str) -> None:
        pool = gpu.cupy.cuda.MemoryPool()
        pool.set_limit(size=2 * MIB)
        (memory.use if by == "ddp" else gpu.cupy.cuda.set_allocator)(pool.malloc)
        x = floats(MIB)
        assert pool.used_bytes() == MIB
        assert ddp.cuda.memory_stats()["allocated_bytes.all.current"] == 0, "it is not ours to know"
        with pytest.raises(OutOfMemoryError, match=r"no memory for another 2\.00 MiB"):
            floats(2 * MIB)
        with pytest.raises(DeviceError, match="by 'given'"):
            memory.use("pool")
        with pytest.raises(DeviceError, match="the user's own"):
            ddp.cuda.set_per_process_memory_limit(5)
        assert x.numel()

    def test_inside_of_another(self, gpu: Any) -> None:
        pool = gpu.cupy.cuda.MemoryPool()
        with gpu.cupy.cuda.using_allocator(pool.malloc):
            x = floats(MIB)
            with pytest.raises(DeviceError, match="cannot be changed here"):
                memory.use("async")
        assert pool.used_bytes() == MIB
        assert ddp.cuda.memory_allocated() == 0, "from here on CuPy asks ours"
        y = floats(MIB)
        assert (ddp.cuda.memory_allocated(), memory_pool.allocator(gpu.cupy).name) == (MIB, "pool")
        assert x.numel() == y.numel()

    def test_cudas_own_pool(self, gpu: Any) -> None:
        memory.use("async")
        x = floats(MIB)
        assert ddp.cuda.memory_allocated() == MIB
        assert "num_device_alloc" not in ddp.cuda.memory_stats(), "CUDA does not say"
        with pytest.raises(DeviceError, match="by 'async'"):
            memory.use("pool")
        with pytest.raises(OutOfMemoryError, match=r"no memory for another 16\.00 GiB"):
            floats(16 * GIB)
        assert x.numel()
