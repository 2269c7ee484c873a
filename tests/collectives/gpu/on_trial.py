"""A rank that has its MPI tried as `probe` does it, on a fake GPU; with the argument `trial`, the trial itself."""

from __future__ import annotations

import sys

import mpi4py

from collectives._gpu import cuda, probe, trial
from tests.collectives.gpu.cupy_fake import FakeCupy
from tests.collectives.gpu.machine import Machine

mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  # after the setting

if sys.argv[1:] == ["trial"]:
    size = MPI.COMM_WORLD.size
    arrived = trial.arrives(cuda.Cuda(FakeCupy(Machine(eager=True), 1), 0), MPI)
    MPI.Finalize()
    print(probe.PROVEN if arrived and size == 1 else f"a world of {size}")
else:
    reason = probe.prove([sys.executable, __file__, "trial"], 30)
    sys.stdout.write(f"rank {MPI.COMM_WORLD.rank}: {reason or 'proven'}\n")
    sys.stdout.flush()
    MPI.Finalize()
