"""GPU memory against the stand-in: what is counted, what is limited, and what a full device says."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

import ddp
from ddp._cuda import memory_pool
from ddp._cuda import memory_pool as sources
from ddp.cuda import memory
from ddp.errors import ArgumentError, DeviceError, OutOfMemoryError
from ddp.nn import functional as F

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_source_of_others() -> Any:
    sources._source.clear()
    yield
    sources._source.clear()


def floats(nbytes: int, device: str = "cuda") -> Any:
    return ddp.empty(nbytes // 4, device=device)


class TestCounting:
    def test_what_the_driver_is_asked_for_is_counted(self, gpu: Any) -> None:
        x = floats(MIB)
        stats = ddp.cuda.memory_stats()
        assert (stats["num_device_alloc"], stats["num_device_free"]) == (gpu.mallocs, gpu.frees) == (1, 0)
        assert stats["reserved_bytes.all.current"] == stats["allocated_bytes.all.current"] == MIB
        del x
        assert (ddp.cuda.memory_allocated(), ddp.cuda.memory_reserved()) == (0, MIB)
        x = floats(MIB)
        assert ddp.cuda.memory_stats()["num_device_alloc"] == 1, "out of the pool"
        del x
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_reserved() == 0
        assert ddp.cuda.memory_stats()["num_device_free"] == gpu.frees == 1
        assert ddp.cuda.max_memory_reserved() == MIB

    @pytest.mark.parametrize("which", ["mlp", "transformer"])
    def test_a_warm_training_step_asks_the_driver_for_nothing(self, gpu: Any, which: str) -> None:
        ddp.manual_seed(0)
        if which == "mlp":
            model: Any = ddp.nn.Sequential(ddp.nn.Linear(8, 16), ddp.nn.ReLU(), ddp.nn.Linear(16, 3)).to("cuda")
            optimizer: Any = ddp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            x, target = ddp.randn(4, 8, device="cuda"), ddp.zeros(4, dtype=ddp.int64, device="cuda")
        else:
            layer = ddp.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            model = ddp.nn.Sequential(ddp.nn.Embedding(11, 8), layer, ddp.nn.Flatten(0, 1), ddp.nn.Linear(8, 11)).to(
                "cuda"
            )
            optimizer = ddp.optim.AdamW(model.parameters(), lr=1e-3)
            x = ddp.randint(0, 11, (4, 6), device="cuda")
            target = x.reshape(-1)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            ddp.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        for _ in range(3):
            step()
        before = ddp.cuda.memory_stats()
        for _ in range(3):
            step()
        after = ddp.cuda.memory_stats()
        for name in ("num_device_alloc", "num_device_free", "segment.all.current", "reserved_bytes.all.current"):
            assert after[name] == before[name], name

    def test_each_device_has_its_book(self, gpu: Any) -> None:
        one = floats(MIB, "cuda:1")
        assert (ddp.cuda.memory_allocated(0), ddp.cuda.memory_allocated(1)) == (0, MIB)
        assert ddp.cuda.memory_allocated("cuda:1") == ddp.cuda.memory_allocated(one.device) == MIB
        assert ddp.cuda.mem_get_info(1)[0] == ddp.cuda.mem_get_info(0)[0] - MIB
        with pytest.raises(DeviceError, match="device cuda:2: there are 2 CUDA devices"):
            ddp.cuda.memory_allocated(2)
        with pytest.raises(DeviceError, match="expected a CUDA device"):
            ddp.cuda.memory_allocated("cpu")
        del one
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_reserved(1) == 0, "of every device, whichever is current"

    def test_the_peak_is_exact_once_it_is_followed(self, gpu: Any) -> None:
        warm = [floats(MIB) for _ in range(4)]
        del warm
        ddp.cuda.reset_peak_memory_stats()
        assert ddp.cuda.max_memory_allocated() == 0
        assert ddp.cuda.max_memory_reserved() == 4 * MIB
        some = [floats(MIB) for _ in range(3)]
        del some
        one = floats(MIB)
        assert (ddp.cuda.max_memory_allocated(), ddp.cuda.memory_allocated()) == (3 * MIB, MIB)
        ddp.cuda.reset_peak_memory_stats()
        assert ddp.cuda.max_memory_allocated() == MIB
        del one
        assert ddp.cuda.max_memory_allocated() == MIB
        assert gpu.mallocs == 4, "following it goes through the same pool"

    def test_until_then_it_is_what_was_seen_when_the_pool_grew(self, gpu: Any) -> None:
        some = [floats(MIB) for _ in range(3)]
        del some
        assert ddp.cuda.max_memory_allocated() == 3 * MIB

    def test_an_allocation_that_nobody_follows_is_cupys_own_call(self, gpu: Any) -> None:
        floats(MIB)
        source = sources.source(gpu.cupy)
        assert gpu.cupy.cuda.get_allocator() == source.pool.malloc, "no Python of ours on the way"

    def test_nothing_waits(self, gpu: Any) -> None:
        gpu.reset()
        x = floats(MIB)
        ddp.cuda.reset_peak_memory_stats()
        ddp.cuda.memory_stats()
        ddp.cuda.memory_summary()
        del x
        assert not gpu.synchronizations

    def test_a_pool_of_a_graph_is_counted_along_and_never_emptied(self, gpu: Any) -> None:
        floats(512)
        pool = sources.source(gpu.cupy).new_pool()
        with gpu.cupy.cuda.using_allocator(pool.malloc):
            x = floats(MIB)
        assert ddp.cuda.memory_allocated() == MIB
        assert ddp.cuda.memory_reserved() == MIB + 512
        del x
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_reserved() == MIB, "a graph may write there"
        del pool
        gc.collect()
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_reserved() == 0, "the graph is gone"

    def test_dropped_pools_of_graphs_give_their_memory_back(self, gpu: Any) -> None:
        """CuPy's pools do not: their free blocks are lost when the pool is dropped."""
        floats(512)
        source = sources.source(gpu.cupy)
        results = []
        for _ in range(3):
            with gpu.cupy.cuda.using_allocator(source.new_pool().malloc):
                results.append(floats(MIB))
                floats(MIB)
            gc.collect()
        assert ddp.cuda.memory_reserved() == 4 * MIB + 512, "a new pool first frees what those before it left"
        assert ddp.cuda.memory_allocated() == 3 * MIB
        del results
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_reserved() == gpu.cupy.held[0] == 0

    def test_memory_of_dropped_graphs_is_found_before_there_is_none(self, gpu: Any) -> None:
        with gpu.cupy.cuda.using_allocator(sources.source(gpu.cupy).new_pool().malloc):
            floats(6 * MIB)
        gc.collect()
        gpu.cupy.capacity = 8 * MIB
        assert floats(4 * MIB).numel()

    def test_a_pool_that_cupy_drops_leaks(self, gpu: Any) -> None:
        """As CuPy's: `source.new_pool` is there for this."""
        cupy = gpu.cupy
        pool = cupy.cuda.MemoryPool()
        first, held = pool.malloc(MIB), pool.malloc(MIB)
        del first
        del pool
        gc.collect()
        assert cupy.held[0] == 2 * MIB
        del held
        assert cupy.held[0] == MIB

    def test_the_summary(self, gpu: Any) -> None:
        x = ddp.ones(256, 1024, device="cuda", requires_grad=True)
        text = ddp.cuda.memory_summary()
        assert "cuda:0, memory by 'pool': 8.00 GiB of 8.00 GiB free" in text
        assert "held by arrays" in text
        assert x.requires_grad


