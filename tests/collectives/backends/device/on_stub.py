"""One rank whose GPU is fake and whose NCCL is the stub: `python on_stub.py LIBRARY CASE`, under an engine or alone."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import numpy as np

import collectives
from collectives.backends.device import cuda, negotiation
from collectives.backends.nccl import library
from collectives.backends.nccl.table import Nccl
from tests.collectives.backends.device.bodies import contract
from tests.collectives.backends.device.machine import Machine
from tests.collectives.backends.nccl.stub.build import Stub
from tests.gpu.standin import Cupy

DEVICES = 4


def rank(path: str) -> Any:
    """A CuPy whose kernels wait for what the stub has on their stream."""
    stub = Stub(path)
    machine = Machine(eager=True)
    machine.before = lambda handle: stub.record(handle).wait() is None
    cupy = Cupy(machine, DEVICES)
    cuda.why_absent = lambda: None  # type: ignore[assignment]
    cuda.load = lambda index=None: cuda.Cuda(cupy, cupy.local.device if index is None else index)  # type: ignore
    load = library.load
    negotiation.library.load = lambda: load(path=path)  # type: ignore[assignment]
    return cupy


def counted() -> dict[str, int]:
    """How many NCCL communicators are made from now on, in which way."""
    made = {"ncclCommSplit": 0, "ncclGetUniqueId": 0}
    call = Nccl.call

    def count(self: Nccl, name: str, *arguments: Any) -> Any:
        if name in made:
            made[name] += 1
        return call(self, name, *arguments)

    Nccl.call = count  # type: ignore[method-assign]
    return made


def moved_without_copies(comm: Any, cupy: Any, stub: Stub) -> None:
    """Arrays in NCCL's own memory, made and given back while others live."""
    kept = [comm.empty(1000 * n, np.float32, like=cupy.empty(0)) for n in (1, 2, 3)]
    assert stub.memories() == (3, 3)
    for x in kept:
        x[...] = comm.rank + 1
        comm.all_reduce(x, out=x)
        assert set(x.get()) == {comm.size * (comm.size + 1) / 2}
    del kept[1], x
    gc.collect()
    time.sleep(0.2)  # until nothing is in flight any more
    comm.barrier()
    comm.empty(0, np.float32, like=cupy.empty(0))
    assert stub.memories() == (3, 3), "nothing is looked at where nothing is asked for"
    last = comm.empty(10, np.float32, like=cupy.empty(0))
    assert stub.memories() == (3, 3), "one was given back, and one made"
    assert not last.get().any()
    print(f"rank {comm.rank}: moved without copies")


def late_once(comm: Any, cupy: Any) -> None:
    """In a job's first attempt the last rank does not come to a collective; whoever waits for it ends by the limit."""
    x = cupy.asarray(np.ones(4))
    comm.all_reduce(x)
    if os.environ["DDP_ATTEMPT"] == "0" and comm.rank == comm.size - 1:
        time.sleep(60)
    total = comm.all_reduce(x)
    comm.barrier()
    print(f"rank {comm.rank}: attempt {os.environ['DDP_ATTEMPT']}, {total.get()[0]:.0f}")


def main() -> None:
    path, case = sys.argv[1:]
    cupy = rank(path)
    if case in ("windows", "late"):
        comm = collectives.init("nccl", timeout=20 if case == "windows" else 6)
        moved_without_copies(comm, cupy, Stub(path)) if case == "windows" else late_once(comm, cupy)
        return
    comm = collectives.init("auto" if case == "auto" else "nccl", timeout=20)
    if case == "auto":
        cupy.cuda.Device(comm.local_rank).use()  # as a program does that asks for nothing by name
    else:
        assert comm.backend == "nccl"
        assert cupy.local.device == comm.local_rank, "every rank should stand at a GPU of its own"
    made = counted()
    contract(comm, cupy)
    transport = comm._device_communicator._device_transport
    assert transport is not None
    assert transport.name == "NCCL"
    print(f"rank {comm.rank}: contract kept, {made['ncclCommSplit']} splits, {made['ncclGetUniqueId']} ids")


if __name__ == "__main__":
    main()
