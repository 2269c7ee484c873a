"""One rank on a real GPU: `python on_gpu.py BACKEND TRANSPORT`, under an engine or alone."""

from __future__ import annotations

import sys
from typing import Any

import cupy
import numpy as np

import collectives
from tests.collectives.backends.device.contract import contract


def overlap(comm: Any) -> None:
    """Large arrays, made by kernels that are still running, on two streams; freed and overwritten at once."""
    works = []
    for i in range(6):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(3_000_000, np.float32)
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


def capture(comm: Any) -> None:
    """An all_reduce in a graph, launched again with other numbers."""
    x = cupy.ones(1000, np.float32)
    y = cupy.zeros(1000, np.float32)
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


def main() -> None:
    backend, transport = sys.argv[1:]
    comm = collectives.init(backend, timeout=60)
    contract(comm, cupy)
    assert comm._device_communicator is not None
    assert comm._device_communicator._device_transport is not None
    assert comm._device_communicator._device_transport.name == transport
    overlap(comm)
    if transport == "NCCL":
        capture(comm)
    print(f"rank {comm.rank}: contract kept")


if __name__ == "__main__":
    main()
