"""One rank whose GPU is fake and whose NCCL is the stub: `python on_stub.py LIBRARY CASE`, under an engine or alone."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import numpy as np

import collectives
from collectives.backends.device import cuda, negotiation
from collectives.backends.nccl.library import Nccl
from tests.collectives.backends.device.contract import contract
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
    negotiation.library.load = lambda: Nccl(ctypes.CDLL(path), path)  # type: ignore[assignment]
    return cupy


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
    if case == "late":
        late_once(collectives.init("nccl", timeout=6), cupy)
        return
    comm = collectives.init("auto" if case == "auto" else "nccl", timeout=20)
    if case == "auto":
        cupy.cuda.Device(comm.local_rank).use()  # as a program does that asks for nothing by name
    else:
        assert comm.backend == "nccl"
        assert cupy.local.device == comm.local_rank, "every rank should stand at a GPU of its own"
    contract(comm, cupy)
    transport = comm._device_communicator._device_transport
    assert transport is not None
    assert transport.name == "NCCL"
    print(f"rank {comm.rank}: contract kept")


if __name__ == "__main__":
    main()
