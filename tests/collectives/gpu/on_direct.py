"""One rank whose GPU is fake and whose memory the MPI reads, since it is the host's: `python on_direct.py`."""

from __future__ import annotations

import mpi4py

import collectives
from collectives._gpu import choosing, cuda, probe, trial
from tests.collectives.gpu.bodies import contract
from tests.collectives.gpu.cupy_fake import FakeCupy
from tests.collectives.gpu.machine import Machine

DEVICES = 4


def no_library() -> None:
    raise collectives.BackendError("there is no NCCL here")


def main() -> None:
    cupy = FakeCupy(Machine(eager=True), DEVICES)
    cuda.why_absent = lambda: None  # type: ignore[assignment]
    cuda.load = lambda index=None: cuda.Cuda(cupy, cupy.local.device if index is None else index)  # type: ignore
    choosing.library.load = no_library  # type: ignore[assignment]
    probe.verdict = lambda device, limit: ""  # type: ignore[assignment]
    comm = collectives.init(timeout=20)
    cupy.cuda.Device(comm.local_rank).use()
    contract(comm, cupy)
    carrier = comm._door._carrier
    assert carrier is not None
    assert carrier.name == "MPI"
    assert mpi4py.rc.finalize is False
    from mpi4py import MPI

    assert trial.arrives(cuda.load(), MPI)
    print(f"rank {comm.rank}: contract kept")


if __name__ == "__main__":
    main()
