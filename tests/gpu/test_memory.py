"""GPU memory on the stand-in: what is counted, what is limited, and what a full device says."""

from __future__ import annotations

import gc
import itertools
import pickle
from typing import Any

import pytest

import ddp
from ddp._cuda import memory_pool
from ddp.cuda import memory
from ddp.errors import ArgumentError, DeviceError, OutOfMemoryError
from tests.garbage import called_at_collections

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
    other = floats(MIB, "cuda:1")
    assert ddp.cuda.memory_stats()["num_device_alloc"] == 1, "out of the pool"
    assert (ddp.cuda.memory_allocated(0), ddp.cuda.memory_allocated(other.device)) == (MIB, MIB)
    assert "cuda:0, memory by 'pool': 8.00 GiB of 8.00 GiB free" in ddp.cuda.memory_summary()
    del x, other
    ddp.cuda.empty_cache()
    assert (ddp.cuda.memory_reserved(0), ddp.cuda.memory_reserved(1)) == (0, 0), "of every device"
    assert ddp.cuda.memory_stats()["num_device_free"] == 1
    assert ddp.cuda.max_memory_reserved() == MIB
    assert not gpu.synchronizations


@pytest.mark.parametrize("first", ["memory_stats", "reset_peak_memory_stats", "empty_cache"])
def test_queries_create_no_context_on_an_unused_device(gpu: Any, first: str) -> None:
    x = floats(MIB)
    gpu.cupy.contexts.clear()
    if first == "empty_cache":
        ddp.cuda.set_per_process_memory_limit(MIB, 1)
        ddp.cuda.empty_cache()
    else:
        getattr(memory, first)(1)
    assert set(ddp.cuda.memory_stats(1).values()) == {0}
    assert ddp.cuda.memory_summary(1).splitlines()[0] == "cuda:1, memory by 'pool'"
    assert ddp.cuda.memory_allocated(1) == ddp.cuda.memory_reserved(1) == 0
    assert ddp.cuda.max_memory_allocated(1) == ddp.cuda.max_memory_reserved(1) == 0
    assert not any(1 in devices for devices in gpu.cupy.contexts.values())
    assert x.numel()


def test_memory_that_another_thread_gets_during_a_cudafree_is_counted(gpu: Any) -> None:
    class Sizes(dict[int, int]):
        def pop(self, *key: int) -> Any:
            counts.reserved += MIB  # as that thread's cudaMalloc does
            return super().pop(*key)

    x = floats(MIB)
    counts = memory_pool.allocator(gpu.cupy).of(0)
    counts.sizes = Sizes(counts.sizes)
    del x
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved() == MIB


def test_devices_that_another_thread_begins_to_use_meanwhile(gpu: Any) -> None:
    x = floats(MIB)
    allocator = memory_pool.allocator(gpu.cupy)
    numbers = itertools.count()
    for _ in range(3000):  # CPython keeps up to 2,000 pairs, and collects no garbage when one of them is used
        allocator.of(next(numbers))
    with called_at_collections(lambda: allocator.of(next(numbers))):
        assert allocator.used_devices() == [x.device.index]


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


def test_a_limit(gpu: Any) -> None:
    ddp.cuda.set_per_process_memory_limit(2 * MIB)
    x = floats(MIB)
    with pytest.raises(OutOfMemoryError, match=r"limited to 2\.00 MiB") as caught:
        floats(2 * MIB)
    assert caught.value.limit == 2 * MIB
    del x
    assert floats(2 * MIB).numel(), "what the pool kept made room"
    ddp.cuda.set_per_process_memory_fraction(0.25)
    assert (ddp.cuda.get_per_process_memory_fraction(), ddp.cuda.get_per_process_memory_fraction(1)) == (0.25, 1)
    with pytest.raises(OutOfMemoryError):
        floats(ddp.cuda.mem_get_info()[1] // 2)
    ddp.cuda.set_per_process_memory_fraction(1)
    assert floats(4 * MIB).numel()
    for wrong in (0, 1.5, "1G"):
        with pytest.raises(ArgumentError, match="positive number of bytes"):
            ddp.cuda.set_per_process_memory_limit(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"in \[0, 1\]"):
        ddp.cuda.set_per_process_memory_fraction(1.5)


def test_cupys_own_limit_ends_in_our_error(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", str(MIB))
    floats(512)
    memory_pool.allocator(gpu.cupy)._pool.set_limit(size=MIB)  # as CuPy does where the variable is set
    with pytest.raises(OutOfMemoryError, match=r"no memory for another 2\.00 MiB"):
        floats(2 * MIB)


def test_the_error_of_a_full_device(gpu: Any) -> None:
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
    said = "cuda:0 has no memory for another 6.00 MiB: of 8.00 MiB, tensors of this process hold 4.00 MiB"
    assert said in str(error)
    assert p.grad is not None
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.device, again.requested) == (str(error), "cuda:0", 6 * MIB)


def test_cached_blocks_and_garbage_are_freed_before(gpu: Any) -> None:
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


WAYS = [lambda x: x + 1, lambda x: ddp.ones(2 * MIB).to("cuda"), lambda x: (x.requires_grad_() * 2).sum().backward()]


@pytest.mark.parametrize("call", WAYS)
def test_every_way_ends_in_our_error(gpu: Any, call: Any) -> None:
    gpu.cupy.capacity = 8 * MIB
    x = floats(5 * MIB)
    with pytest.raises(OutOfMemoryError, match="has no memory for another"):
        call(x)
    gc.collect()
    assert ddp.cuda.memory_allocated() == 5 * MIB


def test_nothing_is_freed_while_a_graph_is_captured(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [floats(MIB) for _ in range(7)]
    del some
    gpu.cupy.capacity = 8 * MIB
    monkeypatch.setattr("ddp._cuda.capture.stream_is_capturing", lambda xp: True)
    with pytest.raises(OutOfMemoryError):
        floats(8 * MIB)
    stats = ddp.cuda.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_device_free"]) == (0, 0), "cudaFree would end the capture"


def test_the_allocator_is_chosen_before_the_first_tensor(gpu: Any) -> None:
    with pytest.raises(ArgumentError, match="expected 'pool', 'async' or an allocator"):
        memory.use("best")
    memory.use("pool")
    floats(512)
    with pytest.raises(DeviceError, match=r"has tensors on a GPU already, or has had some, by 'pool'"):
        memory.use("async")


@pytest.mark.parametrize("by", ["ddp", "cupy"])
def test_an_allocator_of_the_users(gpu: Any, by: str) -> None:
    pool = gpu.cupy.cuda.MemoryPool()
    pool.set_limit(size=2 * MIB)
    (memory.use if by == "ddp" else gpu.cupy.cuda.set_allocator)(pool.malloc)
    x = floats(MIB)
    assert pool.used_bytes() == MIB
    assert ddp.cuda.memory_stats()["allocated_bytes.all.current"] == 0, "it is not ours to know"
    with pytest.raises(OutOfMemoryError, match=r"no memory for another 2\.00 MiB"):
        floats(2 * MIB)
    with pytest.raises(DeviceError, match="the user's own"):
        ddp.cuda.set_per_process_memory_limit(5)
    assert x.numel()


def test_cudas_own_pool(gpu: Any) -> None:
    memory.use("async")
    x = floats(MIB)
    assert ddp.cuda.memory_allocated() == MIB
    assert "num_device_alloc" not in ddp.cuda.memory_stats(), "CUDA does not say"
    with pytest.raises(OutOfMemoryError, match=r"no memory for another 16\.00 GiB"):
        floats(16 * GIB)
    assert x.numel()
