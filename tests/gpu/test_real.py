"""On a real GPU: what the stand-in cannot know of CuPy, CUDA and NVIDIA's libraries. Tests `on_both` run there, too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ddp
import ddp.multiprocessing as mp
from ddp import nn
from ddp._cuda import cublaslt, gemm, ipc, matmul_kernels, stream_order
from ddp.errors import OutOfMemoryError
from ddp.nn import functional as F
from ddp.ops.arrays import BFLOAT16
from tests.conftest import wait_until
from tests.ddp.multiprocessing import gpu_children
from tests.gpu.test_gemm import DTYPES, close, numbers
from tests.gpu.test_streams import gradients

pytestmark = pytest.mark.gpu

xp = pytest.importorskip("cupy", reason="CuPy is not installed")
if not xp.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

MIB = 1 << 20
ROUNDING: dict[Any, float] = {np.float16: 2e-3, BFLOAT16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}
each_dtype = pytest.mark.parametrize("dtype", ROUNDING)


def busy(milliseconds: float = 50) -> None:
    """Keeps the current stream at work."""
    spin = xp.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    spin((1,), (1,), (np.int64(milliseconds * 1.5e6),))


# Kernels at the sizes of a GPU, against the CPU in float64 ------------------------------------------------------------


def compared(run: Any, *shapes: tuple[int, ...], dtype: Any, factor: float = 1.0) -> None:
    """`run` and its gradients on the GPU in `dtype`, and on the CPU in float64 of the same numbers, from seeds."""
    random = np.random.default_rng(0)
    rounded = [(random.standard_normal(shape) + 1).astype(dtype) for shape in shapes]
    actual = []
    for device, kind in (("cpu", np.float64), ("cuda", dtype)):
        xs = [ddp.from_numpy(each.astype(kind)).to(device).requires_grad_() for each in rounded]
        y = run(*xs)
        g = np.random.default_rng(3).standard_normal(y.shape).astype(dtype)
        y.backward(ddp.from_numpy(g.astype(kind)).to(device))
        tensors = y, *[x.grad for x in xs if x.grad is not None]
        actual.append([each.detach().cpu().double().numpy() for each in tensors])
    rounding = factor * ROUNDING[dtype]
    for expected, got in zip(*actual, strict=True):
        assert_allclose(got, expected, rounding, rounding * max(1.0, float(np.abs(expected).max())))


@each_dtype
@pytest.mark.parametrize("n", [1, 64, 768, 1000, 5001, 20000])
@pytest.mark.parametrize("rows", [1, 33, 3000])
def test_norms_of_rows(rows: int, n: int, dtype: Any) -> None:
    compared(lambda x, w, b: F.layer_norm(x, (n,), w, b, 1e-3), (rows, n), (n,), (n,), dtype=dtype)
    compared(lambda x, w: F.rms_norm(x, (n,), w, 1e-3), (rows, n), (n,), dtype=dtype)


@each_dtype
@pytest.mark.parametrize(("table", "width", "n"), [(50257, 768, 4096), (65, 384, 20000), (7, 1, 3000)])
def test_embeddings_and_losses(table: int, width: int, n: int, dtype: Any) -> None:
    index = (np.random.default_rng(2).random(n) ** 3 * table).astype(np.int64)  # some rows are looked up often
    compared(lambda w: F.embedding(ddp.from_numpy(index).to(w.device), w, padding_idx=3), (table, width), dtype=dtype)
    compared(lambda x: F.cross_entropy(x, ddp.from_numpy(index[:64]).to(x.device)), (64, table), dtype=dtype, factor=5)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "a row": lambda x, y: x * y[0],
    "transposed": lambda x, y: x.T * y.T.contiguous(),
    "unaligned": lambda x, y: x.flatten()[1:] * y.flatten()[:-1],
    "gelu": lambda x, y: F.gelu(x),
    "where": lambda x, y: ddp.where(x > 0, x, y),
    "columns": lambda x, y: x.mean(0),
    "norm": lambda x, y: x.norm(),
}


@each_dtype
@pytest.mark.parametrize("name", CASES)
def test_cupys_functions(name: str, dtype: Any) -> None:
    compared(CASES[name], (257, 1024), (257, 1024), dtype=dtype, factor=10)


# Products -------------------------------------------------------------------------------------------------------------

SHAPES: list[Any] = [
    ((64, 128), (128, 96)),
    ((257, 129), (129, 65)),
    ((4, 33, 17), (4, 17, 9)),
    ((3, 1, 16, 8), (5, 8, 24)),
    ((2, 4096), (4096, 3)),
    ((70_000, 2, 3), (70_000, 3, 2)),
    ((300_000, 8), (8, 1)),
]


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("int64")], ids=str)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_products(a: Any, b: Any, dtype: Any) -> None:
    x, y = (10 * numbers(shape, "f8", seed) for seed, shape in enumerate((a, b)))
    x, y = (each.astype(dtype) if dtype.kind == "i" else (each / 10).astype(dtype) for each in (x, y))
    got = matmul_kernels.product(xp, xp.asarray(x), xp.asarray(y))
    assert got.dtype == dtype
    close(got, np.asarray(x.astype("f8") @ y.astype("f8")), "float64" if dtype.kind == "i" else dtype)


def test_the_library_is_the_one_beside_cupys_and_tf32_is_a_choice() -> None:
    library = cublaslt.library(xp)
    assert library is not None
    assert library.version // 10000 == xp.cuda.runtime.runtimeGetVersion() // 1000
    x = numbers((256, 512), "f4")
    y = numbers((512, 256), "f4", 1)
    errors = []
    for allowed in (False, True):
        ddp.backends.cuda.matmul.allow_tf32 = allowed
        errors.append(np.abs(xp.asnumpy(gemm.gemm(xp, xp.asarray(x), xp.asarray(y))) - x.astype("f8") @ y).max())
    ddp.backends.cuda.matmul.allow_tf32 = False
    assert errors[0] < 1e-4 < errors[1] < 0.1


# Graphs ---------------------------------------------------------------------------------------------------------------


def trained(optimizer: str, graphed: bool, scaled: bool) -> list[Any]:
    ddp.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Dropout(0.2),
        nn.Linear(64, 4),
    ).to("cuda")
    optim = getattr(ddp.optim, optimizer)(model.parameters(), lr=0.01)
    schedule = ddp.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    scaler = ddp.amp.GradScaler(init_scale=2.0**10, enabled=scaled)

    def step(x: Any, y: Any) -> Any:
        optim.zero_grad()
        with ddp.amp.autocast("cuda", enabled=scaled):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optim)
        scaler.update()
        return loss

    call = ddp.cuda.graphed_step(step) if graphed else step
    dice = np.random.default_rng(0)
    losses = []
    reserved = []
    for _ in range(10):
        x = ddp.tensor(dice.standard_normal((32, 1, 8, 8)).astype(np.float32)).pin_memory()
        y = ddp.tensor(dice.integers(0, 4, 32))
        losses.append(call(x, y).item() if graphed else call(x.to("cuda"), y.to("cuda")).item())
        schedule.step()
        reserved.append(ddp.cuda.memory_reserved())
    if graphed:
        assert call.captures == 1
        assert reserved[-1] == reserved[-4], "a replay allocates nothing"
    return [losses, *[x.detach().cpu().numpy() for x in (*model.parameters(), *model.buffers())]]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_replays_are_eager_steps(optimizer: str, scaled: bool) -> None:
    eager, graphed = (trained(optimizer, each, scaled) for each in (False, True))
    for a, b in zip(eager, graphed, strict=True):
        # The same kernels on the same numbers; a library may choose another algorithm within a capture.
        assert_allclose(a, b, rtol=2e-2 if scaled else 1e-4, atol=1e-3 if scaled else 1e-5)


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_pool_grows_within_a_capture(mode: str) -> None:
    x = ddp.ones(1 << 20, device="cuda")
    g = ddp.cuda.CUDAGraph()
    with ddp.cuda.graph(g, capture_error_mode=mode):
        parts = [x * i for i in range(20)]
    g.replay()
    assert [part[-1].item() for part in parts] == list(range(20))


# Streams, copies, errors ----------------------------------------------------------------------------------------------


def test_only_the_current_stream_is_waited_for() -> None:
    s = ddp.cuda.Stream()
    x = ddp.ones(4, device="cuda")
    (x + 1).tolist()  # compiles
    with ddp.cuda.stream(s):
        busy(500)
        event = s.record_event()
    assert (x + 1).tolist() == [2.0] * 4
    assert not event.query(), "another stream was waited for"
    s.synchronize()


@pytest.mark.parametrize("which", [(0, 1, 2), (0, None, None), (None, None, 0)])
def test_backward_on_the_streams_of_forward(which: tuple[int | None, ...]) -> None:
    own = [ddp.cuda.Stream() for _ in range(3)]
    expected = gradients("cpu", [None] * 3)
    for _ in range(20):
        for one, other in zip(gradients("cuda", [None if i is None else own[i] for i in which]), expected, strict=True):
            assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_copies_through_pinned_memory() -> None:
    x = ddp.randn(1 << 20, pin_memory=True)
    assert x.is_pinned()
    (x.to("cuda", non_blocking=True) * 2).to("cpu", non_blocking=True)  # compiles, and pins memory
    ddp.cuda.synchronize()
    busy(200)
    there = x.to("cuda", non_blocking=True)
    back = (there * 2).to("cpu", non_blocking=True)
    assert not ddp.cuda.current_stream().query(), "a copy waited"
    ddp.cuda.synchronize()
    assert_array_equal(back.numpy(), x.numpy() * 2)
    assert x.bfloat16().pin_memory().to("cuda", non_blocking=True).float().cpu().tolist() == x.bfloat16().tolist()


def test_memory_outlives_the_other_stream() -> None:
    s = ddp.cuda.Stream()
    for _ in range(5):
        x = ddp.full((1 << 20,), 3.0, device="cuda")
        s.wait_stream(ddp.cuda.current_stream())
        with ddp.cuda.stream(s):
            busy(20)
            y = x * 2
        x.record_stream(s)
        del x
        for i in range(4):
            ddp.full((1 << 20,), float(i), device="cuda")
        s.synchronize()
        assert float(y.min().item()) == float(y.max().item()) == 6.0
    ddp.cuda.synchronize()
    stream_order.collect()
    assert not any(stream_order._pending.values())


BREAKS = """
import cupy, ddp
x = ddp.ones(4, device="cuda")
bad = cupy.RawKernel('extern "C" __global__ void bad(float* p) { p[1ll << 40] = 1.0f; }', "bad")
x.sum().item()
bad((1,), (1,), (cupy.from_dlpack(x),))
try:
    x.sum().item()
