"""What ranks that are processes do with arrays on a GPU, fake or real."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal


def contract(comm: Any, cupy: Any) -> None:
    """Every collective on device arrays, beside the same one on host arrays."""

    def same(x: Any, y: Any) -> None:
        assert (x is None) == (y is None)
        if y is not None:
            got = x.get()
            assert (got.dtype, got.shape) == (y.dtype, y.shape)
            assert_allclose(got, y, rtol=1e-6) if y.dtype.kind in "fc" else assert_array_equal(got, y)

    for dtype in (np.float32, np.float16, np.complex64, np.int16, np.int64, np.uint8):
        host = (np.arange(35).reshape(7, 5) % 3 + comm.rank + 1).astype(dtype)
        x = cupy.asarray(host)
        for op in ("sum", "mean", "prod") + (() if host.dtype.kind == "c" else ("max", "min")):
            same(comm.all_reduce(x, op), comm.all_reduce(host, op))
            same(comm.reduce(x, op, comm.size - 1), comm.reduce(host, op, comm.size - 1))
            same(comm.reduce_scatter(x, op), comm.reduce_scatter(host, op))
        if host.dtype.kind in "fc":
            same(comm.all_reduce(x, scale=0.25), comm.all_reduce(host, scale=0.25))
        uneven = host[: comm.rank + 1]
        same(comm.all_gather(x[: comm.rank + 1]), comm.all_gather(uneven))
        same(comm.all_gather(x, lengths="equal"), comm.all_gather(host, lengths="equal"))
        same(comm.gather(x[: comm.rank + 1]), comm.gather(uneven))
        same(comm.scatter(x), comm.scatter(host))
        same(comm.all_to_all(x), comm.all_to_all(host))
        comm.broadcast(x, comm.size - 1)
        comm.broadcast(host, comm.size - 1)
        same(x, host)
    works = [comm.all_reduce(cupy.asarray(np.full(1000, float(i))), async_op=True) for i in range(20)]
    for i, work in enumerate(works):
        same(work.wait(), np.full(1000, float(i * comm.size)))
    twin = comm.duplicate()
    same(twin.all_reduce(cupy.asarray(np.ones(3))), np.full(3, float(comm.size)))
    twin.close()
    part = comm.split(comm.rank % 2, -comm.rank)
    same(part.all_gather(cupy.asarray(np.array([comm.rank]))), part.all_gather(np.array([comm.rank])))
    same(part.all_reduce(cupy.asarray(np.ones(3))), np.full(3, float(part.size)))
    part.close()


def overlap(comm: Any, cupy: Any) -> None:
    """Large arrays, made by kernels that are still running, on two streams; freed and overwritten at once."""
    count = 3_000_000
    works = []
    for i in range(6):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(count, np.float32)
            for _ in range(20):
                x += 1
            works.append((i, comm.all_reduce(x * (i + comm.rank), async_op=True)))
            x[:] = -1
            del x
    for i, work in works:
        expected = 20 * sum(i + rank for rank in range(comm.size))
        with cupy.cuda.Stream(non_blocking=True):
            y = work.wait() + 1
            assert float(y.min()) == float(y.max()) == expected + 1


def capture(comm: Any, cupy: Any) -> None:
    """An all_reduce in a graph, launched again with other numbers."""
    x, y = cupy.ones(1000, np.float32), cupy.zeros(1000, np.float32)
    comm.all_reduce(x, out=y)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        comm.all_reduce(x, out=y)
        graph = stream.end_capture()
        for number in (2, 3):
            x.fill(number)
            graph.launch(stream)
            assert float(y.sum()) == 1000 * number * comm.size