class TestLimits:
    def test_a_limit_in_bytes(self, gpu: Any) -> None:
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

    def test_what_no_limit_can_be(self, gpu: Any) -> None:
        for wrong in (0, -1, 1.5, "1G"):
            with pytest.raises(ArgumentError, match="positive number of bytes"):
                ddp.cuda.set_per_process_memory_limit(wrong)
        for part in (-0.1, 1.5):
            with pytest.raises(ArgumentError, match=r"in \[0, 1\]"):
                ddp.cuda.set_per_process_memory_fraction(part)

    def test_cupys_own_limit_ends_in_our_error(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", str(MIB))
        floats(512)
        sources.source(gpu.cupy).pool.set_limit(size=MIB)  # as CuPy does where the variable is set
        with pytest.raises(OutOfMemoryError, match=r"no memory for another 2\.00 MiB"):
            floats(2 * MIB)


class TestFull:
    def full(self, gpu: Any, capacity: int = 8 * MIB) -> None:
        gpu.cupy.capacity = capacity

    def test_what_it_says(self, gpu: Any) -> None:
        self.full(gpu)
        p = ddp.ones(512, 1024, device="cuda", requires_grad=True)
        (p * 1).sum().backward()
        free = floats(MIB)
        del free
        gc.collect()
        with pytest.raises(OutOfMemoryError) as caught:
            floats(6 * MIB)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert isinstance(error, RuntimeError)
        assert error is not None
        assert type(error) is ddp.cuda.OutOfMemoryError
        assert (error.device, error.requested, error.total) == ("cuda:0", 6 * MIB, 8 * MIB)
        assert error.reserved == error.allocated, "what the pool kept was given back first"
        assert "cuda:0 has no memory for another 6.00 MiB: of 8.00 MiB, tensors of this process hold 4.00 MiB" in str(
            error
        )
        assert "Out of memory allocating" not in str(error)
        assert p.grad is not None

    def test_what_the_pool_keeps_is_given_back_before(self, gpu: Any) -> None:
        self.full(gpu)
        some = [floats(MIB) for _ in range(7)]
        del some
        assert floats(8 * MIB).numel()
        stats = ddp.cuda.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_device_free"]) == (1, 0, 7)

    def test_garbage_in_cycles_is_collected_before(self, gpu: Any) -> None:
        self.full(gpu)
        gc.disable()
        try:
            cycle: list[Any] = [floats(6 * MIB)]
            cycle.append(cycle)
            del cycle
            assert floats(4 * MIB).numel()
        finally:
            gc.enable()
        assert ddp.cuda.memory_stats()["num_alloc_retries"] == 2

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: ddp.zeros(4 * MIB, device="cuda"),
            lambda x: ddp.tensor([0.0] * MIB, device="cuda").expand(2, MIB).contiguous(),
            lambda x: x + 1,
            lambda x: ddp.cat([x, x]),
            lambda x: x.clone(),
            lambda x: ddp.randn(2 * MIB, device="cuda"),
            lambda x: ddp.ones(2 * MIB).to("cuda"),
            lambda x: ddp.from_dlpack(x, copy=True),
        ],
    )
    def test_cupys_error_never_leaves(self, gpu: Any, call: Any) -> None:
        self.full(gpu)
        ddp.rand(1, device="cuda")  # the generator's state
        before, x = ddp.cuda.memory_allocated(), floats(5 * MIB)
        with pytest.raises(OutOfMemoryError, match="has no memory for another"):
            call(x)
        assert ddp.cuda.memory_allocated() == before + 5 * MIB

    def test_in_backward_and_after_it(self, gpu: Any) -> None:
        x = ddp.ones(MIB // 4, device="cuda", requires_grad=True)
        loss = ((x * 2) * x).sum()
        self.full(gpu, ddp.cuda.memory_reserved() + 512)
        with pytest.raises(OutOfMemoryError):
            loss.backward()
        self.full(gpu, 64 * MIB)
        del loss
        x.grad = None
        ((x * 2) * x).sum().backward()
        assert x.grad is not None
        assert x.grad[0].item() == 4.0

    def test_in_the_optimizer(self, gpu: Any) -> None:
        p = ddp.ones(MIB // 4, device="cuda", requires_grad=True)
        optimizer = ddp.optim.SGD([p], lr=0.1, momentum=0.9)
        p.sum().backward()
        gc.collect()
        ddp.cuda.empty_cache()
        self.full(gpu, ddp.cuda.memory_reserved())
        with pytest.raises(OutOfMemoryError):
            optimizer.step()

    def test_nothing_is_tried_again_while_a_graph_is_captured(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        some = [floats(MIB) for _ in range(7)]
        del some
        self.full(gpu)
        monkeypatch.setattr("ddp._cuda.capture.stream_is_capturing", lambda xp: True)
        with pytest.raises(OutOfMemoryError):
            floats(8 * MIB)
        stats = ddp.cuda.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_device_free"]) == (0, 0), "cudaFree would end the capture"

    def test_it_travels(self) -> None:
        error = memory_pool.OutOfMemoryError("full")
        error.device, error.requested = "cuda:3", 7
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.device, again.requested) == ("full", "cuda:3", 7)


GIB = 1 << 30


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


def test_bytes_as_people_read_them() -> None:
    assert [memory_pool.human(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, 3 << 41)] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "1.50 MiB",
        "5.00 GiB",
        "6144.00 GiB",
    ]


class TestChoosing:
    def test_before_the_first_tensor_only(self, gpu: Any) -> None:
        memory.use("pool")
        floats(512)
        memory.use("pool")
        with pytest.raises(DeviceError, match=r"has tensors on a GPU already, or has had some, by 'pool'"):
            memory.use("async")
        with pytest.raises(ArgumentError, match="expected 'pool', 'async' or an allocator"):
            memory.use("best")

    def test_an_allocator_of_ones_own(self, gpu: Any) -> None:
        pool = gpu.cupy.cuda.MemoryPool()
        pool.set_limit(size=2 * MIB)
        memory.use(pool.malloc)
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

    def test_one_that_cupy_was_given_before_is_kept(self, gpu: Any) -> None:
        pool = gpu.cupy.cuda.MemoryPool()
        gpu.cupy.cuda.set_allocator(pool.malloc)
        x = floats(MIB)
        assert pool.used_bytes() == MIB
        assert sources.source(gpu.cupy).name == "given"
        assert x.numel()

    def test_not_inside_another(self, gpu: Any) -> None:
        floats(512)
        with (
            gpu.cupy.cuda.using_allocator(gpu.cupy.cuda.MemoryPool().malloc),
            pytest.raises(DeviceError, match="cannot"),
        ):
            ddp.cuda.reset_peak_memory_stats()

    def test_a_first_tensor_inside_of_another(self, gpu: Any) -> None:
        pool = gpu.cupy.cuda.MemoryPool()
        with gpu.cupy.cuda.using_allocator(pool.malloc):
            x = floats(MIB)
        assert pool.used_bytes() == MIB
        assert ddp.cuda.memory_allocated() == 0, "from here on CuPy asks ours"
        y = floats(MIB)
        assert (ddp.cuda.memory_allocated(), sources.source(gpu.cupy).name) == (MIB, "pool")
        assert x.numel() == y.numel()

    def test_arrays_from_before_count_as_cupys(self, gpu: Any) -> None:
        old = gpu.cupy.zeros(1000)
        x = floats(MIB)
        assert ddp.cuda.memory_allocated() == MIB
        pool = gpu.cupy.get_default_memory_pool()
        assert pool.used_bytes() == 8192
        del old
        ddp.cuda.empty_cache()
        assert pool.total_bytes() == 0
        assert x.numel()

    def test_cudas_own_pool(self, gpu: Any) -> None:
        memory.use("async")
        x = floats(MIB)
        assert ddp.cuda.memory_allocated() == MIB
        assert "num_device_alloc" not in ddp.cuda.memory_stats(), "CUDA does not say"
        with pytest.raises(DeviceError, match="by 'async'"):
            memory.use("pool")
        with pytest.raises(DeviceError, match="CUDA's, or the user's own"):
            ddp.cuda.set_per_process_memory_limit(MIB)
        with pytest.raises(OutOfMemoryError, match=r"no memory for another 16\.00 GiB"):
            floats(16 * GIB)
        assert x.numel()