except ddp.errors.CudaError as error:
    print(error.status, error)
"""
ASYNC = """
import ddp
ddp.cuda.memory.use("async")
x = ddp.ones(1000, 1000, device="cuda", requires_grad=True)
(x * x).sum().backward()
print(x.grad[0, 0].item(), ddp.cuda.memory_allocated())
"""


@pytest.mark.parametrize(("script", "said"), [(BREAKS, "700 item: "), (ASYNC, "2.0 ")], ids=["breaks", "async"])
def test_processes_of_their_own(script: str, said: str) -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), cwd=root, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith(said), done.stdout + done.stderr


# Memory, other libraries, other processes -----------------------------------------------------------------------------


def test_memory_is_counted_and_a_full_device_goes_on() -> None:
    ddp.cuda.empty_cache()
    held = ddp.cuda.memory_allocated()
    reserved = ddp.cuda.memory_reserved()
    x = ddp.empty(16 * MIB, device="cuda")
    assert ddp.cuda.memory_allocated() == held + 64 * MIB
    del x
    ddp.cuda.empty_cache()
    assert ddp.cuda.memory_reserved() <= reserved
    kept = ddp.ones(1024, 1024, device="cuda", requires_grad=True)
    total = ddp.cuda.mem_get_info()[1]
    with pytest.raises(OutOfMemoryError, match="has no memory for another") as caught:
        ddp.empty(total // 2, device="cuda")
    assert caught.value.total == total
    (kept * 2).sum().backward()
    assert kept.grad is not None
    assert kept.grad[0, 0].item() == 2.0


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_pytorch(name: str, torch: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    x = ddp.tensor([[0, 1, 2], [3, 4, 5]], device="cuda").to(getattr(ddp, name))
    theirs = torch.from_dlpack(x.T)
    assert (theirs.dtype, theirs.data_ptr()) == (getattr(torch, name), x.data_ptr())
    assert theirs.tolist() == x.T.tolist()
    back = ddp.from_dlpack(theirs)
    assert (back.dtype, back.data_ptr(), back.stride()) == (x.dtype, x.data_ptr(), (1, 3))
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.ones(2048, 2048, device="cuda")
        for _ in range(20):
            y = y @ y / 2048
        z = ddp.from_dlpack(y)
    assert z.sum().item() == 2048.0**2, "its stream comes first"


def test_processes_see_each_others_writes_and_memory_is_let_go_of() -> None:
    requests, results = mp.SimpleQueue(), mp.SimpleQueue()
    child = mp.Process(target=gpu_children.answer, args=(requests, results, True))
    child.start()
    try:
        x = ddp.arange(12.0, device="cuda").reshape(3, 4)
        requests.put(x.T[1:])
        assert results.get()[3] == [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]
        assert x.tolist() == [[0.0, 2.0, 3.0, 4.0], [4.0, 6.0, 7.0, 8.0], [8.0, 10.0, 11.0, 12.0]]
        requests.put(None)
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
    wait_until(lambda: not ipc.exported.collect())
