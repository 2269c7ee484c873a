"""Memory, sharing and other libraries on a real GPU: what the stand-in cannot know of CuPy and CUDA."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import ddp
import ddp.multiprocessing as mp
from ddp._cuda import ipc, memory_pool
from ddp.errors import OutOfMemoryError
from tests.ddp.multiprocessing import gpu_children

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

MIB = 1 << 20


def floats(nbytes: int) -> Any:
    return ddp.empty(nbytes // 4, device="cuda")


class TestMemory:
    def test_counts_are_those_of_the_pool(self) -> None:
        ddp.cuda.empty_cache()
        assert memory_pool.allocator(cupy).name == "pool"
        before, held = ddp.cuda.memory_stats(), ddp.cuda.memory_allocated()
        x = floats(64 * MIB)
        after = ddp.cuda.memory_stats()
        assert after["num_device_alloc"] == before["num_device_alloc"] + 1
        assert ddp.cuda.memory_allocated() == held + 64 * MIB
        del x
        assert ddp.cuda.memory_allocated() == held
        reserved = ddp.cuda.memory_reserved()
        ddp.cuda.empty_cache()
        assert ddp.cuda.memory_stats()["num_device_free"] > before["num_device_free"]
        assert ddp.cuda.memory_reserved() <= reserved - 64 * MIB

    def test_a_full_device(self) -> None:
        kept = ddp.ones(1024, 1024, device="cuda", requires_grad=True)
        total = ddp.cuda.mem_get_info()[1]
        with pytest.raises(OutOfMemoryError, match="has no memory for another") as caught:
            floats(2 * total)
        assert caught.value.total == total
        (kept * 2).sum().backward()
        assert kept.grad is not None
        assert kept.grad[0, 0].item() == 2.0

    def test_a_limit(self) -> None:
        try:
            ddp.cuda.set_per_process_memory_limit(ddp.cuda.memory_reserved() + 16 * MIB)
            with pytest.raises(OutOfMemoryError, match="This process is limited to"):
                floats(512 * MIB)
            assert floats(MIB).numel()
        finally:
            ddp.cuda.set_per_process_memory_limit(None)

    @pytest.mark.parametrize("which", ["'async'", "__import__('cupy').cuda.MemoryPool().malloc"])
    def test_other_sources(self, which: str) -> None:
        script = f"""
import ddp
ddp.cuda.memory.use({which})
x = ddp.ones(1000, 1000, device="cuda", requires_grad=True)
for _ in range(3):
    (x * x).sum().backward()
print(x.grad[0, 0].item(), ddp.cuda.memory_allocated(), ddp.cuda.max_memory_reserved())
try:
    ddp.empty(ddp.cuda.mem_get_info()[1], device="cuda")
except ddp.cuda.OutOfMemoryError as error:
    print("full")
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("6.0 ")
        assert done.stdout.endswith("full\n")


class TestOtherLibraries:
    @pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
    def test_pytorch(self, name: str) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        x = ddp.tensor([[0, 1, 2], [3, 4, 5]], device="cuda").to(getattr(ddp, name))
        theirs = torch.from_dlpack(x.T)
        assert theirs.dtype == getattr(torch, name)
        assert theirs.data_ptr() == x.data_ptr()
        assert theirs.tolist() == x.T.tolist()
        back = ddp.from_dlpack(theirs)
        assert (back.dtype, back.data_ptr(), back.stride()) == (x.dtype, x.data_ptr(), (1, 3))
        assert ddp.from_dlpack(torch.zeros(0, 3, dtype=theirs.dtype, device="cuda")).shape == (0, 3)
        if name != "bfloat16":
            assert ddp.as_tensor(theirs).data_ptr() == x.data_ptr()
            assert torch.as_tensor(x, device="cuda").data_ptr() == x.data_ptr()

    def test_pytorchs_stream(self) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        for _ in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                y = torch.ones(2048, 2048, device="cuda")
                for _ in range(20):
                    y = y @ y / 2048
                x = ddp.from_dlpack(y)
            assert x.sum().item() == 2048.0**2

    def test_cupy_and_numba(self) -> None:
        array = cupy.arange(12, dtype="f4").reshape(3, 4)
        x = ddp.as_tensor(array.T)
        assert x.data_ptr() == array.data.ptr
        assert cupy.from_dlpack(x).tolist() == array.T.tolist()
        assert cupy.asarray(x).tolist() == array.T.tolist()
        numba = pytest.importorskip("numba.cuda")
        assert numba.as_cuda_array(x).copy_to_host().tolist() == array.T.tolist()
        theirs = numba.to_device(np.arange(5, dtype="f4"))
        assert ddp.as_tensor(theirs).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


class TestProcesses:
    def test_both_see_each_others_writes_and_memory_is_let_go_of(self) -> None:
        requests, results = mp.SimpleQueue(), mp.SimpleQueue()
        child = mp.Process(target=gpu_children.answer, args=(requests, results, True))
        child.start()
        try:
            x = ddp.arange(12.0, device="cuda").reshape(3, 4)
            requests.put(x.T[1:])
            assert results.get()[3] == [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]
            assert x.tolist() == [[0.0, 2.0, 3.0, 4.0], [4.0, 6.0, 7.0, 8.0], [8.0, 10.0, 11.0, 12.0]]
            for n in range(50):
                requests.put(ddp.full((1000,), float(n), device="cuda"))
                assert results.get()[3] == [float(n)] * 1000
            requests.put(None)
            child.join(30)
            assert child.exitcode == 0
        finally:
            child.kill()
        deadline = time.monotonic() + 10
        while ipc.exported.sweep():
            assert time.monotonic() < deadline
