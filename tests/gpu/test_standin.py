"""The stand-in itself: what it takes, what it refuses, what it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from tests.gpu import simulated


def test_a_tensor_there_and_back(gpu: Any) -> None:
    x = ddp.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda", requires_grad=True)
    gpu.reset()
    y = (x @ x).relu().sum()
    y.backward()
    assert not gpu.synchronizations
    assert sum(gpu.launches.values()) > 5
    assert y.item() == 54.0
    assert gpu.synchronizations == {"item": 1}
    assert "test_standin.py" in gpu.waits[0][1]
    np.testing.assert_array_equal(x.grad.cpu().numpy(), [[7, 11], [9, 13]])


def test_what_cupy_refuses(gpu: Any) -> None:
    cupy = gpu.cupy
    x = cupy.ones((2, 2), np.float32)
    for wrong in (lambda: np.asarray(x), lambda: x + np.ones((2, 2)), lambda: np.ones((2, 2)) * x):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="fill"):
        x[...] = np.ones((2, 2))
    with pytest.raises(AttributeError):
        cupy.nanpercentile  # noqa: B018
    with cupy.cuda.Device(1):
        other = cupy.ones((2, 2))
    with pytest.raises(ValueError, match="current device"):
        x + other


def test_memory_comes_from_the_pool(gpu: Any) -> None:
    cupy = gpu.cupy
    pool = cupy.get_default_memory_pool()
    x = cupy.ones(1000, np.float32)
    assert (gpu.mallocs, pool.used_bytes(), pool.total_bytes()) == (1, 4096, 4096)
    del x
    assert (pool.used_bytes(), pool.total_bytes(), pool.free_bytes()) == (0, 4096, 4096)
    x = cupy.empty(1000, np.float32)
    assert (x.get().view(np.uint8) == 0xA5).all()  # somebody else's by now
    assert gpu.mallocs == 1
    del x
    pool.free_all_blocks()
    assert (gpu.frees, pool.total_bytes()) == (1, 0)
    pool.set_limit(4096)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(10000)


@pytest.mark.parametrize("gpu", simulated(5), indirect=True)
def test_work_is_done_later(gpu: Any) -> None:
    x = ddp.tensor(np.arange(12.0).reshape(3, 4), device="cuda", requires_grad=True)
    y = ((x.T.contiguous() * 2).exp().sum(0) + x.mean()).softmax(0)[1:].sum()
    y.backward()
    there = x.detach().cpu().requires_grad_()
    z = ((there.T.contiguous() * 2).exp().sum(0) + there.mean()).softmax(0)[1:].sum()
    z.backward()
    np.testing.assert_allclose(x.grad.cpu().numpy(), there.grad.numpy())


@pytest.mark.parametrize("gpu", simulated(3), indirect=True)
def test_pinned_memory_is_read_when_the_stream_comes_to_it(gpu: Any) -> None:
    """Whoever pinned it, and also by calls that are not given a stream."""
    cupy = gpu.cupy
    pinned, pageable = np.zeros(2048, np.float32), np.zeros(2048, np.float32)
    cupy.cuda.runtime.hostRegister(pinned.ctypes.data, pinned.nbytes)
    late = []
    for source in (pinned, pageable):
        made = cupy.empty(2048, np.float32)
        made.set(source)
        late += [made, cupy.asarray(source)]
    kept = cupy.asarray(pinned, blocking=True)
    assert sum(gpu.synchronizations.values()) == 1
    more = cupy.asarray(pinned)
    pinned += 1
    pageable += 1
    assert [x.get()[0] for x in (*late, kept, more)] == [0, 0, 0, 0, 0, 1]


def test_a_stream_s_context_ends_on_the_one_around_it(gpu: Any) -> None:
    """As CuPy's: it does not know of what `use` has made current."""
    cuda = gpu.cupy.cuda
    first, second, third = (cuda.Stream(non_blocking=True) for _ in range(3))
    with first:
        second.use()
        with third:
            assert cuda.get_current_stream() == third
        assert cuda.get_current_stream() == first
        second.use()
        gpu.cupy.ones((2, 3)).T.get()  # under a context of CuPy's own
        assert cuda.get_current_stream() == first
    assert cuda.get_current_stream() == cuda.Stream.null
    with cuda.Device(1), pytest.raises(RuntimeError, match="does not match with the current device"):
        first.use()
